#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/dtype.hpp"
#include "checkpoint/layout.hpp"

namespace lockstep {

inline constexpr const char* kManifestName = "manifest.json";
inline constexpr int kManifestVersion = 1;

/// A safetensors file of a checkpoint.
struct StoredFile {
  std::string name;  ///< without a folder
  int64_t bytes = 0;
  std::string checksum;  ///< of the whole file, as `xxh128sum` prints it
};

/// What one file has of a tensor, under the tensor's name.
struct StoredPiece {
  std::string file;
  std::string checksum;  ///< of the tensor's bytes in that file
  Slice slice;
};

/// A tensor of the model, of an optimizer, or of whatever else was saved.
struct StoredTensor {
  std::string section;  ///< the name it was added under: "model"
  std::string name;     ///< "layers.0.weight"
  Dtype dtype = Dtype::kF32;
  std::vector<StoredPiece> pieces;  ///< together the whole tensor, each element once

  const Shape& shape() const { return pieces.front().slice.whole; }
  int64_t bytes() const;
};

/// Everything about a checkpoint but its tensors' bytes.
struct Manifest {
  int64_t step = 0;  ///< after which it was saved
  int ranks = 1;     ///< that saved it
  std::string created;
  std::string lockstep;  ///< the version that wrote it
  std::vector<StoredFile> files;
  std::vector<StoredTensor> tensors;  ///< by section and name

  /// By section: {"all": value}, or {"ranks": [value, ...]} where the ranks' values differ.
  nlohmann::json values = nlohmann::json::object();

  int64_t bytes() const;  ///< of all files
  const StoredTensor* find(const std::string& section, const std::string& name) const;
};

/// The text of manifest.json: valid JSON with a checksum of its own.
std::string render(const Manifest& manifest);

/// Reads what render() wrote. Anything else, and any change to it, is an Error that names `path`.
Manifest parse_manifest(const std::string& path, const std::string& text);

/// For the parts that ranks send to the one that writes the manifest.
nlohmann::json to_json(const StoredFile& file);
nlohmann::json to_json(const StoredTensor& tensor);
StoredFile file_from(const nlohmann::json& value);
StoredTensor tensor_from(const nlohmann::json& value);

/// Puts the pieces of each tensor together, sorts, and checks that every tensor is complete.
std::vector<StoredTensor> merge_pieces(std::vector<StoredTensor> tensors);

}  // namespace lockstep
