#include "base/safetensors.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <tuple>

#include "base/checksum.hpp"
#include "base/file.hpp"
#include "lockstep/error.hpp"

namespace lockstep {
namespace {

using nlohmann::json;

static_assert(std::endian::native == std::endian::little, "tensor bytes are little-endian on disk");

constexpr int64_t kLengthBytes = 8;
constexpr int64_t kMaxHeaderBytes = 100'000'000;  // limit of the reference implementation
constexpr int kMaxDepth = 3;                      // header { entry { shape [
constexpr size_t kMaxDimensions = 64;             // the most that libtorch supports
constexpr const char* kMetadataKey = "__metadata__";
// See Note [Checksum of a file].
constexpr const char* kOwnKey = "lockstep";
constexpr const char* kOwnText = "checksummed";
constexpr const char* kChecksumKey = "xxh3_128";
constexpr size_t kChecksumDigits = 32;
constexpr const char* kSafetensorsRemedy =
    "the file is damaged or not safetensors; write it again, e.g. with safetensors.torch.save_file";

struct DtypeEntry {
  Dtype dtype;
  std::string_view name;
  int64_t bytes;
};

constexpr std::array<DtypeEntry, 10> kDtypes = {{{Dtype::kBool, "BOOL", 1},
                                                 {Dtype::kU8, "U8", 1},
                                                 {Dtype::kI8, "I8", 1},
                                                 {Dtype::kI16, "I16", 2},
                                                 {Dtype::kI32, "I32", 4},
                                                 {Dtype::kI64, "I64", 8},
                                                 {Dtype::kF16, "F16", 2},
                                                 {Dtype::kBF16, "BF16", 2},
                                                 {Dtype::kF32, "F32", 4},
                                                 {Dtype::kF64, "F64", 8}}};

const DtypeEntry& entry_of(Dtype dtype) {
  return kDtypes.at(static_cast<size_t>(dtype));
}

// A text from the file on one line of a message, whatever it contains.
std::string in_quotes(std::string_view text) {
  constexpr size_t kShown = 100;
  const std::string_view head = text.substr(0, kShown);
  return json(head).dump(-1, ' ', false, json::error_handler_t::replace) +
         (text.size() > kShown ? "…" : "");
}

// Elements times bytes per element; nothing if that does not fit an int64_t.
std::optional<int64_t> tensor_bytes(const std::vector<int64_t>& shape, Dtype dtype) {
  // A dimension of 0 makes the tensor empty, however large the others are.
  if (std::find(shape.begin(), shape.end(), 0) != shape.end()) return 0;
  int64_t bytes = dtype_bytes(dtype);
  for (const int64_t size : shape) {
    if (size > std::numeric_limits<int64_t>::max() / bytes) return std::nullopt;
    bytes *= size;
  }
  return bytes;
}

// Checks one header. Errors name the file, the tensor and the numbers.
class HeaderCheck {
 public:
  HeaderCheck(std::string path, int64_t data_bytes)
      : path_(std::move(path)), data_bytes_(data_bytes) {}

  json parse(const std::string& text) const;
  std::map<std::string, std::string> metadata(const json& header) const;
  std::vector<TensorInfo> tensors(const json& header) const;

