#include "checkpoint/reader.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>

#include "base/checksum.hpp"
#include "base/counted.hpp"
#include "base/file.hpp"
#include "lockstep/error.hpp"

namespace lockstep {
namespace {

constexpr const char* kDamagedFileHelp =
    "use another checkpoint; `lockstep ckpt verify` finds the good ones";
constexpr int64_t kLargestManifest = int64_t{1} << 30;

[[noreturn]] void fail_damaged(const std::string& path, const std::string& reason) {
  throw Error(Code::kFileFormat, fmt::format("{}: {}", path, reason), kDamagedFileHelp);
}

[[noreturn]] void fail_to_read(const std::string& path, int error) {
  throw Error(Code::kFileRead, fmt::format("cannot read {}: {}", path, std::strerror(error)),
              limit_help(error, "check its permissions and the disk; it need not be damaged"));
}

bool is_there(const std::string& path, struct stat& status) {
  if (::stat(path.c_str(), &status) == 0) return true;
  if (errno != ENOENT) fail_to_read(path, errno);
  return false;
}

std::string read_manifest(const std::string& folder) {
  const std::string path = folder + "/" + kManifestName;
  struct stat status {};
  if (!is_there(folder, status) || !S_ISDIR(status.st_mode)) {
    throw Error(Code::kFileRead, fmt::format("{} is not the folder of a checkpoint", folder),
                "name a folder such as runs/a/step-00000100");
  }
  if (!is_there(path, status)) fail_damaged(folder, "it has no manifest.json");
  if (!S_ISREG(status.st_mode)) fail_damaged(path, "it is not a regular file");
  if (status.st_size > kLargestManifest) fail_damaged(path, "it is too large for a manifest");
  return read_text_file(path);
}

std::string checksum_of_file(const std::string& path) {
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  Checksum sum;
  std::vector<std::byte> chunk(size_t{1} << 20);
  for (ssize_t count = -1; file.get() >= 0 && count != 0;) {
    count = ::read(file.get(), chunk.data(), chunk.size());
    if (count < 0 && errno != EINTR) break;
    if (count == 0) return digest_text(sum.digest());
    if (count > 0) sum.add(std::span(chunk).first(static_cast<size_t>(count)));
  }
  fail_to_read(path, errno);
}

}  // namespace

bool is_damage(const Error& error) {
  return error.code() == Code::kFileFormat;
}

CheckpointReader::CheckpointReader(std::string path)
    : path_(std::move(path)),
      manifest_(parse_manifest(path_ + "/" + kManifestName, read_manifest(path_))) {
  std::map<std::string, size_t> pieces;  // [file]
  for (const auto& file : manifest_.files) {
    const std::string name = path_ + "/" + file.name;
    struct stat status {};
    if (!is_there(name, status)) fail_damaged(name, "the file is missing");
    if (status.st_size != file.bytes) {
      fail_damaged(name, fmt::format("the file has {} instead of {}",
                                     counted(status.st_size, "byte"), file.bytes));
    }
    files_.emplace(file.name, std::make_unique<SafetensorsReader>(name));
  }
  for (const auto& tensor : manifest_.tensors) {
    for (const auto& piece : tensor.pieces) {
      const TensorInfo* info = file_of(piece).find(tensor.name);
      if (info == nullptr || info->dtype != tensor.dtype || info->shape != piece.slice.local) {
        fail_damaged(path_ + "/" + piece.file,
                     fmt::format("tensor {} is not as the manifest says", tensor.name));
      }
      ++pieces[piece.file];
    }
  }
  for (const auto& [name, file] : files_) {
    if (file->tensors().size() != pieces[name]) {
      fail_damaged(path_ + "/" + name, "it has tensors that the manifest does not name");
    }
  }
}

const SafetensorsReader& CheckpointReader::file_of(const StoredPiece& piece) const {
  return *files_.at(piece.file);
}

void CheckpointReader::verify_file(size_t index) const {
  const StoredFile& file = manifest_.files.at(index);
  const std::string name = path_ + "/" + file.name;
  if (checksum_of_file(name) == file.checksum) return;
  for (const auto& tensor : manifest_.tensors) {
    for (const auto& piece : tensor.pieces) {
      if (piece.file == file.name) read_piece(tensor, piece);
    }
  }
  fail_damaged(name, "its bytes do not match its checksum");
}

void CheckpointReader::verify() const {
  for (size_t i = 0; i < manifest_.files.size(); ++i) verify_file(i);
}

std::vector<std::byte> CheckpointReader::read_piece(const StoredTensor& tensor,
                                                    const StoredPiece& piece) const {
  const SafetensorsReader& file = file_of(piece);
  const TensorInfo& info = *file.find(tensor.name);
  std::vector<std::byte> bytes(static_cast<size_t>(info.bytes()));
  file.read(info, bytes);
  if (digest_text(checksum_of(bytes)) != piece.checksum) {
    fail_damaged(file.path(),
                 fmt::format("the bytes of tensor {} do not match their checksum", tensor.name));
  }
  return bytes;
}

void CheckpointReader::read(const StoredTensor& tensor, const Slice& slice,
                            std::span<std::byte> destination) const {
  const int64_t width = dtype_bytes(tensor.dtype);
  const auto wanted = runs_of(slice);
  const auto count = element_count(slice.local);
  if (!wanted || slice.whole != tensor.shape() ||
      static_cast<uint64_t>(*count * width) != destination.size()) {
    throw Error(Code::kTensorMismatch,
                fmt::format("{} of {} cannot be read into this slice", tensor.name, path_),
                "ask for a slice of the whole tensor's shape");
  }
  int64_t copied = 0;
  for (const auto& piece : tensor.pieces) {
    const auto stored = *runs_of(piece.slice);
    // Does the piece have anything of the slice?
    if (copy_common(stored, nullptr, *wanted, nullptr, 0) == 0) continue;
    const auto bytes = read_piece(tensor, piece);
    copied += copy_common(stored, bytes.data(), *wanted, destination.data(), width);
  }
  if (copied != *count) fail_damaged(path_, fmt::format("tensor {} is not complete", tensor.name));
}

std::vector<std::byte> CheckpointReader::read(const StoredTensor& tensor) const {
  std::vector<std::byte> bytes(static_cast<size_t>(tensor.bytes()));
  read(tensor, whole_slice(tensor.shape()), bytes);
  return bytes;
}

}  // namespace lockstep
