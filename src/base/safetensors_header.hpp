#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/error.hpp"
#include "lockstep/safetensors.hpp"

namespace lockstep::safetensors_header {

using nlohmann::json;

inline constexpr size_t kMaxDimensions = 64;  // what libtorch can hold
inline constexpr const char* kMetadataKey = "__metadata__";
inline constexpr const char* kRemedy =
    "the file is damaged or not safetensors; write it again, e.g. with safetensors.torch.save_file";

/// A text from the file, fit for one line of a message whatever it holds.
std::string in_quotes(std::string_view text);

/// Elements times bytes each, or nothing where that does not fit in an int64_t.
std::optional<int64_t> tensor_bytes(const std::vector<int64_t>& shape, Dtype dtype);

/// Everything about one header; each refusal names the file, the tensor and the numbers.
class HeaderCheck {
 public:
  HeaderCheck(std::string path, int64_t data_bytes)
      : path_(std::move(path)), data_bytes_(data_bytes) {}

  json parse(const std::string& text) const;
  std::map<std::string, std::string> metadata(const json& header) const;
  std::vector<TensorInfo> tensors(const json& header) const;

  [[noreturn]] void fail(const std::string& reason, const std::string& help = kRemedy) const {
    throw Error(Code::kFileFormat, fmt::format("{}: {}", path_, reason), help);
  }

 private:
  TensorInfo tensor(const std::string& name, const json& entry) const;
  Dtype dtype(const std::string& name, const json& value) const;
  std::vector<int64_t> whole_numbers(const std::string& name, const char* field,
                                     const json& value) const;
  void check_coverage(const std::vector<TensorInfo>& tensors) const;

  std::string path_;
  int64_t data_bytes_;
};

}  // namespace lockstep::safetensors_header
