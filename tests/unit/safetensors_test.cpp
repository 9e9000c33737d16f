#include "base/safetensors.hpp"

#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <numeric>
#include <string>

#include "support.hpp"

namespace lockstep::test::safetensors_test {
namespace {

/// Written by Python's safetensors 0.8.0: save_file({"w": [[1, -2.5], [0, 3]] as float32, "b": [1,
/// -1] as int64, "mask": [True, False, True], "half": 1.5 as bfloat16, "none": zeros(0, 4)},
/// metadata={"format": "pt"}).
constexpr char kGoldenText[] =
    "@\x01\x00\x00\x00\x00\x00\x00"
    R"({"__metadata__":{"format":"pt"},"b":{"dtype":"I64","shape":[2],"data_offsets":[0,16]},)"
    R"("none":{"dtype":"F32","shape":[0,4],"data_offsets":[16,16]},)"
    R"("w":{"dtype":"F32","shape":[2,2],"data_offsets":[16,32]},)"
    R"("half":{"dtype":"BF16","shape":[],"data_offsets":[32,34]},)"
    R"("mask":{"dtype":"BOOL","shape":[3],"data_offsets":[34,37]}})"
    "\x01\x00\x00\x00\x00\x00\x00\x00\xff\xff\xff\xff\xff\xff\xff\xff"
    "\x00\x00\x80?\x00\x00 \xc0\x00\x00\x00\x00\x00\x00@@"
    "\xc0?"
    "\x01\x00\x01";
const std::string kGolden(kGoldenText, sizeof(kGoldenText) - 1);

/// The bytes of a file with this header and that many zero bytes of data.
std::string file_of(const std::string& header, size_t data_bytes = 0) {
  std::array<char, 8> length{};
  const uint64_t count = header.size();
  std::memcpy(length.data(), &count, length.size());
  return std::string(length.data(), length.size()) + header + std::string(data_bytes, '\0');
}

std::string entry(const std::string& dtype, const std::string& shape, const std::string& offsets) {
  return R"({"dtype":")" + dtype + R"(","shape":)" + shape + R"(,"data_offsets":)" + offsets + "}";
}

class SafetensorsTest : public testing::Test {
 protected:
  // Every error names the file and has a remedy.
  void expect_refused(const std::string& bytes, std::initializer_list<std::string> fragments) {
    write_bytes(path_, bytes);
    SCOPED_TRACE(bytes.substr(0, 300));
    expect_error(Code::kFileFormat, {path_}, [&] { SafetensorsReader reader(path_); });
    expect_error(Code::kFileFormat, fragments, [&] { SafetensorsReader reader(path_); });
  }

