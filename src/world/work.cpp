#include "world/work.hpp"

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

class CapturedAllReduce final : public Backend::Work {
 public:
  CapturedAllReduce(Capture& capture, std::function<lockstep::Work()> begin)
      : replayed_(std::make_shared<std::optional<lockstep::Work>>()) {
    capture.between_graphs(
        [replayed = replayed_, begin = std::move(begin)] { replayed->emplace(begin()); });
  }

  // Never done by itself: the replay's backward computes on until it waits.
  bool advance() override { return false; }

  void wait() override {
    Capture* capture = Capture::current();
    if (capture == nullptr) {
      throw Error(Code::kCapture, "an all_reduce of a captured step is waited for outside of it",
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
      tensor->keep_for_current_stream();
    }
    finish();
  }
  run_next();
}

void Work::State::finish() {
  work.reset();
  if (tensor) tensor->copy_back();
  if (comm && comm->page) comm->page->finish_collective(sequence);
}

void Work::State::run_next() {
  for (const auto& each : std::exchange(next, {})) each();
}

Work begin_in_replays(Capture& capture, std::function<Work()> begin) {
  auto state = std::make_unique<Work::State>();
  state->work = std::make_unique<CapturedAllReduce>(capture, std::move(begin));
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

}  // namespace lockstep
