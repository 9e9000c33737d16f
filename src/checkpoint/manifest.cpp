#include "checkpoint/manifest.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <stdexcept>
#include <tuple>
#include <utility>

#include "base/checksum.hpp"
#include "base/json_text.hpp"
#include "lockstep/error.hpp"

namespace lockstep {
namespace {

using nlohmann::json;

// The file is this text around the manifest itself, so that its checksum covers exact bytes.
constexpr std::string_view kBeforeChecksum = "{\"checksum\": \"";
constexpr std::string_view kBeforeBody = "\",\n\"manifest\": ";
constexpr std::string_view kAfterBody = "}\n";
constexpr size_t kDigits = 32;

constexpr const char* kFormat = "lockstep checkpoint";
constexpr int64_t kLargestNumber = int64_t{1} << 62;
constexpr const char* kDamagedHelp =
    "the checkpoint is damaged or not lockstep's: use another one; `lockstep ckpt verify` finds "
    "the good ones";

// What a reader found wrong; parse_manifest() adds the path.
struct Wrong : std::runtime_error {
  using std::runtime_error::runtime_error;
};

const json& field(const json& object, const char* name) {
  if (!object.is_object() || !object.contains(name)) {
    throw Wrong{fmt::format("the field \"{}\" is missing", name)};
  }
  return object.at(name);
}

std::string text_field(const json& object, const char* name) {
  const json& value = field(object, name);
  if (!value.is_string()) throw Wrong{fmt::format("the field \"{}\" is not a text", name)};
  return value.get<std::string>();
}

int64_t whole_number(const json& value, const char* name) {
  const auto number = whole_number_in(value, 0, kLargestNumber);
  if (!number) throw Wrong{fmt::format("the field \"{}\" is not a whole number", name)};
  return *number;
}

std::string checksum_field(const json& object) {
  auto text = text_field(object, "xxh128");
  if (text.size() != kDigits || text.find_first_not_of("0123456789abcdef") != std::string::npos) {
    throw Wrong{"a checksum does not have 32 hexadecimal digits"};
  }
  return text;
}

const json& list_field(const json& object, const char* name) {
  const json& value = field(object, name);
  if (!value.is_array()) throw Wrong{fmt::format("the field \"{}\" is not a list", name)};
  return value;
}

Shape shape_field(const json& object, const char* name) {
  Shape shape;
  for (const auto& size : list_field(object, name)) shape.push_back(whole_number(size, name));
  return shape;
}

// A name that stays inside the folder of the checkpoint.
std::string file_name_field(const json& object, const char* name) {
  auto text = text_field(object, name);
  if (text.empty() || text.front() == '.' || text.find('/') != std::string::npos ||
      text.find('\0') != std::string::npos || text == kManifestName) {
    throw Wrong{fmt::format("\"{}\" is not the name of a file of a checkpoint", text)};
  }
  return text;
}

Dtype dtype_field(const json& object) {
  const auto text = text_field(object, "dtype");
  for (const Dtype dtype : {Dtype::kBool, Dtype::kU8, Dtype::kI8, Dtype::kI16, Dtype::kI32,
                            Dtype::kI64, Dtype::kF16, Dtype::kBF16, Dtype::kF32, Dtype::kF64}) {
    if (dtype_name(dtype) == text) return dtype;
  }
  throw Wrong{fmt::format("there is no dtype \"{}\"", text)};
}

json to_json(const StoredPiece& piece) {
  json value = {{"file", piece.file}, {"xxh128", piece.checksum}};
  if (piece.slice.blocks.empty()) return value;
  value["shape"] = piece.slice.local;
  for (const auto& block : piece.slice.blocks) {
    value["blocks"].push_back(
        {{"local", block.local}, {"whole", block.whole}, {"shape", block.shape}});
  }
  return value;
}

StoredPiece piece_from(const json& value, const Shape& whole) {
  StoredPiece piece{file_name_field(value, "file"), checksum_field(value), whole_slice(whole)};
  if (!value.contains("blocks")) return piece;
  piece.slice.local = shape_field(value, "shape");
  for (const auto& block : list_field(value, "blocks")) {
    piece.slice.blocks.push_back(
        {shape_field(block, "local"), shape_field(block, "whole"), shape_field(block, "shape")});
  }
  return piece;
}

// Each file must have room for what it is said to hold; then no layout is larger than the files.
void check_sizes(const Manifest& manifest) {
  std::map<std::string, int64_t> left;
  int64_t all = 0;
  for (const auto& file : manifest.files) {
    if (file.bytes > kLargestNumber - all) throw Wrong{"its files are larger than any disk"};
    all += file.bytes;
    if (!left.emplace(file.name, file.bytes).second) {
      throw Wrong{fmt::format("file {} is listed twice", file.name)};
    }
  }
  for (const auto& tensor : manifest.tensors) {
    for (const auto& piece : tensor.pieces) {
      const auto found = left.find(piece.file);
      const auto count = element_count(piece.slice.local);
      const int64_t width = dtype_bytes(tensor.dtype);
      if (found == left.end() || !count || *count > found->second / width) {
        throw Wrong{fmt::format("tensor {} does not fit into file {}", tensor.name, piece.file)};
      }
      found->second -= *count * width;
    }
  }
}

Manifest manifest_from(const json& body) {
  if (text_field(body, "format") != kFormat) throw Wrong{"it is not lockstep's"};
  const int64_t version = whole_number(field(body, "version"), "version");
  if (version != kManifestVersion) {
    throw Wrong{fmt::format("it has version {}, and this lockstep reads version {}", version,
                            kManifestVersion)};
  }
  Manifest manifest;
  manifest.step = whole_number(field(body, "step"), "step");
  manifest.ranks =
      static_cast<int>(std::min<int64_t>(whole_number(field(body, "ranks"), "ranks"), 1 << 30));
  manifest.created = text_field(body, "created");
  manifest.lockstep = text_field(body, "lockstep");
  for (const auto& file : list_field(body, "files")) manifest.files.push_back(file_from(file));
  for (const auto& tensor : list_field(body, "tensors")) {
    manifest.tensors.push_back(tensor_from(tensor));
  }
  manifest.values = field(body, "values");
  if (!manifest.values.is_object()) throw Wrong{"the field \"values\" is not an object"};
  for (const auto& [section, value] : manifest.values.items()) {
    const bool known =
        value.is_object() && value.size() == 1 &&
        (value.contains("all") || (value.contains("ranks") && value["ranks"].is_array() &&
                                   value["ranks"].size() == static_cast<size_t>(manifest.ranks)));
    if (!known) throw Wrong{fmt::format("the value of \"{}\" is of no known form", section)};
  }
  check_sizes(manifest);
  manifest.tensors = merge_pieces(std::move(manifest.tensors));
  return manifest;
}

json parse_body(const std::string& text) {
  auto body = parse_json(text);
  if (!body) throw Wrong{"it is not valid JSON, or nests too deeply"};
  return std::move(*body);
}

std::string around(const std::string& body) {
  return fmt::format("{}{}{}{}{}", kBeforeChecksum, digest_text(checksum_of(body)), kBeforeBody,
                     body, kAfterBody);
}

// The manifest itself, if the text is exactly what render() makes of it.
std::string body_of(const std::string& text) {
  const size_t before = kBeforeChecksum.size() + kDigits + kBeforeBody.size();
  if (!text.starts_with(kBeforeChecksum) || text.size() < before + kAfterBody.size()) {
    throw Wrong{"it is not a manifest of lockstep, or was cut off"};
  }
  auto body = text.substr(before, text.size() - before - kAfterBody.size());
  if (around(body) != text) throw Wrong{"its bytes do not match its checksum"};
  return body;
}

}  // namespace

int64_t StoredTensor::bytes() const {
  return *element_count(shape()) * dtype_bytes(dtype);
}

int64_t Manifest::bytes() const {
  int64_t all = 0;
  for (const auto& file : files) all += file.bytes;
  return all;
}

const StoredTensor* Manifest::find(const std::string& section, const std::string& name) const {
  const auto found = std::lower_bound(
      tensors.begin(), tensors.end(), std::tie(section, name),
      [](const StoredTensor& a, const auto& b) { return std::tie(a.section, a.name) < b; });
  if (found == tensors.end() || found->section != section || found->name != name) return nullptr;
  return &*found;
}

std::vector<StoredTensor> merge_pieces(std::vector<StoredTensor> tensors) {
  std::stable_sort(tensors.begin(), tensors.end(), [](const auto& a, const auto& b) {
    return std::tie(a.section, a.name) < std::tie(b.section, b.name);
  });
  std::vector<StoredTensor> merged;
  for (auto& tensor : tensors) {
    auto* last = merged.empty() ? nullptr : &merged.back();
    if (last == nullptr || last->section != tensor.section || last->name != tensor.name) {
      merged.push_back(std::move(tensor));
      continue;
    }
    if (last->dtype != tensor.dtype || last->shape() != tensor.shape()) {
      throw Error(Code::kTensorMismatch,
                  fmt::format("ranks disagree about tensor {} of {}: it is {} [{}] and {} [{}]",
                              tensor.name, tensor.section, dtype_name(last->dtype),
                              fmt::join(last->shape(), ", "), dtype_name(tensor.dtype),
                              fmt::join(tensor.shape(), ", ")),
                  "give the same model to all ranks, or add the models under different names");
    }
    for (auto& piece : tensor.pieces) last->pieces.push_back(std::move(piece));
  }
  for (const auto& tensor : merged) {
    std::vector<Slice> slices;
    for (const auto& piece : tensor.pieces) slices.push_back(piece.slice);
    if (are_complete(slices)) continue;
    throw Error(Code::kTensorMismatch,
                fmt::format("the pieces of tensor {} of {} do not make the whole tensor once",
                            tensor.name, tensor.section),
                "let every rank that has a part of the model add it to the checkpoint, each part "
                "under its name in the whole model");
  }
  return merged;
}

json to_json(const StoredFile& file) {
  return {{"name", file.name}, {"bytes", file.bytes}, {"xxh128", file.checksum}};
}

json to_json(const StoredTensor& tensor) {
  json value = {{"section", tensor.section},
                {"name", tensor.name},
                {"dtype", dtype_name(tensor.dtype)},
                {"shape", tensor.shape()},
                {"pieces", json::array()}};
  for (const auto& piece : tensor.pieces) value["pieces"].push_back(to_json(piece));
  return value;
}

StoredFile file_from(const json& value) {
  return {file_name_field(value, "name"), whole_number(field(value, "bytes"), "bytes"),
          checksum_field(value)};
}

StoredTensor tensor_from(const json& value) {
  StoredTensor tensor{
      text_field(value, "section"), text_field(value, "name"), dtype_field(value), {}};
  const Shape whole = shape_field(value, "shape");
  for (const auto& piece : list_field(value, "pieces")) {
    tensor.pieces.push_back(piece_from(piece, whole));
  }
  if (tensor.pieces.empty()) throw Wrong{fmt::format("tensor {} has no piece", tensor.name)};
  return tensor;
}

std::string render(const Manifest& manifest) {
  json files = json::array();
  json tensors = json::array();
  for (const auto& file : manifest.files) files.push_back(to_json(file));
  for (const auto& tensor : manifest.tensors) tensors.push_back(to_json(tensor));
  nlohmann::ordered_json body;  // the short fields first, for people
  body["format"] = kFormat;
  body["version"] = kManifestVersion;
  body["step"] = manifest.step;
  body["ranks"] = manifest.ranks;
  body["created"] = manifest.created;
  body["lockstep"] = manifest.lockstep;
  body["files"] = files;
  body["tensors"] = tensors;
  body["values"] = manifest.values;
  try {
    return around(body.dump(1));
  } catch (const json::exception&) {
    throw Error(Code::kUsage, "a name or value of the checkpoint is not UTF-8",
                "use names and texts in UTF-8");
  }
}

Manifest parse_manifest(const std::string& path, const std::string& text) {
  const auto fail = [&](const std::string& reason) -> Error {
    return {Code::kFileFormat, fmt::format("{}: {}", path, reason), kDamagedHelp};
  };
  try {
    return manifest_from(parse_body(body_of(text)));
  } catch (const Wrong& wrong) {
    throw fail(wrong.what());
  } catch (const Error& error) {
    throw fail(error.message());
  }
}

}  // namespace lockstep