  test::ScratchFolder scratch_;
  std::string path_ = scratch_.file("weights.safetensors");
};

template <class T>
std::vector<T> values_of(const SafetensorsReader& reader, const std::string& name) {
  const TensorInfo* info = reader.find(name);
  if (info == nullptr) throw std::runtime_error("no tensor " + name);
  std::vector<T> values(static_cast<size_t>(info->bytes()) / sizeof(T));
  reader.read(*info, std::as_writable_bytes(std::span(values)));
  return values;
}

TEST_F(SafetensorsTest, ReadsWhatPythonWrote) {
  write_bytes(path_, kGolden);
  const SafetensorsReader reader(path_);
  EXPECT_EQ(reader.path(), path_);
  EXPECT_EQ(reader.metadata(), (std::map<std::string, std::string>{{"format", "pt"}}));
  std::vector<std::string> names;
  for (const auto& info : reader.tensors()) names.push_back(info.name);
  EXPECT_EQ(names, (std::vector<std::string>{"b", "none", "w", "half", "mask"}));
  EXPECT_EQ(values_of<float>(reader, "w"), (std::vector<float>{1, -2.5, 0, 3}));
  EXPECT_EQ(values_of<int64_t>(reader, "b"), (std::vector<int64_t>{1, -1}));
  EXPECT_EQ(values_of<uint8_t>(reader, "mask"), (std::vector<uint8_t>{1, 0, 1}));
  EXPECT_EQ(values_of<uint16_t>(reader, "half"), (std::vector<uint16_t>{0x3fc0}));
  EXPECT_TRUE(values_of<float>(reader, "none").empty());
  EXPECT_EQ(reader.find("none")->shape, (std::vector<int64_t>{0, 4}));
  EXPECT_TRUE(reader.find("half")->shape.empty());
  EXPECT_EQ(reader.find("W"), nullptr);
}

TEST_F(SafetensorsTest, WritesByteForByteWhatPythonWrites) {
  const std::vector<float> w = {1, -2.5, 0, 3};
  const std::vector<int64_t> b = {1, -1};
  const std::vector<uint8_t> mask = {1, 0, 1};
  const std::vector<uint16_t> half = {0x3fc0};
  write_safetensors(path_,
                    {{"mask", Dtype::kBool, {3}, std::as_bytes(std::span(mask))},
                     {"w", Dtype::kF32, {2, 2}, std::as_bytes(std::span(w))},
                     {"none", Dtype::kF32, {0, 4}, {}},
                     {"half", Dtype::kBF16, {}, std::as_bytes(std::span(half))},
                     {"b", Dtype::kI64, {2}, std::as_bytes(std::span(b))}},
                    {{"format", "pt"}});
  EXPECT_EQ(test::read_bytes(path_), kGolden);
}

TEST_F(SafetensorsTest, EveryDtypeSurvivesTheRoundTripAligned) {
  const std::array dtypes = {Dtype::kBool, Dtype::kU8,  Dtype::kI8,   Dtype::kI16, Dtype::kI32,
                             Dtype::kI64,  Dtype::kF16, Dtype::kBF16, Dtype::kF32, Dtype::kF64};
  std::vector<std::vector<std::byte>> contents;
  std::vector<TensorBytes> tensors;
  for (const Dtype dtype : dtypes) {
    auto& bytes = contents.emplace_back(static_cast<size_t>(3 * dtype_bytes(dtype)));
    for (size_t i = 0; i < bytes.size(); ++i)
      bytes[i] = std::byte(dtype == Dtype::kBool ? i % 2 : i * 37);
    tensors.push_back({"größe/" + std::string(dtype_name(dtype)), dtype, {1, 3}, bytes});
  }
  write_safetensors(path_, tensors, {{"quote\"", "new\nline"}});
  SafetensorsReader first(path_);
  const SafetensorsReader reader = std::move(first);
  EXPECT_EQ(reader.metadata().at("quote\""), "new\nline");
  ASSERT_EQ(reader.tensors().size(), dtypes.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    const TensorInfo* info = reader.find(tensors[i].name);
    ASSERT_NE(info, nullptr) << tensors[i].name;
    EXPECT_EQ(info->dtype, tensors[i].dtype);
    EXPECT_EQ(info->shape, tensors[i].shape);
    EXPECT_EQ(info->begin % dtype_bytes(info->dtype), 0) << tensors[i].name;
    EXPECT_EQ(values_of<std::byte>(reader, tensors[i].name), contents[i]);
  }
  const std::string file = test::read_bytes(path_);
  EXPECT_EQ(static_cast<unsigned char>(file[0]) % 8, 0) << "the data does not start on 8 bytes";
}

TEST_F(SafetensorsTest, AFileMayHoldNothing) {
  write_safetensors(path_, {});
  EXPECT_TRUE(SafetensorsReader(path_).tensors().empty());
  write_bytes(path_, file_of("{}"));
  EXPECT_TRUE(SafetensorsReader(path_).tensors().empty());
  write_bytes(path_, file_of("{}      \n\t"));
  EXPECT_TRUE(SafetensorsReader(path_).tensors().empty());
}

TEST_F(SafetensorsTest, EmptyTensorsMayShareAnOffsetAndHaveHugeOtherDimensions) {
  write_bytes(path_,
              file_of(R"({"z":)" + entry("F32", "[1]", "[0,4]") + R"(,"y":)" +
                          entry("F64", "[0,9223372036854775807,9223372036854775807]", "[4,4]") +
                          R"(,"x":)" + entry("I8", "[0]", "[0,0]") + "}",
                      4));
  const SafetensorsReader reader(path_);
  EXPECT_EQ(reader.tensors()[0].name, "x");
  EXPECT_EQ(reader.tensors()[1].name, "z");
  EXPECT_EQ(reader.tensors()[2].name, "y");
}

TEST_F(SafetensorsTest, FilesThatCannotBeReadAreNotCalledDamaged) {
  expect_error(Code::kFileRead, {path_, "No such file"}, [&] { SafetensorsReader reader(path_); });
  expect_error(Code::kFileRead, {"it is a folder"},
               [&] { SafetensorsReader reader(scratch_.file("")); });
  ASSERT_EQ(::mkfifo(path_.c_str(), 0600), 0);
  expect_error(Code::kFileRead, {"not a regular file"}, [&] { SafetensorsReader reader(path_); });
}

TEST_F(SafetensorsTest, AFileCutWhileOpenIsAnError) {
  write_bytes(path_, kGolden);
  const SafetensorsReader reader(path_);
  ASSERT_EQ(::truncate(path_.c_str(), static_cast<off_t>(kGolden.size() - 10)), 0);
  expect_error(Code::kFileRead, {path_, "became shorter"}, [&] { values_of<float>(reader, "w"); });
  EXPECT_EQ(values_of<int64_t>(reader, "b"), (std::vector<int64_t>{1, -1}));
}

TEST_F(SafetensorsTest, ReadChecksTheRoomAndTheTensor) {
  write_bytes(path_, kGolden);
  const SafetensorsReader reader(path_);
  std::vector<std::byte> room(15);
  expect_error(Code::kTensorMismatch, {R"(tensor "w")", "16 bytes", "room for 15"},
               [&] { reader.read(*reader.find("w"), room); });
  for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{0, 38}, {-1, 3}, {5, 4}}) {
    const TensorInfo foreign{"foreign", Dtype::kU8, {}, begin, end};
    expect_error(Code::kTensorMismatch, {"does not come from"},
                 [&] { reader.read(foreign, room); });
  }
}

