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

#include "base/checksum.hpp"
#include "base/dtype.hpp"
#include "base/file.hpp"

namespace lockstep {

/// One tensor of an open file.
struct TensorInfo {
  std::string name;
  Dtype dtype = Dtype::kF32;
  std::vector<int64_t> shape;  ///< empty for a scalar
  int64_t begin = 0;           ///< offset in the data section
  int64_t end = 0;             ///< one past the last byte

  int64_t bytes() const { return end - begin; }
};

/// An open safetensors file. The constructor checks the whole header against the file: shapes,
/// dtypes and offsets must agree, and the tensors must cover the data without overlap or gap.
class SafetensorsReader {
 public:
  explicit SafetensorsReader(const std::string& path);

  const std::string& path() const { return path_; }

  /// In the order of their bytes in the file.
  const std::vector<TensorInfo>& tensors() const { return tensors_; }

  /// The entries of "__metadata__", except those that hold the file's own checksum.
  const std::map<std::string, std::string>& metadata() const { return metadata_; }

  /// The tensor of that name, or null. The pointer is valid as long as the reader.
  const TensorInfo* find(std::string_view name) const;

  /// Reads a tensor's bytes into the caller's memory, which must have exactly info.bytes(). The
  /// file is never mapped, so that truncating it meanwhile causes an Error and not a SIGBUS.
  void read(const TensorInfo& info, std::span<std::byte> destination) const;

  /// Whether the file has a checksum of its own. See Note [Checksum of a file].
  bool has_checksum() const { return !checksum_.empty(); }

  /// Reads the whole file and compares it with its own checksum, if it has one. A file that was
  /// changed since it was written is an Error.
  void verify() const;

 private:
  void take_checksum(std::string header);

  std::string path_;
  std::unique_ptr<const Descriptor> file_;
  int64_t data_offset_ = 0;  // of the data section in the file
  int64_t data_bytes_ = 0;
  std::vector<TensorInfo> tensors_;
  std::map<std::string, std::string> metadata_;
  std::string checksum_;                              // hexadecimal; empty: the file has none
  std::string checked_header_;                        // what the checksum covers of the header
  std::map<std::string, size_t, std::less<>> index_;  // name -> position in tensors_
};

/// A tensor to be written. The caller owns the bytes.
struct TensorBytes {
  std::string name;
  Dtype dtype = Dtype::kF32;
  std::vector<int64_t> shape;
  std::span<const std::byte> bytes;
};

/// Note [Checksum of a file]
/// The format has no checksum, so a flipped bit in a weight would be read as another weight. Files
/// of lockstep's own have one in "__metadata__", which other readers ignore: XXH3 over the header,
/// with zeros in the place of the checksum, and the checksum of each tensor in the order of the
/// file. A second entry says that there is one, so that damage to either entry is noticed.
enum class FileChecksum { kNone, kOwn };

/// A safetensors file that is yet to be written: its bytes are those of `start`, then those of the
/// tensors.
struct SafetensorsImage {
  std::string start;                 ///< length and header
  std::vector<TensorBytes> tensors;  ///< in the order of the file
  std::vector<Digest> digests;       ///< [tensor]; empty without a checksum

  std::vector<std::span<const std::byte>> pieces() const;
};

/// Tensors are sorted by descending width of their dtype, then by name, so that each is aligned to
/// its element. `path` names the file in errors.
SafetensorsImage make_safetensors(const std::string& path, std::vector<TensorBytes> tensors,
                                  std::map<std::string, std::string> metadata = {},
                                  FileChecksum checksum = FileChecksum::kNone);

/// Atomically writes a file that every safetensors reader accepts.
void write_safetensors(const std::string& path, std::vector<TensorBytes> tensors,
                       const std::map<std::string, std::string>& metadata = {},
                       FileChecksum checksum = FileChecksum::kNone);

}  // namespace lockstep
