#include "device/storage_watch.hpp"

#include <ATen/record_function.h>
#include <torch/torch.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <unordered_map>
#include <utility>
#include <vector>

namespace lockstep {
namespace {

struct Watched {
  StorageWatcher* watcher;
  size_t number;
};

// All watched storages of the process: backward may run on another thread than forward.
struct WatchList {
  std::shared_mutex mutex;
  std::unordered_map<const c10::StorageImpl*, Watched> storages;
  std::atomic<size_t> count{0};  // of storages, to be read without the mutex
};

WatchList& watch_list() {
  static auto* made = new WatchList();  // callbacks of threads may outlive everything
  return *made;
}

struct ThreadWatch {
  std::optional<at::CallbackHandle> callback;
  uint64_t seen = 0;  // operations
  bool suspended = false;
  int depth = 0;               // of operations inside operations
  std::vector<Watched> found;  // by the current operation; a member, so that its memory is reused
};

thread_local ThreadWatch this_thread;

void look_at(const torch::Tensor& tensor, std::vector<Watched>& found) {
  if (!tensor.defined() || !tensor.has_storage()) return;
  const auto& storages = watch_list().storages;
  const auto known = storages.find(tensor.storage().unsafeGetStorageImpl());
  if (known != storages.end()) found.push_back(known->second);
}

void look_at(const c10::IValue& value, std::vector<Watched>& found) {
  if (value.isTensor()) {
    look_at(value.toTensor(), found);
  } else if (value.isTensorList() || value.isOptionalTensorList()) {
    for (const c10::IValue& each : value.toListRef()) look_at(each, found);
  }
}

void tell_watchers(std::vector<Watched> found, bool outermost) {
  while (!found.empty()) {
    StorageWatcher* watcher = found.front().watcher;
    std::vector<size_t> numbers;
    for (const Watched& each : found) {
      const bool known = std::find(numbers.begin(), numbers.end(), each.number) != numbers.end();
      if (each.watcher == watcher && !known) numbers.push_back(each.number);
    }
    watcher->before_use(numbers, outermost);
    std::erase_if(found, [&](const Watched& each) { return each.watcher == watcher; });
  }
}

bool watches_now() {
  return !this_thread.suspended && watch_list().count.load(std::memory_order_relaxed) > 0;
}

std::unique_ptr<at::ObserverContext> operation_begins(const at::RecordFunction& operation) {
  const bool outermost = this_thread.depth++ == 0;
  ++this_thread.seen;
  if (!watches_now()) return nullptr;
  auto& found = this_thread.found;
  {
    const std::shared_lock lock(watch_list().mutex);
    for (const c10::IValue& input : operation.inputs()) look_at(input, found);
  }
  if (!found.empty()) tell_watchers(std::exchange(found, {}), outermost);
  return nullptr;
}

void operation_ends(const at::RecordFunction&, at::ObserverContext*) {
  --this_thread.depth;
}

}  // namespace

WatchedStorage::WatchedStorage(c10::Storage storage, StorageWatcher& watcher, size_t number)
    : storage_(std::move(storage)) {
  WatchList& list = watch_list();
  const std::unique_lock lock(list.mutex);
  list.storages.insert_or_assign(storage_.unsafeGetStorageImpl(), Watched{&watcher, number});
  list.count = list.storages.size();
}

WatchedStorage::~WatchedStorage() {
  WatchList& list = watch_list();
  const std::unique_lock lock(list.mutex);
  list.storages.erase(storage_.unsafeGetStorageImpl());
  list.count = list.storages.size();
}

// A callback is part of libtorch's thread-local state, which backward passes and tasks of a device
// replace for a while and then restore, without what was added meanwhile.
bool is_watching() {
  const uint64_t before = this_thread.seen;
  (void)torch::empty({0});
  return this_thread.seen != before;
}

void watch_this_thread() {
  if (is_watching()) return;
  this_thread.callback =
      at::addThreadLocalCallback(at::RecordFunctionCallback(operation_begins, operation_ends)
                                     .needsInputs(true)
                                     .scopes({at::RecordScope::FUNCTION}));
}

void unwatch_this_thread() {
  if (!this_thread.callback || watch_list().count > 0) return;
  if (is_watching()) at::removeCallback(*this_thread.callback);
  this_thread.callback.reset();
}

void note_use(const torch::Tensor& tensor) {
  if (!watches_now()) return;
  std::vector<Watched> found;
  {
    const std::shared_lock lock(watch_list().mutex);
    look_at(tensor, found);
  }
  if (!found.empty()) tell_watchers(std::move(found), /*outermost=*/false);
}

WithoutWatching::WithoutWatching() : before_(std::exchange(this_thread.suspended, true)) {}

WithoutWatching::~WithoutWatching() {
  this_thread.suspended = before_;
}

}  // namespace lockstep
