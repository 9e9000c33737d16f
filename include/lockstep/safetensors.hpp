#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/dtype.hpp"

namespace lockstep {

class Descriptor;

/// Where one tensor lies in an opened file.
struct TensorInfo {
  std::string name;
  Dtype dtype = Dtype::kF32;
  std::vector<int64_t> shape;  ///< no dimensions: a scalar
  int64_t begin = 0;           ///< offset in the data section
  int64_t end = 0;             ///< one past the last byte

  int64_t bytes() const { return end - begin; }
};

/// An opened safetensors file. The whole header is checked against the file before anything is
/// used: shapes, dtypes and offsets agree, and the tensors cover the data without overlap or hole.
class SafetensorsReader {
 public:
  explicit SafetensorsReader(const std::string& path);
  ~SafetensorsReader();
  SafetensorsReader(SafetensorsReader&&) noexcept;
  SafetensorsReader& operator=(SafetensorsReader&&) noexcept;

  const std::string& path() const { return path_; }

  /// In the order of their bytes in the file.
  const std::vector<TensorInfo>& tensors() const { return tensors_; }

  /// The texts under "__metadata__".
  const std::map<std::string, std::string>& metadata() const { return metadata_; }

  /// The tensor of that name, or null; valid as long as the reader.
  const TensorInfo* find(std::string_view name) const;

  /// Reads a tensor's bytes straight into the caller's memory, which must have exactly
  /// info.bytes(). The file is read, never mapped: one that is cut while in use is an Error, not a
  /// SIGBUS.
  void read(const TensorInfo& info, std::span<std::byte> destination) const;

 private:
  std::string path_;
  std::unique_ptr<const Descriptor> file_;
  int64_t data_offset_ = 0;  // of the data section in the file
  int64_t data_bytes_ = 0;
  std::vector<TensorInfo> tensors_;
  std::map<std::string, std::string> metadata_;
  std::map<std::string, size_t, std::less<>> index_;  // name -> position in tensors_
};

/// A tensor to be written; the bytes stay the caller's.
struct TensorBytes {
  std::string name;
  Dtype dtype = Dtype::kF32;
  std::vector<int64_t> shape;
  std::span<const std::byte> bytes;
};

/// Writes a file that every safetensors reader accepts: the old file or the new one, never a part.
/// Tensors lie widest dtype first, then by name, so that each is aligned to its element.
void write_safetensors(const std::string& path, std::vector<TensorBytes> tensors,
                       const std::map<std::string, std::string>& metadata = {});

}  // namespace lockstep
