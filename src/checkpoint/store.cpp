#include "checkpoint/store.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <filesystem>
#include <map>
#include <optional>
#include <string_view>

#include "base/checksum.hpp"
#include "base/random.hpp"
#include "checkpoint/reader.hpp"
#include "lockstep/error.hpp"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kStepPrefix = "step-";
constexpr std::string_view kDraftPrefix = ".saving-";
constexpr std::string_view kDeletedPrefix = ".deleting-";
constexpr const char* kLockName = "/.lock";
constexpr const char* kProbePrefix = "/.saving-probe-";
constexpr int64_t kLargestStep = 999'999'999'999'999;

std::optional<int64_t> step_of(std::string_view name) {
  if (!name.starts_with(kStepPrefix)) return std::nullopt;
  name.remove_prefix(kStepPrefix.size());
  int64_t step = 0;
  const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), step);
  if (error != std::errc() || end != name.data() + name.size() || step < 0 || step > kLargestStep)
    return std::nullopt;
  // Other spellings of the number would be other folders of the same step.
  if (checkpoint_name(step).substr(kStepPrefix.size()) != name) return std::nullopt;
  return step;
}

// Who holds the lock: the holder wrote it into the file.
std::string holder_of(int file) {
  std::string text(200, '\0');
  const ssize_t count = ::pread(file, text.data(), text.size(), 0);
  text.resize(count > 0 ? static_cast<size_t>(count) : 0);
  return text.substr(0, text.find('\n'));
}

std::string this_process() {
  std::string host(256, '\0');
  ::gethostname(host.data(), host.size() - 1);
  return fmt::format("pid {} on {}", ::getpid(), host.c_str());
}

std::string parent_of(const std::string& folder) {
  const std::string parent = fs::path(folder).parent_path().string();
  return parent.empty() ? "." : parent;
}

void write_probe_file(FileSystem& files, const std::string& path) {
  const std::string text = "lockstep checks that this folder can be written to\n";
  const std::span<const std::byte> bytes = std::as_bytes(std::span(text));
  write_new_file(files, path, std::span(&bytes, 1));
}

}  // namespace

std::string checkpoint_name(int64_t step) {
  return fmt::format("{}{:08}", kStepPrefix, step);
}

std::vector<CheckpointEntry> list_checkpoints(const std::string& folder) {
  std::vector<CheckpointEntry> found;
  std::error_code error;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    const auto step = step_of(it->path().filename().string());
    std::error_code ignored;
    if (step && it->is_directory(ignored)) {
      found.push_back({*step, folder + "/" + it->path().filename().string()});
    }
  }
  if (error && error != std::errc::no_such_file_or_directory) {
    throw Error(Code::kFileRead, fmt::format("cannot read {}: {}", folder, error.message()),
                "name a folder of checkpoints that you may read");
  }
  std::sort(found.begin(), found.end(),
            [](const auto& a, const auto& b) { return a.step < b.step; });
  return found;
}

std::string write_probe(FileSystem& files, const std::string& folder) {
  const std::string probe = kProbePrefix + random_hex(16);
  write_probe_file(files, folder + probe);
  return probe;
}

std::string trouble_at_probe(FileSystem& files, const std::string& folder, const std::string& probe,
                             int rank) {
  std::error_code ignored;
  if (!fs::exists(folder + probe, ignored)) return "it does not see rank 0's " + folder;
  const std::string own = fmt::format("{}{}-rank{}", folder, probe, rank);
  try {
    write_probe_file(files, own);
  } catch (const Error& error) {
    return error.message();
  }
  files.remove(own);
  return "";
}

CheckpointStore::CheckpointStore(std::string folder, FileSystem& files)
    : folder_(std::move(folder)), files_(files) {
  while (folder_.size() > 1 && folder_.ends_with('/')) folder_.pop_back();
  if (folder_.empty()) {
    throw Error(Code::kUsage, "the folder for checkpoints has an empty name",
                "name a folder, such as runs/a");
  }
  make_folder();
  lock();
  const std::string probe = fmt::format("{}{}{}", folder_, kProbePrefix, ::getpid());
  if (locked_) remove_leftovers();
  write_probe_file(files_, probe);
  files_.remove(probe);
}

void CheckpointStore::make_folder() {
  // The folders above are made too, as `mkdir -p` does.
  std::vector<std::string> missing;
  for (std::string path = folder_; !path.empty(); path = fs::path(path).parent_path().string()) {
    std::error_code ignored;
    if (fs::exists(path, ignored)) break;
    missing.push_back(path);
  }
  for (auto path = missing.rbegin(); path != missing.rend(); ++path) {
    const int error = files_.make_folder(*path);
    if (error != 0 && error != EEXIST) fail_to_write(*path, error);
    sync_folder(files_, parent_of(*path));
  }
}

