#pragma once

#include <functional>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "device/capture.hpp"
#include "lockstep/communicator.hpp"
#include "world/comm_state.hpp"

namespace lockstep {

/// What a Work wraps: the backend's handle of the call, and its tensor's way there and back.
struct Work::State {
  bool advance();
  void wait();

  std::shared_ptr<CommState> comm;  // null in a captured step, as is the tensor
  std::optional<StagedTensor> tensor;
  int64_t sequence = 0;                // of the call, for the board
  bool on_side = false;                // it happens in the order of the communicator's side stream
  std::optional<DeviceEvent> arrived;  // on the side stream, whose work is all queued then
  std::vector<std::function<void()>> next;
  std::unique_ptr<Backend::Work> work;  // null once done; goes before the tensor

 private:
  bool do_what_needs_no_waiting();
  void finish();
  void run_next();
};

// Note [Captured calls]. While a training step is captured into graphs, a call of a communicator is
// not made: it is made in each replay, between two graphs, so that it keeps its checks and its
// deadlines. This header is all that communicators know of it.

/// The capture that a call belongs to; null: none, and the call is made now. Refuses, while a step
/// is captured, calls with tensors on the CPU (kCapture): what the host does with them would not be
/// repeated. A rank alone has nobody to wait for: what it does is recorded like any other work.
Capture* capture_of_call(const CommState& state, const char* operation,
                         std::initializer_list<torch::Tensor> tensors);

/// CallOptions that outlive the call they were given to.
class KeptOptions {
 public:
  explicit KeptOptions(const CallOptions& given) : label_(given.label), options_(given) {}

  CallOptions get() const {
    CallOptions options = options_;
    options.label = label_;
    return options;
  }

 private:
  std::string label_;
  CallOptions options_;
};

/// Makes a call: `call(state, options)` runs now, or in each replay of the step that is captured.
template <class Call>
void run_or_capture(const std::shared_ptr<CommState>& state, const char* operation,
                    std::initializer_list<torch::Tensor> tensors, const CallOptions& options,
                    Call call) {
  Capture* capture = capture_of_call(*state, operation, tensors);
  if (capture == nullptr) return call(*state, options);
  capture->between_graphs([state, call, kept = KeptOptions(options)] { call(*state, kept.get()); });
}

/// An all_reduce of a step that is being captured: begun and waited for in each replay.
Work begin_in_replays(Capture& capture, std::function<Work()> begin);

}  // namespace lockstep
