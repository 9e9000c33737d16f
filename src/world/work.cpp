#include "world/work.hpp"

#include <c10/core/StreamGuard.h>
#include <fmt/format.h>

#include <algorithm>

#include "lockstep/clock.hpp"
#include "lockstep/error.hpp"

namespace lockstep {
namespace {

// Counts the time of its life as spent in calls.
class InsideCall {
 public:
  explicit InsideCall(CommState* comm) : comm_(comm), begun_ns_(monotonic_ns()) {}
  ~InsideCall() {
    if (comm_ != nullptr) comm_->stats.inside_ns += monotonic_ns() - begun_ns_;
  }
  InsideCall(const InsideCall&) = delete;
  InsideCall& operator=(const InsideCall&) = delete;

 private:
  CommState* comm_;
  int64_t begun_ns_;
};

class CapturedCall final : public Backend::Work {
 public:
  CapturedCall(Capture& capture, std::function<lockstep::Work()> begin)
      : replayed_(std::make_shared<std::optional<lockstep::Work>>()) {
    capture.between_graphs(
        [replayed = replayed_, begin = std::move(begin)] { replayed->emplace(begin()); });
  }

  // Never done by itself: the replay's backward computes on until it waits.
  bool advance() override { return false; }

  void wait() override {
    Capture* capture = Capture::current();
    if (capture == nullptr) {
      throw Error(Code::kCapture, "a call of a captured step is waited for outside of it",
                  "wait for it in the step, on the step's own stream");
    }
    capture->between_graphs([replayed = replayed_] {
      (*replayed)->wait();
      replayed->reset();
    });
  }

 private:
  std::shared_ptr<std::optional<lockstep::Work>> replayed_;  // begun, not waited for, in a replay
};

}  // namespace

Work::Work() = default;
Work::Work(std::unique_ptr<State> state) : state_(std::move(state)) {}
Work::~Work() = default;
Work::Work(Work&&) noexcept = default;
Work& Work::operator=(Work&&) noexcept = default;

bool Work::advance() {
  return !state_ || state_->advance();
}

void Work::wait() {
  if (state_) state_->wait();
}

std::optional<DeviceEvent> Work::arrived() const {
  return state_ ? state_->arrived : std::nullopt;
}

Work Work::then(std::function<void()> next) && {
  if (!state_ || !state_->work) {
    next();
  } else {
    state_->next.push_back(std::move(next));
  }
  return std::move(*this);
}

bool Work::State::advance() {
  if (!work) return true;
  if (!do_what_needs_no_waiting()) return false;
  run_next();
  return true;
}

// On a GPU the caller may go on computing: only wait() makes its stream wait.
bool Work::State::do_what_needs_no_waiting() {
  if (arrived) return false;
  const InsideCall inside(comm.get());
  if (!work->advance()) return false;
  if (on_side) {
    arrived = DeviceEvent::of(comm->side->stream());
    return false;
  }
  finish();
  return true;
}

void Work::State::wait() {
  if (!work) return;
  {
    const InsideCall inside(comm.get());
    work->wait();
    if (on_side) {
      if (!arrived) arrived = DeviceEvent::of(comm->side->stream());
      comm->side->hold_back_current();
      if (input) input->keep_for_current_stream();
      if (output) output->keep_for_current_stream();
    }
    finish();
  }
  run_next();
}

void Work::State::finish() {
  work.reset();
  if (output && stays && input) {
    output->copy_from(*input);
  } else if (output) {
    output->copy_back();
  }
  if (comm && comm->page) comm->page->finish_collective(sequence);
}

void Work::State::run_next() {
  for (const auto& each : std::exchange(next, {})) each();
}

Work begin_in_replays(Capture& capture, std::function<Work()> begin) {
  auto state = std::make_unique<Work::State>();
  state->work = std::make_unique<CapturedCall>(capture, std::move(begin));
  return Work(std::move(state));
}

Capture* capture_of_call(const CommState& state, const char* operation,
                         std::initializer_list<torch::Tensor> tensors) {
  if (state.size() == 1 && !state.gpu) return nullptr;
  Capture* capture = Capture::current();
  if (capture == nullptr) return nullptr;
  const bool on_gpu = std::all_of(tensors.begin(), tensors.end(), [](const torch::Tensor& tensor) {
    return !tensor.defined() || tensor.is_cuda();
  });
  if (!on_gpu) {
    require_not_capturing(fmt::format("{} of a tensor on the CPU", operation),
                          "give ranks GPU tensors to exchange in a captured step, or exchange the "
                          "others before or after it");
  }
  return capture;
}

namespace {

enum class Order { kOfCurrentStream, kOfSideStream };
enum class Waiting { kLater, kAtOnce };

// As the calling thread's streams are now.
Work begin_now(const std::shared_ptr<CommState>& state, const TensorCall& call,
               const CallOptions& options, Order order, Waiting waiting) {
  const Route route =
      call.is_message ? Route::of_message(*state, call.input.defined() ? call.input : call.output)
                      : Route::of(*state, {call.input, call.output});
  auto begun = std::make_unique<Work::State>();
  begun->comm = state;
  begun->on_side = order == Order::kOfSideStream;
  begun->stays = route.way == Route::Way::kStay;
  if (call.input.defined()) begun->input.emplace(call.operation, call.input, route.way);
  if (call.output.defined()) begun->output.emplace(call.operation, call.output, route.way);
  const InsideCall inside(state.get());
  begun->sequence = ++state->stats.calls;
  if (state->page) {
    state->page->begin_collective(begun->sequence, call.operation, call.shown_bytes,
                                  options.bucket);
  }
  CallContext context = state->context(route.backend, options);
  context.waits_at_once = waiting == Waiting::kAtOnce;
  begun->work =
      call.begin(route.backend, begun->input ? begun->input->const_buffer() : ConstBuffer{},
                 begun->output ? begun->output->buffer() : Buffer{}, context);
  state->stats.sent_bytes += call.sent_bytes;
  state->stats.received_bytes += call.received_bytes;
  return Work(std::move(begun));
}

bool is_on_gpu_of(const CommState& state, const TensorCall& call) {
  const auto reached = [&](const torch::Tensor& tensor) {
    return !tensor.defined() || state.reaches(tensor.device());
  };
  return reached(call.input) && reached(call.output);
}

}  // namespace

Work begin_call(const std::shared_ptr<CommState>& state, const TensorCall& call,
                const CallOptions& options) {
  if (Capture* capture = capture_of_call(*state, call.operation, {call.input, call.output})) {
    return begin_in_replays(*capture, [state, call, kept = KeptOptions(options)] {
      return begin_call(state, call, kept.get());
    });
  }
  if (!is_on_gpu_of(*state, call)) {
    return begin_now(state, call, options, Order::kOfCurrentStream, Waiting::kLater);
  }
  if (!state->side) state->side.emplace(state->gpu_index);
  state->side->follow_current();
  const c10::StreamGuard on_side(state->side->stream());
  return begin_now(state, call, options, Order::kOfSideStream, Waiting::kLater);
}

void run_call(const std::shared_ptr<CommState>& state, const TensorCall& call,
              const CallOptions& options) {
  if (Capture* capture = capture_of_call(*state, call.operation, {call.input, call.output})) {
    return capture->between_graphs([state, call, kept = KeptOptions(options)] {
      begin_now(state, call, kept.get(), Order::kOfCurrentStream, Waiting::kAtOnce).wait();
    });
  }
  begin_now(state, call, options, Order::kOfCurrentStream, Waiting::kAtOnce).wait();
}

}  // namespace lockstep
