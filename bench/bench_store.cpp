// Saves and loads checkpoints without libtorch, for bench/faults.
//
// usage: bench_store save FOLDER STEP            saves two files, and keeps one checkpoint
//        bench_store damage CHECKPOINT STRIDE MUTATIONS
//
// The latter prints, as JSON, how loads of a damaged checkpoint end. CHECKPOINT is one folder, such
// as runs/a/step-00000100; it is restored at the end. Every STRIDE-th byte is flipped in three
// ways, every file is cut at every STRIDE-th length, and each file gets MUTATIONS random changes.
// Manifests whose checksum was made right again after a change, as somebody who means harm would,
// must not crash the reader either. A load reads everything. It is "refused" (an Error), "same"
// (accepted, with the right bytes), or "wrong"; a crash or a hang ends the forked process that does
// the loads, and the next one goes on behind it.
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <random>

#include "base/checksum.hpp"
#include "checkpoint/reader.hpp"
#include "checkpoint/store.hpp"
#include "lockstep/error.hpp"
#include "lockstep/rank_environment.hpp"

namespace lockstep {
namespace {

namespace fs = std::filesystem;
constexpr unsigned kHangS = 20;

std::string read_bytes(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void write_bytes(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
}

// Everything that a resume reads: the values and all tensors.
std::string load(const std::string& path) {
  const CheckpointReader reader(path);
  reader.verify();
  std::string all = reader.manifest().values.dump();
  for (const auto& tensor : reader.manifest().tensors) {
    all += tensor.section + "." + tensor.name;
    for (const std::byte byte : reader.read(tensor)) all += static_cast<char>(byte);
  }
  return all;
}

// What the process that loads tells the one that counts.
struct Progress {
  int64_t done = 0, refused = 0, same = 0, wrong = 0;
};

struct Damage {
  std::string file;
  std::function<std::string(const std::string&)> change;
};

// A manifest with a right checksum around any text.
std::string sealed(const std::string& body) {
  return "{\"checksum\": \"" + digest_text(checksum_of(body)) + "\",\n\"manifest\": " + body +
         "}\n";
}

std::string body_of(const std::string& manifest) {
  const size_t begin = manifest.find("\"manifest\": ") + 12;
  return manifest.substr(begin, manifest.size() - begin - 2);
}

// Bytes are replaced, removed, repeated, or put in; mostly at the front, where headers are.
std::string mutated(std::string bytes, uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto below = [&](size_t count) { return random() % std::max<size_t>(count, 1); };
  const size_t changes = 1 + below(4);
  for (size_t i = 0; i < changes && !bytes.empty(); ++i) {
    const size_t at =
        below(2) == 0 ? below(std::min<size_t>(bytes.size(), 256)) : below(bytes.size());
    const size_t count = std::min(1 + below(16), bytes.size() - at);
    switch (below(4)) {
      case 0:
        for (size_t j = 0; j < count; ++j) bytes[at + j] = static_cast<char>(random());
        break;
      case 1:
        bytes.erase(at, count);
        break;
      case 2:
        bytes.insert(at, bytes.substr(at, count));
        break;
      default:
        bytes.replace(at, count, std::to_string(random()));
    }
  }
  return bytes;
}

using Files = std::map<std::string, std::string>;  // bytes by name

void restore(const std::string& path, const Files& files) {
  for (const auto& [name, bytes] : files) write_bytes(path + "/" + name, bytes);
}

nlohmann::json run_all(const std::string& path, const std::string& whole, const Files& files,
                       const std::vector<Damage>& damages) {
  auto* progress = static_cast<Progress*>(
      ::mmap(nullptr, sizeof(Progress), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  *progress = {};
  int64_t crashes = 0;
  int64_t hangs = 0;
  while (progress->done < static_cast<int64_t>(damages.size())) {
    const pid_t child = ::fork();
    if (child == 0) {
      while (progress->done < static_cast<int64_t>(damages.size())) {
        const Damage& damage = damages[static_cast<size_t>(progress->done++)];
        const std::string file = path + "/" + damage.file;
        const std::string& before = files.at(damage.file);
        write_bytes(file, damage.change(before));
        ::alarm(kHangS);
        try {
          ++(load(path) == whole ? progress->same : progress->wrong);
        } catch (const Error&) {
          ++progress->refused;
        }
        ::alarm(0);
        write_bytes(file, before);
      }
      ::_exit(0);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    restore(path, files);
    if (status == 0) break;
    ++(WIFSIGNALED(status) && WTERMSIG(status) == SIGALRM ? hangs : crashes);
  }
  nlohmann::json found = {{"damages", damages.size()}, {"refused", progress->refused},
                          {"same", progress->same},    {"wrong", progress->wrong},
                          {"crashes", crashes},        {"hangs", hangs}};
  ::munmap(progress, sizeof(Progress));
  return found;
}

int save(const std::string& folder, int64_t step) {
  CheckpointStore store(folder);
  FileSystem& files = FileSystem::system();
  const std::string draft = store.begin(step);
  Manifest manifest;
  manifest.step = step;
  manifest.values["step"] = {{"all", step}};
  for (const std::string section : {"model", "optimizer"}) {
    const std::vector<float> values(1000, static_cast<float>(step));
    SectionFile file{section, section + ".safetensors", {}, {whole_slice({1000})}};
    file.tensors.push_back({"weight", Dtype::kF32, {1000}, std::as_bytes(std::span(values))});
    auto written = write_section(files, draft, file);
    manifest.files.push_back(written.file);
    for (auto& tensor : written.tensors) manifest.tensors.push_back(std::move(tensor));
  }
  manifest.tensors = merge_pieces(std::move(manifest.tensors));
  store.publish(draft, manifest);
  store.keep_latest(step, 1);
  return 0;
}

int damage(const std::string& path, size_t stride, uint64_t mutations) {
  const std::string whole = load(path);
  Files files;
  for (const auto& entry : fs::directory_iterator(path)) {
    files[entry.path().filename().string()] = read_bytes(entry.path().string());
  }
  std::map<std::string, std::vector<Damage>> kinds;
  for (const auto& [name, bytes] : files) {
    for (size_t at = 0; at < bytes.size(); at += stride) {
      for (const int flip : {0x01, 0x20, 0x80}) {
        kinds["flips"].push_back({name, [at, flip](std::string all) {
                                    all[at] = static_cast<char>(all[at] ^ flip);
                                    return all;
                                  }});
      }
      kinds["truncations"].push_back(
          {name, [at](const std::string& all) { return all.substr(0, at); }});
    }
    for (uint64_t seed = 0; seed < mutations; ++seed) {
      kinds["mutations"].push_back(
          {name, [seed](const std::string& all) { return mutated(all, seed); }});
    }
  }
  for (uint64_t seed = 0; seed < mutations; ++seed) {
    kinds["sealed"].push_back({kManifestName, [seed](const std::string& all) {
                                 return sealed(mutated(body_of(all), seed));
                               }});
  }
  nlohmann::json found;
  for (const auto& [kind, damages] : kinds) {
    found[kind] = run_all(path, whole, files, damages);
  }
  fmt::print("{}\n", found.dump());
  return load(path) == whole ? 0 : 1;
}

int run(int argc, char** argv) {
  const std::vector<std::string> words(argv + 1, argv + argc);
  if (words.size() == 3 && words[0] == "save") return save(words[1], std::stoll(words[2]));
  if (words.size() == 4 && words[0] == "damage") {
    return damage(words[1], std::stoul(words[2]), std::stoul(words[3]));
  }
  throw Error(Code::kUsage, "bench_store does not know these words",
              "bench_store save FOLDER STEP, or bench_store damage CHECKPOINT STRIDE MUTATIONS");
}

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) {
  return lockstep::run_program(lockstep::run, argc, argv);
}