void CheckpointStore::lock() {
  const std::string path = folder_ + kLockName;
  lock_ = std::make_unique<Descriptor>(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644));
  if (lock_->get() < 0) fail_to_write(path, errno);
  if (::flock(lock_->get(), LOCK_EX | LOCK_NB) == 0) {
    locked_ = true;
    const std::string text = this_process() + "\n";
    if (::ftruncate(lock_->get(), 0) == 0) {
      // The text is for people only, so a disk that is full does not matter.
      [[maybe_unused]] const auto written = ::pwrite(lock_->get(), text.data(), text.size(), 0);
    }
    return;
  }
  if (errno != EWOULDBLOCK) return;  // the file system has no locks
  throw Error(
      Code::kFileWrite,
      fmt::format("{} is in use: {} saves checkpoints there", folder_, holder_of(lock_->get())),
      "let that run end first, or save to another folder");
}

void CheckpointStore::remove_leftovers() {
  std::error_code error;
  std::vector<std::string> found;
  for (fs::directory_iterator it(folder_, error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    if (name.starts_with(kDraftPrefix) || name.starts_with(kDeletedPrefix)) {
      found.push_back(it->path().string());
    }
  }
  for (const auto& path : found) {
    std::error_code ignored;
    if (fs::is_directory(path, ignored)) {
      remove_tree(files_, path);
    } else {
      files_.remove(path);
    }
  }
}

std::string CheckpointStore::begin(int64_t step) {
  if (step < 0 || step > kLargestStep) {
    throw Error(Code::kUsage, fmt::format("a checkpoint cannot have step {}", step),
                fmt::format("give a step from 0 to {}", kLargestStep));
  }
  const std::string draft =
      fmt::format("{}/{}{}-{}", folder_, kDraftPrefix, checkpoint_name(step), ::getpid());
  remove_tree(files_, draft);  // of an earlier try
  if (const int error = files_.make_folder(draft)) fail_to_write(draft, error);
  return draft;
}

std::string CheckpointStore::publish(const std::string& draft, const Manifest& manifest) {
  const std::string path = folder_ + "/" + checkpoint_name(manifest.step);
  const std::string text = render(manifest);
  const std::span<const std::byte> bytes = std::as_bytes(std::span(text));
  write_new_file(files_, draft + "/" + kManifestName, std::span(&bytes, 1));
  sync_folder(files_, draft);
  if (fs::exists(path)) move_damaged_aside(path);
  if (const int error = files_.rename(draft, path)) fail_to_write(path, error);
  sync_folder(files_, folder_);
  return path;
}

void CheckpointStore::move_damaged_aside(const std::string& path) {
  try {
    CheckpointReader(path).verify();
  } catch (const Error& reason) {
    if (!is_damage(reason)) throw;
    for (int number = 1;; ++number) {
      const int error = files_.rename(path, fmt::format("{}.damaged-{}", path, number));
      if (error == 0) return;
      if (error != EEXIST) fail_to_write(path, error);
    }
  }
  throw Error(Code::kFileWrite,
              fmt::format("{} exists already and is good; it was not replaced", path),
              "resume from it, or save to another folder");
}

void CheckpointStore::discard(const std::string& draft) {
  remove_tree(files_, draft);
}

void CheckpointStore::keep_latest(int64_t step, int keep) {
  auto earlier = list_checkpoints(folder_);
  std::erase_if(earlier, [&](const auto& entry) { return entry.step >= step; });
  const auto kept = static_cast<size_t>(std::max(keep - 1, 0));
  for (size_t i = 0; i + kept < earlier.size(); ++i) remove(earlier[i]);
}

void CheckpointStore::remove(const CheckpointEntry& entry) {
  const std::string away =
      fmt::format("{}/{}{}", folder_, kDeletedPrefix, checkpoint_name(entry.step));
  remove_tree(files_, away);
  if (const int error = files_.rename(entry.path, away)) fail_to_write(entry.path, error);
  if (const int error = remove_tree(files_, away)) fail_to_write(away, error);
}

WrittenFile write_section(FileSystem& files, const std::string& draft, const SectionFile& section) {
  const std::string path = draft + "/" + section.name;
  std::map<std::string_view, const Slice*> slices;
  for (size_t i = 0; i < section.tensors.size(); ++i) {
    slices.emplace(section.tensors[i].name, &section.slices[i]);
  }
  const auto image =
      make_safetensors(path, section.tensors, {{"format", "pt"}}, FileChecksum::kOwn);
  const auto pieces = image.pieces();
  WrittenFile written;
  written.file.name = section.name;
  Checksum sum;
  for (const auto& piece : pieces) {
    sum.add(piece);
    written.file.bytes += static_cast<int64_t>(piece.size());
  }
  written.file.checksum = digest_text(sum.digest());
  for (size_t i = 0; i < image.tensors.size(); ++i) {
    const auto& tensor = image.tensors[i];
    written.tensors.push_back(
        {section.section,
         tensor.name,
         tensor.dtype,
         {{section.name, digest_text(image.digests[i]), *slices.at(tensor.name)}}});
  }
  write_new_file(files, path, pieces);
  return written;
}

}  // namespace lockstep
