// A checkpoint's folder with damage. The input is a list of edits: which file, what to do, where.
// Whatever they do, a checkpoint that is accepted has the bytes that were saved.

#include <cstring>

#include "base/checksum.hpp"
#include "checkpoint/compare.hpp"
#include "checkpoint/reader.hpp"
#include "checkpoint/store.hpp"
#include "fuzz.hpp"

namespace lockstep::fuzz {
namespace {

constexpr size_t kMostEdits = 16;

// A small checkpoint of two ranks, as files in memory.
struct Saved {
  std::vector<std::string> names;
  std::vector<std::string> files;  // [name]
  std::string folder;              // undamaged
};

Saved save(const Scratch& scratch) {
  CheckpointStore store(scratch.file("runs"));
  const std::string draft = store.begin(6);
  Manifest manifest;
  manifest.step = 6;
  manifest.ranks = 2;
  manifest.created = "2026-11-18T08:00:00Z";
  manifest.lockstep = "fuzz";
  manifest.values["epoch"] = {{"all", 3}};
  for (int rank = 0; rank < 2; ++rank) {
    const std::vector<float> rows = {1.5F, 2.5F, static_cast<float>(rank)};
    SectionFile file{"model", "model.rank" + std::to_string(rank) + ".safetensors", {}, {}};
    file.tensors.push_back({"weight", Dtype::kF32, {1, 3}, std::as_bytes(std::span(rows))});
    file.slices.push_back({{2, 3}, {1, 3}, {{{0, 0}, {rank, 0}, {1, 3}}}});
    const auto written = write_section(FileSystem::system(), draft, file);
    manifest.files.push_back(written.file);
    manifest.tensors.insert(manifest.tensors.end(), written.tensors.begin(), written.tensors.end());
  }
  manifest.tensors = merge_pieces(std::move(manifest.tensors));
  Saved saved;
  saved.folder = store.publish(draft, manifest);
  saved.names = {"manifest.json", "model.rank0.safetensors", "model.rank1.safetensors"};
  for (const auto& name : saved.names) saved.files.push_back(read_bytes(saved.folder + "/" + name));
  return saved;
}

void edit(Input& input, std::vector<std::string>& files) {
  std::string& file = files[input.byte() % files.size()];
  const uint8_t kind = input.byte();
  const size_t at = input.number16() % (file.size() + 1);
  switch (kind % 6) {
    case 0:
      if (at < file.size()) file[at] = static_cast<char>(file[at] ^ input.byte());
      break;
    case 1:
      file.resize(at);
      break;
    case 2:
      file.insert(at, input.take(input.byte()));
      break;
    case 3:
      file.erase(at, input.byte());
      break;
    case 4: {
      const std::string_view text = input.take(input.byte());
      file.replace(at, std::min(text.size(), file.size() - at), text);
      break;
    }
    default:
      std::swap(file, files[input.byte() % files.size()]);
  }
}

// Puts a right checksum before the manifest's body, so that what comes after the checksum is
// reached.
void seal(std::string& manifest) {
  constexpr std::string_view kBefore = "\",\n\"manifest\": ";
  const size_t body = manifest.find(kBefore);
  if (body == std::string::npos || manifest.size() < body + kBefore.size() + 2) return;
  const std::string text =
      manifest.substr(body + kBefore.size(), manifest.size() - body - kBefore.size() - 2);
  manifest =
      "{\"checksum\": \"" + digest_text(checksum_of(text)) + std::string(kBefore) + text + "}\n";
}

}  // namespace
}  // namespace lockstep::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace lockstep;
  using namespace lockstep::fuzz;
  static const Scratch scratch;
  static const Saved saved = save(scratch);
  static const CheckpointReader original(saved.folder);
  static const std::string folder = scratch.file("damaged");
  std::filesystem::create_directories(folder);
  Input input(data, size);
  const bool sealed = input.byte() % 2 == 1;
  std::vector<std::string> files = saved.files;
  for (size_t i = 0; i < kMostEdits && !input.empty(); ++i) edit(input, files);
  if (sealed) seal(files[0]);
  for (size_t i = 0; i < files.size(); ++i) scratch.write("damaged/" + saved.names[i], files[i]);
  accepts([&] {
    const CheckpointReader reader(folder);
    reader.verify();
    for (const auto& tensor : reader.manifest().tensors) {
      require(reader.read(tensor).size() == static_cast<size_t>(tensor.bytes()),
              "a verified checkpoint can be read");
    }
    require(sealed || (compare(original, reader).empty() && files == saved.files),
            "a checkpoint that is accepted is the one that was saved");
    compare(original, reader);
  });
  return 0;
}
