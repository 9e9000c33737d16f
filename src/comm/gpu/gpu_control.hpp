#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string_view>
#include <vector>

#include "comm/backend.hpp"
#include "comm/gpu/gpu_agreement.hpp"

namespace lockstep {

/// The host's side of a GPU communicator: compares calls before data moves, and knows how it ended.
///
/// It has communicators of its own, the channels, split off the host's, so that its traffic meets
/// no other. Channel 0 compares the calls, in the order they were made; what happens at other times
/// needs another channel, since each wants the same order on all ranks. Used by one thread at a
/// time.
class GpuControl {
 public:
  /// Collective over `host`, which may go afterwards.
  GpuControl(Backend& host, int channels, int64_t deadline_ns);

  const Group& group() const { return group_; }
  int rank() const { return group_.rank; }
  int size() const { return group_.size(); }
  Backend& channel(int index) { return *channels_.at(static_cast<size_t>(index)); }

  /// Peers that wait for this rank there learn that it has left. No call may follow.
  void close(int index) { channels_.at(static_cast<size_t>(index)).reset(); }

  /// Does a part of a call. An exception ends the communicator: peers learn of it, `failed` is
  /// told, and every later guarded() throws it again. kUsage of arguments is thrown before this.
  void guarded(const std::function<void()>& action);

  /// Gives a collective its number and label and begins to compare it. In guarded() only.
  Call number(Call what, const CallContext& context);
  std::unique_ptr<GpuAgreement> agree(const Call& numbered, const CallContext& context,
                                      std::span<const std::byte> note = {});

  /// Collective: the controls of the groups. After the split was agreed on, in guarded() only.
  std::unique_ptr<GpuControl> split(int colour, int key, std::string_view group_name,
                                    const Call& why, const CallContext& context);

  /// This rank gives up; see Backend::abort.
  void abort(std::string_view reason) noexcept;

  bool broken() const;

  /// Called once, with the error that ended the communicator; must not throw.
  void on_failure(std::function<void(const std::exception_ptr&)> failed) {
    failed_ = std::move(failed);
  }

 private:
  explicit GpuControl(std::vector<std::unique_ptr<Backend>> channels);
  bool keep_first(const std::exception_ptr& error) noexcept;
  void end(const std::exception_ptr& error, std::string_view farewell) noexcept;

  Group group_;
  std::vector<std::unique_ptr<Backend>> channels_;  // null where closed
  std::function<void(const std::exception_ptr&)> failed_;
  int64_t sequence_ = 0;
  mutable std::mutex broken_mutex_;  // abort() may come from another thread
  std::exception_ptr broken_;
};

}  // namespace lockstep
