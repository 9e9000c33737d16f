#pragma once

#include <memory>
#include <optional>

#include "device/capture.hpp"
#include "lockstep/communicator.hpp"
#include "world/comm_state.hpp"
#include "world/passage.hpp"

namespace lockstep {

/// What an all_reduce does after it was begun.
struct Work::State {
  virtual ~State() = default;
  virtual bool advance() = 0;
  virtual void wait() = 0;
  virtual std::optional<Moment> arrived() const { return std::nullopt; }
};

/// An all_reduce that a backend has begun.
class BegunWork final : public Work::State {
 public:
  /// `on_side`: it happens in the order of the communicator's side stream.
  BegunWork(std::shared_ptr<CommState> comm, Passage tensor, int64_t sequence, bool on_side,
            std::unique_ptr<Pending> pending);

  bool advance() override;
  void wait() override;
  std::optional<Moment> arrived() const override { return arrived_; }

 private:
  void finish();

  std::shared_ptr<CommState> comm_;
  Passage tensor_;
  int64_t sequence_;
  bool on_side_;
  std::optional<Moment> arrived_;     // on the side stream, whose work is all queued then
  std::unique_ptr<Pending> pending_;  // null once done; goes before the tensor
};

/// An all_reduce of a step that is being captured: begun and waited for in each replay.
class CapturedWork final : public Work::State {
 public:
  CapturedWork(Capture& capture, const Communicator& comm, const torch::Tensor& tensor, ReduceOp op,
               const CallOptions& options);

  /// Never done by itself: the replay's backward computes on until it waits.
  bool advance() override { return waited_; }
  void wait() override;

 private:
  std::shared_ptr<std::optional<Work>> replayed_;  // begun and not waited for in this replay
  bool waited_ = false;
};

}  // namespace lockstep