TEST_F(SafetensorsTest, ABoolThatIsNeitherIsRefused) {
  std::string bytes = kGolden;
  bytes.back() = '\x07';
  write_bytes(path_, bytes);
  const SafetensorsReader reader(path_);
  expect_error(Code::kFileFormat, {R"(tensor "mask" holds 7 at element 2)"},
               [&] { values_of<uint8_t>(reader, "mask"); });
}

TEST_F(SafetensorsTest, WritingRefusesWhatReadersWouldRefuse) {
  const std::array<std::byte, 4> bytes{};
  const auto write = [&](std::vector<TensorBytes> tensors) {
    return [this, tensors] { write_safetensors(path_, tensors); };
  };
  expect_error(Code::kTensorMismatch, {"name is empty"}, write({{"", Dtype::kF32, {1}, bytes}}));
  expect_error(Code::kTensorMismatch, {"reserves this name"},
               write({{"__metadata__", Dtype::kF32, {1}, bytes}}));
  expect_error(Code::kTensorMismatch, {R"("a")", "same name"},
               write({{"a", Dtype::kF32, {1}, bytes}, {"a", Dtype::kU8, {4}, bytes}}));
  expect_error(Code::kTensorMismatch, {"F32 [2] does not make the 4 bytes"},
               write({{"a", Dtype::kF32, {2}, bytes}}));
  expect_error(Code::kTensorMismatch, {"shape holds -1"}, write({{"a", Dtype::kF32, {-1}, bytes}}));
  expect_error(Code::kTensorMismatch, {"does not make"},
               write({{"a", Dtype::kF32, {INT64_MAX, INT64_MAX}, bytes}}));
  expect_error(Code::kTensorMismatch, {"64 dimensions"},
               write({{"a", Dtype::kF32, std::vector<int64_t>(65, 1), bytes}}));
  expect_error(Code::kTensorMismatch, {"not UTF-8"}, write({{"\xff", Dtype::kF32, {1}, bytes}}));
  EXPECT_EQ(scratch_.count(), 0U);
  expect_error(Code::kFileWrite, {"make its folder first"},
               [&] { write_safetensors(scratch_.file("no/a"), {}); });
}

// A file with one tensor "t".
std::string one(const std::string& dtype, const std::string& shape, const std::string& offsets) {
  return R"({"t":)" + entry(dtype, shape, offsets) + "}";
}

