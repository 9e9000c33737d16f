#include <functional>
#include <numeric>

#include "lockstep/safetensors.hpp"
#include "safetensors_support.hpp"
#include "support.hpp"

namespace lockstep {
namespace {

using test::entry;
using test::expect_error;
using test::file_of;
using test::kGolden;
using test::SafetensorsTest;
using test::write_bytes;

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

// Whatever a damaged header still says must fit the file.
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
  // Letters of names and metadata may change unnoticed; everything else holds the file together.
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
}  // namespace lockstep
