#include "lockstep/safetensors.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstring>
#include <set>
#include <tuple>

#include "base/limits.hpp"
#include "descriptor.hpp"
#include "lockstep/error.hpp"
#include "lockstep/file.hpp"
#include "safetensors_header.hpp"

namespace lockstep {

using namespace safetensors_header;

namespace {

static_assert(std::endian::native == std::endian::little, "tensor bytes are little-endian on disk");

constexpr int64_t kLengthBytes = 8;
constexpr int64_t kMaxHeaderBytes = 100'000'000;  // the limit of the reference implementation

// False with errno set on an I/O error, or with errno 0 where the file ends first.
bool read_exactly(int fd, std::span<std::byte> destination, int64_t offset) {
  while (!destination.empty()) {
    const ssize_t count = ::pread(fd, destination.data(), destination.size(), offset);
    if (count < 0 && errno == EINTR) continue;
    if (count == 0) errno = 0;
    if (count <= 0) return false;
    destination = destination.subspan(static_cast<size_t>(count));
    offset += count;
  }
  return true;
}

[[noreturn]] void fail_read(const std::string& path, int error) {
  throw Error(
      Code::kFileRead,
      fmt::format("cannot read {}: {}", path,
                  error == 0 ? "it became shorter while it was read" : std::strerror(error)),
      error == 0 ? "let no other program write to it meanwhile"
                 : limit_help(error, "check the path and its permissions"));
}

std::unique_ptr<const Descriptor> open_regular_file(const std::string& path, int64_t& bytes) {
  // O_NONBLOCK: opening a FIFO would wait for its writer. Regular files do not heed it.
  auto file =
      std::make_unique<const Descriptor>(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat status {};
  if (file->get() < 0 || ::fstat(file->get(), &status) != 0) fail_read(path, errno);
  if (!S_ISREG(status.st_mode)) {
    throw Error(Code::kFileRead,
                fmt::format("cannot read {}: it is {}", path,
                            S_ISDIR(status.st_mode) ? "a folder" : "not a regular file"),
                "name a safetensors file");
  }
  bytes = status.st_size;
  return file;
}

// What people most often pass by mistake gets a remedy of its own.
std::string remedy_for(std::span<const std::byte, kLengthBytes> start) {
  const bool zip = std::memcmp(start.data(), "PK\x03\x04", 4) == 0;
  const bool pickle =
      start[0] == std::byte{0x80} && start[1] <= std::byte{5} && start[7] != std::byte{0};
  if (!zip && !pickle) return kRemedy;
  return "it looks like a torch.save file; convert it in Python with "
         "safetensors.torch.save_file(torch.load(old), new)";
}

void check_for_writing(const std::vector<TensorBytes>& tensors) {
  std::set<std::string_view> names;
  for (const auto& tensor : tensors) {
    const auto fail = [&](const std::string& reason) {
      throw Error(Code::kTensorMismatch,
                  fmt::format("cannot write tensor {}: {}", in_quotes(tensor.name), reason),
                  "give each tensor a name of its own and the bytes its shape needs");
    };
    if (tensor.name.empty()) fail("its name is empty");
    if (tensor.name == kMetadataKey) fail("the format reserves this name");
    if (!names.insert(tensor.name).second) fail("another one has the same name");
    if (tensor.shape.size() > kMaxDimensions) fail("it has more than 64 dimensions");
    for (const int64_t size : tensor.shape) {
      if (size < 0) fail(fmt::format("its shape holds {}", size));
    }
    const auto needed = tensor_bytes(tensor.shape, tensor.dtype);
    if (!needed || static_cast<uint64_t>(*needed) != tensor.bytes.size()) {
      fail(fmt::format("{} [{}] does not make the {} bytes given", dtype_name(tensor.dtype),
                       fmt::join(tensor.shape, ", "), tensor.bytes.size()));
    }
  }
}

std::string make_header(const std::vector<TensorBytes>& tensors,
                        const std::map<std::string, std::string>& metadata) {
  std::vector<std::string> entries;
  if (!metadata.empty())
    entries.push_back(fmt::format("\"{}\":{}", kMetadataKey, json(metadata).dump()));
  size_t offset = 0;
  for (const auto& tensor : tensors) {
    const size_t end = offset + tensor.bytes.size();
    entries.push_back(fmt::format(R"({}:{{"dtype":"{}","shape":[{}],"data_offsets":[{},{}]}})",
                                  json(tensor.name).dump(), dtype_name(tensor.dtype),
                                  fmt::join(tensor.shape, ","), offset, end));
    offset = end;
  }
  std::string header = fmt::format("{{{}}}", fmt::join(entries, ","));
  header.resize((header.size() + 7) / 8 * 8, ' ');
  return header;
}

}  // namespace

SafetensorsReader::~SafetensorsReader() = default;
SafetensorsReader::SafetensorsReader(SafetensorsReader&&) noexcept = default;
SafetensorsReader& SafetensorsReader::operator=(SafetensorsReader&&) noexcept = default;

SafetensorsReader::SafetensorsReader(const std::string& path) : path_(path) {
  int64_t file_bytes = 0;
  file_ = open_regular_file(path, file_bytes);
  const auto fail = [&](const std::string& reason, const std::string& help) {
    throw Error(Code::kFileFormat, fmt::format("{}: {}", path, reason), help);
  };
  if (file_bytes < kLengthBytes) {
    fail(fmt::format("the file has {} bytes, fewer than the {} of its header length", file_bytes,
                     kLengthBytes),
         kRemedy);
  }
  std::array<std::byte, kLengthBytes> start{};
  if (!read_exactly(file_->get(), start, 0)) fail_read(path, errno);
  const auto header_bytes = std::bit_cast<uint64_t>(start);
  if (header_bytes > static_cast<uint64_t>(kMaxHeaderBytes)) {
    fail(fmt::format("the header is said to have {} bytes; {} are the most there may be",
                     header_bytes, kMaxHeaderBytes),
         remedy_for(start));
  }
  data_offset_ = kLengthBytes + static_cast<int64_t>(header_bytes);
  if (data_offset_ > file_bytes) {
    fail(fmt::format("the header is said to have {} bytes, but only {} follow", header_bytes,
                     file_bytes - kLengthBytes),
         remedy_for(start));
  }
  std::string text(header_bytes, '\0');
  if (!read_exactly(file_->get(), std::as_writable_bytes(std::span(text)), kLengthBytes)) {
    fail_read(path, errno);
  }
  data_bytes_ = file_bytes - data_offset_;
  const HeaderCheck check(path, data_bytes_);
  const json header = check.parse(text);
  metadata_ = check.metadata(header);
  tensors_ = check.tensors(header);
  for (size_t position = 0; position < tensors_.size(); ++position) {
    index_.emplace(tensors_[position].name, position);
  }
}

const TensorInfo* SafetensorsReader::find(std::string_view name) const {
  const auto found = index_.find(name);
  return found == index_.end() ? nullptr : &tensors_[found->second];
}

void SafetensorsReader::read(const TensorInfo& info, std::span<std::byte> destination) const {
  if (info.begin < 0 || info.begin > info.end || info.end > data_bytes_) {
    throw Error(Code::kTensorMismatch,
                fmt::format("tensor {} does not come from {}", in_quotes(info.name), path_),
                "pass one of this reader's own tensors()");
  }
  if (static_cast<uint64_t>(info.bytes()) != destination.size()) {
    throw Error(Code::kTensorMismatch,
                fmt::format("tensor {} of {} has {} bytes, but there is room for {}",
                            in_quotes(info.name), path_, info.bytes(), destination.size()),
                "make room for exactly the bytes of the tensor");
  }
  if (!read_exactly(file_->get(), destination, data_offset_ + info.begin)) fail_read(path_, errno);
  if (info.dtype != Dtype::kBool) return;
  // Any other value in a bool is undefined behaviour for whoever computes with it.
  const auto wrong = std::find_if(destination.begin(), destination.end(),
                                  [](std::byte value) { return value > std::byte{1}; });
  if (wrong != destination.end()) {
    throw Error(Code::kFileFormat,
                fmt::format("{}: tensor {} holds {} at element {}; a BOOL is 0 or 1", path_,
                            in_quotes(info.name), std::to_integer<int>(*wrong),
                            wrong - destination.begin()),
                kRemedy);
  }
}

void write_safetensors(const std::string& path, std::vector<TensorBytes> tensors,
                       const std::map<std::string, std::string>& metadata) {
  check_for_writing(tensors);
  std::sort(tensors.begin(), tensors.end(), [](const auto& a, const auto& b) {
    const int64_t a_width = dtype_bytes(a.dtype);
    const int64_t b_width = dtype_bytes(b.dtype);
    return std::tie(b_width, a.name) < std::tie(a_width, b.name);
  });
  std::string header;
  try {
    header = make_header(tensors, metadata);
  } catch (const json::exception&) {
    throw Error(Code::kTensorMismatch,
                fmt::format("cannot write {}: a tensor name or a metadata text is not UTF-8", path),
                "use names in UTF-8");
  }
  const auto length = std::bit_cast<std::array<std::byte, kLengthBytes>>(uint64_t{header.size()});
  std::vector<std::span<const std::byte>> pieces = {length, std::as_bytes(std::span(header))};
  for (const auto& tensor : tensors) pieces.push_back(tensor.bytes);
  write_file_atomically(path, pieces);
}

}  // namespace lockstep
