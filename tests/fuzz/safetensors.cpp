// A safetensors file, and a header alone in front of 64 zeros: bytes from anywhere.

#include "base/safetensors.hpp"

#include <bit>
#include <cstring>

#include "fuzz.hpp"

namespace lockstep::fuzz {
namespace {

constexpr size_t kDataOfHeader = 64;

struct Content {
  std::vector<TensorInfo> tensors;
  std::vector<std::vector<std::byte>> bytes;  // [tensor]
  std::map<std::string, std::string> metadata;
};

Content read_all(const SafetensorsReader& reader, size_t file_bytes) {
  Content content{reader.tensors(), {}, reader.metadata()};
  size_t sum = 0;
  for (const auto& info : reader.tensors()) {
    sum += static_cast<size_t>(info.bytes());
    require(sum <= file_bytes, "tensors are no larger than their file");
    require(reader.find(info.name) != nullptr, "a tensor is found by its name");
    content.bytes.emplace_back(static_cast<size_t>(info.bytes()));
    reader.read(info, content.bytes.back());
  }
  return content;
}

// What was read is written, and must be read as the same.
void write_and_read(const Content& content, const Scratch& scratch) {
  std::vector<TensorBytes> tensors;
  for (size_t i = 0; i < content.tensors.size(); ++i) {
    const TensorInfo& info = content.tensors[i];
    tensors.push_back({info.name, info.dtype, info.shape, content.bytes[i]});
  }
  const auto image = make_safetensors("again", tensors, content.metadata, FileChecksum::kOwn);
  std::string file;
  for (const auto piece : image.pieces()) {
    file.append(reinterpret_cast<const char*>(piece.data()), piece.size());
  }
  const SafetensorsReader reader(scratch.write("again.safetensors", file));
  reader.verify();
  require(reader.has_checksum(), "a file that is written with a checksum has one");
  require(reader.metadata() == content.metadata, "metadata survives writing");
  require(reader.tensors().size() == content.tensors.size(), "all tensors survive writing");
  for (size_t i = 0; i < content.tensors.size(); ++i) {
    const TensorInfo* info = reader.find(content.tensors[i].name);
    require(info != nullptr && info->shape == content.tensors[i].shape &&
                info->dtype == content.tensors[i].dtype,
            "a tensor survives writing");
    std::vector<std::byte> bytes(static_cast<size_t>(info->bytes()));
    reader.read(*info, bytes);
    require(bytes == content.bytes[i], "a tensor's bytes survive writing");
  }
}

void read_file(std::string_view bytes, const Scratch& scratch) {
  accepts([&] {
    const SafetensorsReader reader(scratch.write("in.safetensors", bytes));
    reader.verify();
    const Content content = read_all(reader, bytes.size());
    write_and_read(content, scratch);
  });
}

}  // namespace
}  // namespace lockstep::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace lockstep::fuzz;
  static const Scratch scratch;
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  read_file(bytes, scratch);
  const auto length = std::bit_cast<std::array<char, 8>>(uint64_t{size});
  std::string file(length.data(), length.size());
  file += bytes;
  file.append(kDataOfHeader, '\0');
  read_file(file, scratch);
  return 0;
}