TEST_F(SafetensorsTest, EveryTruncationIsRefused) {
  for (size_t length = 0; length < kGolden.size(); ++length) {
    write_bytes(path_, kGolden.substr(0, length));
    SCOPED_TRACE(length);
    expect_error(Code::kFileFormat, {path_}, [&] { SafetensorsReader reader(path_); });
  }
}

TEST_F(SafetensorsTest, EveryExtensionIsRefused) {
  expect_refused(kGolden + '\0', {"end at byte 37", "38 bytes of data"});
}

// What a damaged header says must be consistent with the file.
void check_structure(const SafetensorsReader& reader, int64_t file_bytes) {
  int64_t covered = 0;
  for (const auto& info : reader.tensors()) {
    ASSERT_FALSE(info.name.empty());
    ASSERT_EQ(info.begin, covered);
    const int64_t elements =
        std::accumulate(info.shape.begin(), info.shape.end(), int64_t{1}, std::multiplies<>());
    ASSERT_EQ(info.bytes(), elements * dtype_bytes(info.dtype));
    ASSERT_EQ(reader.find(info.name), &info);
    covered = info.end;
  }
  ASSERT_LE(covered, file_bytes - 8);
}

TEST_F(SafetensorsTest, EveryByteFlipOfTheHeaderIsRefusedOrSound) {
  const size_t header_end = 8 + 320;
  int refused = 0;
  int accepted = 0;
  for (size_t position = 0; position < header_end; ++position) {
    for (const int flip : {0x01, 0x02, 0x04, 0x08, 0x10, 0x20, 0x40, 0x80, 0xff}) {
      std::string bytes = kGolden;
      bytes[position] = static_cast<char>(bytes[position] ^ flip);
      write_bytes(path_, bytes);
      SCOPED_TRACE(testing::Message() << "byte " << position << " flip " << flip);
      try {
        const SafetensorsReader reader(path_);
        check_structure(reader, static_cast<int64_t>(bytes.size()));
        ++accepted;
      } catch (const Error& error) {
        ASSERT_EQ(error.code(), Code::kFileFormat) << error.block();
        ++refused;
      }
    }
  }
  // Only changes to letters of names and metadata may go unnoticed.
  EXPECT_GT(refused, 8 * accepted);
}

TEST_F(SafetensorsTest, RefusesABadLength) {
  expect_refused("", {"has 0 bytes", "fewer than the 8"});
  expect_refused("1234567", {"has 7 bytes"});
  expect_refused(std::string("\x03\0\0\0\0\0\0\0{}", 10), {"3 bytes", "only 2 follow"});
  expect_refused(std::string("\xff\xff\xff\xff\xff\xff\xff\xff{}", 10),
                 {"18446744073709551615 bytes"});
  expect_refused(std::string("\0\0\0\0\0\0\0\x80{}", 10), {"9223372036854775808 bytes"});
  expect_refused(std::string("\x01\xe1\xf5\x05\0\0\0\0{}", 10), {"100000001 bytes", "100000000"});
  expect_refused(std::string(8, '\0'), {"does not start with '{'"});
}

TEST_F(SafetensorsTest, RecognisesTorchSave) {
  expect_refused("PK\x03\x04 and the rest of an archive",
                 {"torch.save file", "save_file(torch.load"});
  expect_refused("\x80\x02}q\x01(X\x06 and the rest of a pickle", {"torch.save file"});
}

TEST_F(SafetensorsTest, RefusesAHeaderThatIsNoJsonObject) {
  expect_refused(file_of(""), {"does not start with '{'"});
  expect_refused(file_of("[]"), {"does not start with '{'"});
  expect_refused(file_of(" {}"), {"does not start with '{'"});
  expect_refused(file_of("\xEF\xBB\xBF{}"), {"does not start with '{'"});
  expect_refused(file_of("{"), {"not valid JSON at byte 2"});
  expect_refused(file_of("{} x"), {"not valid JSON"});
  expect_refused(file_of("{}{}"), {"not valid JSON"});
  expect_refused(file_of(R"({"a":})"), {"not valid JSON at byte 6"});
  expect_refused(file_of(R"({"a":{},})"), {"not valid JSON"});
  expect_refused(file_of(std::string("{}\0garbage", 10)), {"NUL byte"});
  expect_refused(file_of("{\"\xff\xfe\":{}}"), {"not valid JSON"});
  expect_refused(file_of("{\"\xc0\xaf\":{}}"), {"not valid JSON"});
  expect_refused(file_of(R"({"\ud800":{}})"), {"not valid JSON"});
  expect_refused(file_of(R"({"a":1e999})"), {"out of range"});
}

