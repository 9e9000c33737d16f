#pragma once

#include <c10/util/intrusive_ptr.h>
#include <torch/types.h>

#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>

namespace lockstep {

/// Maps tensors of this process to notes, such as the owner of a parameter's master weight. A note
/// ends with its tensor: a weak reference keeps the address from being reused. Thread-safe.
template <class Note>
class ParameterMap {
 public:
  void set(const torch::Tensor& tensor, Note note) {
    const std::lock_guard lock(mutex_);
    if (entries_.size() >= purge_at_) {
      std::erase_if(entries_, [](const auto& entry) { return entry.second.tensor.expired(); });
      purge_at_ = 2 * entries_.size() + kFirstPurge;
    }
    entries_.insert_or_assign(
        tensor.unsafeGetTensorImpl(),
        Entry{c10::weak_intrusive_ptr<c10::TensorImpl>(tensor.getIntrusivePtr()), std::move(note)});
  }

  std::optional<Note> get(const torch::Tensor& tensor) const {
    const std::lock_guard lock(mutex_);
    const auto found = entries_.find(tensor.unsafeGetTensorImpl());
    if (found == entries_.end()) return std::nullopt;
    return found->second.note;
  }

  bool empty() const {
    const std::lock_guard lock(mutex_);
    return entries_.empty();
  }

  void erase(const torch::Tensor& tensor) {
    const std::lock_guard lock(mutex_);
    entries_.erase(tensor.unsafeGetTensorImpl());
  }

 private:
  static constexpr size_t kFirstPurge = 1024;

  struct Entry {
    c10::weak_intrusive_ptr<c10::TensorImpl> tensor;
    Note note;
  };

  mutable std::mutex mutex_;  // guards all below
  std::unordered_map<const c10::TensorImpl*, Entry> entries_;
  size_t purge_at_ = kFirstPurge;
};

}  // namespace lockstep