  [[noreturn]] void fail(const std::string& reason,
                         const std::string& help = kSafetensorsRemedy) const {
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

json HeaderCheck::parse(const std::string& text) const {
  if (text.empty() || text.front() != '{') fail("the header does not start with '{'");
  // The JSON parser would stop at a NUL byte and ignore what follows.
  if (text.find('\0') != std::string::npos) fail("the header holds a NUL byte");
  // The parser accepts duplicate keys and any depth of nesting; neither is safe here.
  std::vector<std::set<std::string>> keys_of_open_objects;
  const auto guard = [&](int depth, json::parse_event_t event, json& parsed) {
    using Event = json::parse_event_t;
    const bool opens = event == Event::object_start || event == Event::array_start;
    if (opens && depth >= kMaxDepth)
      fail(fmt::format("the header nests deeper than {}", kMaxDepth));
    if (event == Event::object_start) keys_of_open_objects.emplace_back();
    if (event == Event::object_end) keys_of_open_objects.pop_back();
    if (event == Event::key) {
      const auto& key = parsed.get_ref<const std::string&>();
      if (!keys_of_open_objects.back().insert(key).second) {
        fail(fmt::format("the header has the key {} twice", in_quotes(key)));
      }
    }
    return true;
  };
  try {
    return json::parse(text, guard);
  } catch (const json::parse_error& error) {
    fail(fmt::format("the header is not valid JSON at byte {}", error.byte));
  } catch (const json::exception&) {
    fail("the header is not valid JSON: a number is out of range");
  }
}

std::map<std::string, std::string> HeaderCheck::metadata(const json& header) const {
  std::map<std::string, std::string> texts;
  const auto found = header.find(kMetadataKey);
  if (found == header.end()) return texts;
  if (!found->is_object()) fail(fmt::format("{} is not an object of texts", kMetadataKey));
  for (const auto& [key, value] : found->items()) {
    if (!value.is_string()) fail(fmt::format("{} {} is not a text", kMetadataKey, in_quotes(key)));
    texts.emplace(key, value.get<std::string>());
  }
  return texts;
}

std::vector<int64_t> HeaderCheck::whole_numbers(const std::string& name, const char* field,
                                                const json& value) const {
  if (!value.is_array()) fail(fmt::format("{} of tensor {} is not a list", field, in_quotes(name)));
  std::vector<int64_t> numbers;
  for (const auto& number : value) {
    // To the parser, negative numbers are not "unsigned", and fractions and numbers past 2^64 are
    // floats.
    if (!number.is_number_unsigned() ||
        number.get<uint64_t>() > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
      fail(fmt::format("{} of tensor {} holds {}, which is not a whole number from 0 to 2^63-1",
                       field, in_quotes(name), number.is_number() ? number.dump() : "no number"));
    }
    numbers.push_back(number.get<int64_t>());
  }
  return numbers;
}

Dtype HeaderCheck::dtype(const std::string& name, const json& value) const {
  if (!value.is_string()) fail(fmt::format("dtype of tensor {} is not a text", in_quotes(name)));
  const auto& text = value.get_ref<const std::string&>();
  std::vector<std::string_view> names;
  for (const auto& known : kDtypes) {
    if (known.name == text) return known.dtype;
    names.push_back(known.name);
  }
  fail(fmt::format("tensor {} has dtype {}", in_quotes(name), in_quotes(text)),
       fmt::format("lockstep reads {}; convert the tensor first", fmt::join(names, ", ")));
}

TensorInfo HeaderCheck::tensor(const std::string& name, const json& entry) const {
  if (name.empty()) fail("a tensor has an empty name");
  if (!entry.is_object())
    fail(fmt::format("the entry of tensor {} is not an object", in_quotes(name)));
  for (const char* field : {"dtype", "shape", "data_offsets"}) {
    if (!entry.contains(field)) fail(fmt::format("tensor {} has no {}", in_quotes(name), field));
  }
  if (entry.size() != 3) {
    fail(fmt::format("tensor {} has {} fields; dtype, shape and data_offsets are all there may be",
                     in_quotes(name), entry.size()));
  }
  TensorInfo info;
  info.name = name;
  info.dtype = dtype(name, entry["dtype"]);
  info.shape = whole_numbers(name, "shape", entry["shape"]);
  if (info.shape.size() > kMaxDimensions) {
    fail(fmt::format("tensor {} has {} dimensions; {} are the most there may be", in_quotes(name),
                     info.shape.size(), kMaxDimensions));
  }
  const auto offsets = whole_numbers(name, "data_offsets", entry["data_offsets"]);
  if (offsets.size() != 2) {
    fail(fmt::format("data_offsets of tensor {} has {} numbers instead of 2", in_quotes(name),
                     offsets.size()));
  }
  info.begin = offsets[0];
  info.end = offsets[1];
  if (info.begin > info.end) {
    fail(fmt::format("tensor {} begins at {} and ends before that, at {}", in_quotes(name),
                     info.begin, info.end));
  }
  if (info.end > data_bytes_) {
    fail(fmt::format("tensor {} ends at byte {} of the data, but the file has {} bytes of data",
                     in_quotes(name), info.end, data_bytes_));
  }
  const auto needed = tensor_bytes(info.shape, info.dtype);
  if (!needed) {
    fail(fmt::format("the shape of tensor {}, [{}], has more than 2^63-1 bytes", in_quotes(name),
                     fmt::join(info.shape, ", ")));
  }
  if (*needed != info.bytes()) {
    fail(fmt::format("tensor {} of {} [{}] needs {} bytes, but its offsets {} to {} hold {}",
                     in_quotes(name), dtype_name(info.dtype), fmt::join(info.shape, ", "), *needed,
                     info.begin, info.end, info.bytes()));
  }
  return info;
}

std::vector<TensorInfo> HeaderCheck::tensors(const json& header) const {
  std::vector<TensorInfo> infos;
  for (const auto& [name, entry] : header.items()) {
    if (name != kMetadataKey) infos.push_back(tensor(name, entry));
  }
  // An empty tensor comes before the one that starts at the same byte.
  std::sort(infos.begin(), infos.end(), [](const auto& a, const auto& b) {
    return std::tie(a.begin, a.end, a.name) < std::tie(b.begin, b.end, b.name);
  });
  check_coverage(infos);
  return infos;
}

void HeaderCheck::check_coverage(const std::vector<TensorInfo>& tensors) const {
  int64_t covered = 0;
  std::string before = "the start of the data";
  for (const auto& info : tensors) {
    if (info.begin < covered) {
      fail(fmt::format("tensor {} begins at byte {} and overlaps {}, which ends at {}",
                       in_quotes(info.name), info.begin, before, covered));
    }
    if (info.begin > covered) {
      fail(fmt::format("a hole of {} bytes between {}, byte {}, and tensor {}, byte {}",
                       info.begin - covered, before, covered, in_quotes(info.name), info.begin));
    }
    covered = info.end;
    before = "tensor " + in_quotes(info.name);
  }
  if (covered != data_bytes_) {
    fail(fmt::format("the tensors end at byte {} of the data, but the file has {} bytes of data",
                     covered, data_bytes_));
  }
}

// Returns false with errno set on an I/O error, or with errno 0 if the file ends first.
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
  // Without O_NONBLOCK, opening a FIFO would wait for its writer. Regular files ignore the flag.
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

// The files that people most often pass by mistake get a remedy of their own.
std::string remedy_for(std::span<const std::byte, kLengthBytes> start) {
  const bool zip = std::memcmp(start.data(), "PK\x03\x04", 4) == 0;
  const bool pickle =
      start[0] == std::byte{0x80} && start[1] <= std::byte{5} && start[7] != std::byte{0};
  if (!zip && !pickle) return kSafetensorsRemedy;
  return "it looks like a torch.save file; convert it in Python with "
         "safetensors.torch.save_file(torch.load(old), new)";
}

// What the checksum of a file covers: its header, then the checksums of its tensors.
Digest checksum_over(std::string_view header, const std::vector<Digest>& digests) {
  Checksum sum;
  sum.add(header);
  for (const Digest& digest : digests) sum.add(digest);
  return sum.digest();
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

int64_t dtype_bytes(Dtype dtype) {
  return entry_of(dtype).bytes;
}

std::string_view dtype_name(Dtype dtype) {
  return entry_of(dtype).name;
}

SafetensorsReader::SafetensorsReader(const std::string& path) : path_(path) {
  int64_t file_bytes = 0;
  file_ = open_regular_file(path, file_bytes);
  const auto fail = [&](const std::string& reason, const std::string& help) {
    throw Error(Code::kFileFormat, fmt::format("{}: {}", path, reason), help);
  };
  if (file_bytes < kLengthBytes) {
    fail(fmt::format("the file has {} bytes, fewer than the {} of its header length", file_bytes,
                     kLengthBytes),
         kSafetensorsRemedy);
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
  take_checksum(std::move(text));
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
  // Computing with any other value in a bool is undefined behaviour.
  const auto wrong = std::find_if(destination.begin(), destination.end(),
                                  [](std::byte value) { return value > std::byte{1}; });
  if (wrong != destination.end()) {
    throw Error(Code::kFileFormat,
                fmt::format("{}: tensor {} holds {} at element {}; a BOOL is 0 or 1", path_,
                            in_quotes(info.name), std::to_integer<int>(*wrong),
                            wrong - destination.begin()),
                kSafetensorsRemedy);
  }
}

// Moves the file's own checksum out of the metadata.
void SafetensorsReader::take_checksum(std::string header) {
  const auto own = metadata_.find(kOwnKey);
  const auto sum = metadata_.find(kChecksumKey);
  if (own == metadata_.end() && sum == metadata_.end()) return;
  if (own == metadata_.end() || sum == metadata_.end() || own->second != kOwnText ||
      sum->second.size() != kChecksumDigits) {
    throw Error(Code::kFileFormat, fmt::format("{}: the file's own checksum is damaged", path_),
                kSafetensorsRemedy);
  }
  checksum_ = sum->second;
  checked_header_ = std::move(header);
  const size_t at = checked_header_.find(checksum_);
  if (at != std::string::npos) checked_header_.replace(at, kChecksumDigits, kChecksumDigits, '0');
  metadata_.erase(kOwnKey);
  metadata_.erase(kChecksumKey);
}

void SafetensorsReader::verify() const {
  if (!has_checksum()) return;
  std::vector<Digest> digests;
  std::vector<std::byte> chunk(size_t{1} << 20);
  for (const auto& info : tensors_) {
    Checksum sum;
    for (int64_t at = info.begin; at < info.end;) {
      const auto count = std::min<int64_t>(info.end - at, static_cast<int64_t>(chunk.size()));
      const auto part = std::span(chunk).first(static_cast<size_t>(count));
      if (!read_exactly(file_->get(), part, data_offset_ + at)) fail_read(path_, errno);
      sum.add(part);
      at += count;
    }
    digests.push_back(sum.digest());
  }
  if (digest_text(checksum_over(checked_header_, digests)) == checksum_) return;
  throw Error(Code::kFileFormat,
              fmt::format("{}: its bytes do not match its checksum: the file was damaged", path_),
              "use another copy of the file, or write it again");
}

std::vector<std::span<const std::byte>> SafetensorsImage::pieces() const {
  std::vector<std::span<const std::byte>> all = {std::as_bytes(std::span(start))};
  for (const auto& tensor : tensors) all.push_back(tensor.bytes);
  return all;
}

SafetensorsImage make_safetensors(const std::string& path, std::vector<TensorBytes> tensors,
                                  std::map<std::string, std::string> metadata,
                                  FileChecksum checksum) {
  check_for_writing(tensors);
  std::sort(tensors.begin(), tensors.end(), [](const auto& a, const auto& b) {
    const int64_t a_width = dtype_bytes(a.dtype);
    const int64_t b_width = dtype_bytes(b.dtype);
    return std::tie(b_width, a.name) < std::tie(a_width, b.name);
  });
  SafetensorsImage image;
  const std::string zeros(kChecksumDigits, '0');
  if (checksum == FileChecksum::kOwn) {
    metadata[kOwnKey] = kOwnText;
    metadata[kChecksumKey] = zeros;
    for (const auto& tensor : tensors) image.digests.push_back(checksum_of(tensor.bytes));
  }
  std::string header;
  try {
    header = make_header(tensors, metadata);
  } catch (const json::exception&) {
    throw Error(Code::kTensorMismatch,
                fmt::format("cannot write {}: a tensor name or a metadata text is not UTF-8", path),
                "use names in UTF-8");
  }
  if (checksum == FileChecksum::kOwn) {
    const std::string sum = digest_text(checksum_over(header, image.digests));
    const std::string entry = fmt::format("\"{}\":\"", kChecksumKey);
    header.replace(header.find(entry + zeros) + entry.size(), zeros.size(), sum);
  }
  const auto length = std::bit_cast<std::array<char, kLengthBytes>>(uint64_t{header.size()});
  image.start = std::string(length.data(), length.size()) + header;
  image.tensors = std::move(tensors);
  return image;
}

void write_safetensors(const std::string& path, std::vector<TensorBytes> tensors,
                       const std::map<std::string, std::string>& metadata, FileChecksum checksum) {
  const auto image = make_safetensors(path, std::move(tensors), metadata, checksum);
  write_file_atomically(path, image.pieces());
}

}  // namespace lockstep
