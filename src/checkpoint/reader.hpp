#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/safetensors.hpp"
#include "checkpoint/manifest.hpp"

namespace lockstep {

class Error;

/// Whether reading a checkpoint failed because it is damaged. Otherwise a file could not be read,
/// for a reason that says nothing about it: a limit, a permission, a disk.
bool is_damage(const Error& error);

/// A checkpoint on disk. The constructor checks everything but the tensors' bytes: the manifest,
/// the sizes of the files, and that their headers say the same as the manifest.
class CheckpointReader {
 public:
  explicit CheckpointReader(std::string path);

  const std::string& path() const { return path_; }
  const Manifest& manifest() const { return manifest_; }

  /// Compares every byte of a file with its checksum; an Error names the damaged tensor.
  void verify_file(size_t index) const;
  void verify() const;  ///< all files

  /// Reads what `slice` has of a tensor, from as many files as it takes. The bytes of every file
  /// that is read are compared with their checksum.
  void read(const StoredTensor& tensor, const Slice& slice, std::span<std::byte> destination) const;

  /// All of a tensor.
  std::vector<std::byte> read(const StoredTensor& tensor) const;

 private:
  const SafetensorsReader& file_of(const StoredPiece& piece) const;
  std::vector<std::byte> read_piece(const StoredTensor& tensor, const StoredPiece& piece) const;

  std::string path_;
  Manifest manifest_;
  std::map<std::string, std::unique_ptr<SafetensorsReader>> files_;  // [name]
};

}  // namespace lockstep
