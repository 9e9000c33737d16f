#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/file.hpp"
#include "base/safetensors.hpp"
#include "checkpoint/file_system.hpp"
#include "checkpoint/manifest.hpp"

namespace lockstep {

/// A checkpoint of a folder, complete as far as its name tells.
struct CheckpointEntry {
  int64_t step = 0;
  std::string path;  ///< runs/a/step-00000100
};

/// "step-00000100".
std::string checkpoint_name(int64_t step);

/// The checkpoints of a folder, ascending. Empty if there is no such folder.
std::vector<CheckpointEntry> list_checkpoints(const std::string& folder);

/// Writes a file that no other run has, and returns its name: ranks that see it share this folder.
/// Whoever opens the folder next removes it.
std::string write_probe(FileSystem& files, const std::string& folder);

/// What keeps this rank from writing where the probe is; empty: nothing.
std::string trouble_at_probe(FileSystem& files, const std::string& folder, const std::string& probe,
                             int rank);

/// Note [How a checkpoint is written]
/// Everything goes to a new folder whose name starts with a dot. When all files, the manifest and
/// that folder are on disk, it is renamed to step-N, and the folder above is flushed. So a
/// checkpoint with such a name is complete, and whatever happens before leaves the earlier ones as
/// they were. Old ones are removed only afterwards, and renamed first, so that half of one never
/// has the name of a whole one. One process at a time writes to a folder: it holds a lock, which
/// the kernel releases when the process ends, however it does. So whoever has the lock may remove
/// what others left.

/// A folder of checkpoints, held for writing by this process.
class CheckpointStore {
 public:
  /// Makes the folder, checks that it can be written to, locks it, and removes what a writer that
  /// crashed left there. An Error says what is wrong, or who else writes there.
  explicit CheckpointStore(std::string folder, FileSystem& files = FileSystem::system());

  const std::string& folder() const { return folder_; }

  /// Makes the folder for the files of a checkpoint and returns its path. All ranks write there.
  std::string begin(int64_t step);

  /// Writes the manifest and makes the checkpoint visible, if there is none of that step that is
  /// good. One that is damaged is moved aside. Returns its path.
  std::string publish(const std::string& draft, const Manifest& manifest);

  /// Removes a draft that will not be published.
  void discard(const std::string& draft);

  /// Removes the checkpoints before `step`, except the latest `keep - 1` of them. Later ones, which
  /// a run that started again has not reached, are left alone.
  void keep_latest(int64_t step, int keep);

  /// Removes one.
  void remove(const CheckpointEntry& entry);

 private:
  void make_folder();
  void lock();
  void remove_leftovers();
  void move_damaged_aside(const std::string& path);

  std::string folder_;
  FileSystem& files_;
  std::unique_ptr<Descriptor> lock_;
  bool locked_ = false;  // false if the file system has no locks
};

/// Writes a safetensors file of a draft and flushes it. Any rank may do so. Adds to `tensors` what
/// the file holds; `slices` are those of the tensors, by name.
struct SectionFile {
  std::string section;
  std::string name;                  ///< model.safetensors
  std::vector<TensorBytes> tensors;  ///< under their names
  std::vector<Slice> slices;         ///< [tensor]
};
struct WrittenFile {
  StoredFile file;
  std::vector<StoredTensor> tensors;
};
WrittenFile write_section(FileSystem& files, const std::string& draft, const SectionFile& section);

}  // namespace lockstep
