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

/// What a Work wraps: the backend's handle of the call, and its tensors' way there and back.
struct Work::State {
  bool advance();
  void wait();

  std::shared_ptr<CommState> comm;  // null in a captured step, in which there are no tensors either
  std::optional<StagedTensor> input;   // only read; none of a call in place
  std::optional<StagedTensor> output;  // written, and read by a call in place
  int64_t sequence = 0;                // of the call, for the board
  bool stays = false;                  // the backend checks the call, and no value moves
  bool on_side = false;                // it happens in the order of the communicator's side stream
  std::optional<DeviceEvent> arrived;  // on the side stream, whose work is all queued then
  std::vector<std::function<void()>> next;
  std::unique_ptr<Backend::Work> work;  // null once done; goes before the tensors

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

/// Begins a call in each replay of the step that is being captured, and waits for it there.
Work begin_in_replays(Capture& capture, std::function<Work()> begin);

/// A call of a communicator with its tensors.
struct TensorCall {
  const char* operation;
  torch::Tensor input = {};   ///< only read; undefined: none
  torch::Tensor output = {};  ///< written, and read by a call in place; undefined: none
  int64_t shown_bytes = 0;    ///< on the board: of the larger side
  int64_t sent_bytes = 0;     ///< this rank's data that others need
  int64_t received_bytes = 0;
  bool is_message = false;

  /// Begins it: with the tensors' buffers, or those of their copies on the host.
  using Begin = std::function<std::unique_ptr<Backend::Work>(
      Backend& backend, const ConstBuffer& input, const Buffer& output,
      const CallContext& context)>;
  Begin begin = nullptr;
};

/// Begins a call. On a GPU it happens in the order of the communicator's side stream.
Work begin_call(const std::shared_ptr<CommState>& state, const TensorCall& call,
                const CallOptions& options);

/// Makes a call, on a GPU in the order of the current stream.
void run_call(const std::shared_ptr<CommState>& state, const TensorCall& call,
              const CallOptions& options);

}  // namespace lockstep
