#pragma once

#include <c10/core/Storage.h>
#include <torch/types.h>

#include <cstddef>
#include <span>

// Which operation reads which memory: operations of libtorch report their tensors before they run.
// libtorch's C++ modules have no forward hooks, so memory that is filled just in time is filled
// here.
//
// Note [Watched storages] Every operation that goes through libtorch's dispatcher calls the
// RecordFunction callbacks of its thread with its inputs, in forward and in backward, whoever calls
// it: a module, a loss, autograd, a TorchScript function. The storage of an input tells whose
// memory it is, whatever view of it was given. Code that reads addresses without the dispatcher, as
// lockstep's own kernels do, calls note_use() first. Tensors' metadata are free to read.
namespace lockstep {

/// Is called before watched memory is used, by the thread that uses it.
class StorageWatcher {
 public:
  virtual ~StorageWatcher() = default;

  /// These storages, by the numbers that they are watched under, are about to be read or written.
  /// `outermost`: by an operation that is not part of another one, which may still hold addresses
  /// of other storages. RecordFunction swallows exceptions, so errors must be kept for later.
  virtual void before_use(std::span<const size_t> storages, bool outermost) noexcept = 0;
};

/// Guard: `watcher` is called before each use of this storage, on threads that watch.
class WatchedStorage {
 public:
  WatchedStorage(c10::Storage storage, StorageWatcher& watcher, size_t number);
  ~WatchedStorage();
  WatchedStorage(const WatchedStorage&) = delete;
  WatchedStorage& operator=(const WatchedStorage&) = delete;

 private:
  c10::Storage storage_;
};

/// From now on the calling thread, and backward passes that it starts, report what they use. Costs
/// each operation about a microsecond.
void watch_this_thread();

/// Whether it does.
bool is_watching();

/// Ends that, unless any storage is still watched.
void unwatch_this_thread();

/// Reports a tensor that is about to be read without the dispatcher. Does nothing for a tensor
/// whose storage is not watched.
void note_use(const torch::Tensor& tensor);

/// Guard: operations of this thread are not reported.
class WithoutWatching {
 public:
  WithoutWatching();
  ~WithoutWatching();
  WithoutWatching(const WithoutWatching&) = delete;
  WithoutWatching& operator=(const WithoutWatching&) = delete;

 private:
  bool before_;
};

}  // namespace lockstep