TEST_F(SafetensorsTest, RefusesDuplicateKeysAtEveryLevel) {
  const std::string t = entry("U8", "[1]", "[0,1]");
  expect_refused(file_of(R"({"t":)" + t + R"(,"t":)" + t + "}", 1), {R"(key "t" twice)"});
  expect_refused(file_of(R"({"t":)" + t + R"(,"\u0074":)" + t + "}", 1), {R"(key "t" twice)"});
  expect_refused(file_of(R"({"t":{"dtype":"U8","shape":[1],"shape":[1],"data_offsets":[0,1]}})", 1),
                 {R"(key "shape" twice)"});
  expect_refused(file_of(R"({"__metadata__":{"a":"1","a":"2"}})"), {R"(key "a" twice)"});
  expect_refused(file_of(R"({"__metadata__":{},"__metadata__":{}})"),
                 {R"(key "__metadata__" twice)"});
}

TEST_F(SafetensorsTest, RefusesNestingBombs) {
  expect_refused(file_of(R"({"t":)" + std::string(1'000'000, '[')), {"nests deeper than 3"});
  std::string objects = "{";
  for (int i = 0; i < 100'000; ++i) objects += R"("a":{)";
  expect_refused(file_of(objects), {"nests deeper than 3"});
  expect_refused(file_of(one("U8", "[[1]]", "[0,1]"), 1), {"nests deeper than 3"});
}

TEST_F(SafetensorsTest, RefusesWrongTypes) {
  expect_refused(file_of(R"({"t":1})"), {R"(entry of tensor "t" is not an object)"});
  expect_refused(file_of(R"({"t":[]})"), {R"(entry of tensor "t" is not an object)"});
  expect_refused(file_of(R"({"t":{}})"), {R"(tensor "t" has no dtype)"});
  expect_refused(file_of(R"({"t":{"dtype":"U8"}})"), {R"(tensor "t" has no shape)"});
  expect_refused(file_of(R"({"t":{"dtype":"U8","shape":[]}})"),
                 {R"(tensor "t" has no data_offsets)"});
  expect_refused(file_of(R"({"t":{"dtype":8,"shape":[],"data_offsets":[0,1]}})", 1),
                 {R"(dtype of tensor "t" is not a text)"});
  expect_refused(file_of(R"({"t":{"dtype":"U8","shape":[],"data_offsets":[0,1],"x":0}})", 1),
                 {R"(tensor "t" has 4 fields)"});
  expect_refused(file_of(one("U8", "1", "[0,1]"), 1), {R"(shape of tensor "t" is not a list)"});
  expect_refused(file_of(one("U8", "null", "[0,1]"), 1), {R"(shape of tensor "t" is not a list)"});
  expect_refused(file_of(one("U8", "[1]", "{}"), 1),
                 {R"(data_offsets of tensor "t" is not a list)"});
  expect_refused(file_of(one("U8", "[1]", "[1]"), 1), {"has 1 numbers instead of 2"});
  expect_refused(file_of(one("U8", "[1]", "[0,1,2]"), 1), {"has 3 numbers instead of 2"});
  expect_refused(file_of(R"({"__metadata__":[]})"), {"__metadata__ is not an object"});
  expect_refused(file_of(R"({"__metadata__":{"a":1}})"), {R"(__metadata__ "a" is not a text)"});
}

TEST_F(SafetensorsTest, RefusesUnknownDtypesByName) {
  expect_refused(
      file_of(one("F8_E4M3", "[1]", "[0,1]"), 1),
      {R"(tensor "t" has dtype "F8_E4M3")", "BOOL, U8, I8, I16, I32, I64, F16, BF16, F32, F64"});
  expect_refused(file_of(one("f32", "[1]", "[0,4]"), 4), {R"(has dtype "f32")"});
  expect_refused(file_of(one("", "[1]", "[0,4]"), 4), {R"(has dtype "")"});
}

TEST_F(SafetensorsTest, RefusesNumbersThatAreNoSizes) {
  for (const std::string number : {"-1", "-0", "1.5", "1.0", "1e2", "9223372036854775808",
                                   "18446744073709551615", "99999999999999999999"}) {
    expect_refused(file_of(one("U8", "[" + number + "]", "[0,1]"), 1),
                   {R"(shape of tensor "t" holds)", "not a whole number from 0 to 2^63-1"});
    expect_refused(file_of(one("U8", "[1]", "[0," + number + "]"), 1),
                   {R"(data_offsets of tensor "t" holds)", "not a whole number"});
  }
  for (const std::string other : {"true", "null", R"("1")"}) {
    expect_refused(file_of(one("U8", "[" + other + "]", "[0,1]"), 1), {"holds no number"});
  }
}

TEST_F(SafetensorsTest, RefusesShapesThatOverflow) {
  expect_refused(file_of(one("U8", "[4294967296,4294967296]", "[0,0]")),
                 {"[4294967296, 4294967296]", "2^63-1 bytes"});
  expect_refused(file_of(one("F64", "[1152921504606846976]", "[0,0]")), {"more than 2^63-1 bytes"});
  expect_refused(file_of(one("U8", "[3,6148914691236517206]", "[0,2]"), 2),
                 {"more than 2^63-1 bytes"});
  std::string dimensions = "[1";
  for (int i = 0; i < 64; ++i) dimensions += ",1";
  expect_refused(file_of(one("U8", dimensions + "]", "[0,1]"), 1), {"65 dimensions; 64"});
}

TEST_F(SafetensorsTest, RefusesOffsetsThatDoNotFit) {
  expect_refused(file_of(one("U8", "[1]", "[2,1]"), 2), {R"(tensor "t" begins at 2)", "at 1"});
  expect_refused(file_of(one("F32", "[2]", "[0,8]"), 7), {"ends at byte 8", "has 7 bytes of data"});
  expect_refused(file_of(one("U8", "[1]", "[0,9223372036854775807]"), 1),
                 {"ends at byte 9223372036854775807", "has 1 bytes"});
  expect_refused(file_of(one("F32", "[2,3]", "[0,20]"), 20),
                 {R"(tensor "t" of F32 [2, 3] needs 24 bytes)", "hold 20"});
  expect_refused(file_of(one("F32", "[]", "[0,0]")), {"needs 4 bytes", "hold 0"});
}

TEST_F(SafetensorsTest, RefusesOverlapsAndHoles) {
  const auto two = [](const std::string& a, const std::string& b) {
    return R"({"a":)" + entry("U8", "[4]", a) + R"(,"b":)" + entry("U8", "[4]", b) + "}";
  };
  expect_refused(file_of(two("[0,4]", "[2,6]"), 6),
                 {R"(tensor "b" begins at byte 2 and overlaps tensor "a", which ends at 4)"});
  expect_refused(file_of(two("[0,4]", "[0,4]"), 4), {"overlaps"});
  expect_refused(file_of(two("[0,4]", "[5,9]"), 9),
                 {R"(hole of 1 bytes between tensor "a", byte 4, and tensor "b", byte 5)"});
  expect_refused(file_of(one("U8", "[1]", "[3,4]"), 4), {"hole of 3 bytes between the start"});
  expect_refused(file_of(one("U8", "[1]", "[0,1]"), 5), {"end at byte 1", "has 5 bytes of data"});
  expect_refused(file_of("{}", 1), {"end at byte 0", "has 1 bytes"});
}

TEST_F(SafetensorsTest, RefusesAnEmptyName) {
  expect_refused(file_of(R"({"":)" + entry("U8", "[1]", "[0,1]") + "}", 1), {"empty name"});
}

TEST_F(SafetensorsTest, MessagesShowForeignNamesOnOneShortLine) {
  const std::string name = "line\\n" + std::string(5000, 'x');
  write_bytes(path_, file_of(R"({")" + name + R"(":1})"));
  try {
    SafetensorsReader reader(path_);
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.message().find('\n'), std::string::npos);
    EXPECT_LT(error.message().size(), 400U);
  }
}

}  // namespace
}  // namespace lockstep::test::safetensors_test
