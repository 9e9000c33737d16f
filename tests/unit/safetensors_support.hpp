#pragma once

#include <array>
#include <cstring>
#include <initializer_list>
#include <string>

#include "lockstep/safetensors.hpp"
#include "support.hpp"

namespace lockstep::test {

/// Written by Python's safetensors 0.8.0: save_file({"w": [[1, -2.5], [0, 3]] as float32, "b": [1,
/// -1] as int64, "mask": [True, False, True], "half": 1.5 as bfloat16, "none": zeros(0, 4)},
/// metadata={"format": "pt"}).
inline constexpr char kGoldenText[] =
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
inline const std::string kGolden(kGoldenText, sizeof(kGoldenText) - 1);

/// The bytes of a file with this header and that many zero bytes of data.
inline std::string file_of(const std::string& header, size_t data_bytes = 0) {
  std::array<char, 8> length{};
  const uint64_t count = header.size();
  std::memcpy(length.data(), &count, length.size());
  return std::string(length.data(), length.size()) + header + std::string(data_bytes, '\0');
}

inline std::string entry(const std::string& dtype, const std::string& shape,
                         const std::string& offsets) {
  return R"({"dtype":")" + dtype + R"(","shape":)" + shape + R"(,"data_offsets":)" + offsets + "}";
}

class SafetensorsTest : public testing::Test {
 protected:
  // Every refusal names the file and leaves a remedy.
  void expect_refused(const std::string& bytes, std::initializer_list<std::string> fragments) {
    write_bytes(path_, bytes);
    SCOPED_TRACE(bytes.substr(0, 300));
    expect_error(Code::kFileFormat, {path_}, [&] { SafetensorsReader reader(path_); });
    expect_error(Code::kFileFormat, fragments, [&] { SafetensorsReader reader(path_); });
  }

  ScratchFolder scratch_;
  std::string path_ = scratch_.file("weights.safetensors");
};

}  // namespace lockstep::test
