#include "lockstep/safetensors.hpp"

#include <sys/stat.h>
#include <unistd.h>

#include <array>

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

}  // namespace
}  // namespace lockstep
