#include "world/work.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "device/stream_order.hpp"
#include "lockstep/clock.hpp"
#include "lockstep/error.hpp"
#include "world/captured_call.hpp"

namespace lockstep {
namespace {

// Counts the time of its life as spent in calls.
class InsideCall {
 public:
  explicit InsideCall(CommStats& stats) : stats_(stats), begun_ns_(monotonic_ns()) {}
  ~InsideCall() { stats_.inside_ns += monotonic_ns() - begun_ns_; }
  InsideCall(const InsideCall&) = delete;
  InsideCall& operator=(const InsideCall&) = delete;

 private:
  CommStats& stats_;
  int64_t begun_ns_;
};

}  // namespace

Work::Work(std::unique_ptr<State> state) : state_(std::move(state)) {}
Work::~Work() = default;
Work::Work(Work&&) noexcept = default;
Work& Work::operator=(Work&&) noexcept = default;

bool Work::advance() {
  return state_->advance();
}

void Work::wait() {
  state_->wait();
}

std::optional<Moment> Work::arrived() const {
  return state_->arrived();
}

BegunWork::BegunWork(std::shared_ptr<CommState> comm, Passage tensor, int64_t sequence,
                     bool on_side, std::unique_ptr<Pending> pending)
    : comm_(std::move(comm)),
      tensor_(std::move(tensor)),
      sequence_(sequence),
      on_side_(on_side),
      pending_(std::move(pending)) {}

// Who asks on a GPU may go on computing there: only wait() makes his stream wait.
bool BegunWork::advance() {
  if (!pending_) return true;
  if (arrived_) return false;
  const InsideCall inside(comm_->stats);
  if (!pending_->advance()) return false;
  if (on_side_) {
    arrived_ = Moment::of(comm_->side->stream());
    return false;
  }
  finish();
  return true;
}

void BegunWork::wait() {
  if (!pending_) return;
  const InsideCall inside(comm_->stats);
  pending_->wait();
  if (on_side_) {
    if (!arrived_) arrived_ = Moment::of(comm_->side->stream());
    comm_->side->hold_back_current();
    tensor_.keep_for_current_stream();
  }
  finish();
}

void BegunWork::finish() {
  pending_.reset();
  tensor_.copy_back();
  if (comm_->page) comm_->page->finish_collective(sequence_);
}

CapturedWork::CapturedWork(Capture& capture, const Communicator& comm, const torch::Tensor& tensor,
                           ReduceOp op, const CallOptions& options)
    : replayed_(std::make_shared<std::optional<Work>>()) {
  capture.between_graphs([replayed = replayed_, comm, tensor, op, kept = KeptOptions(options)] {
    replayed->emplace(comm.begin_all_reduce(tensor, op, kept.get()));
  });
}

void CapturedWork::wait() {
  if (waited_) return;
  Capture* capture = Capture::current();
  if (capture == nullptr) {
    throw Error(Code::kCapture, "an all_reduce of a captured step is waited for outside of it",
                "wait for it in the step, on the step's own stream");
  }
  waited_ = true;
  capture->between_graphs([replayed = replayed_] {
    (*replayed)->wait();
    replayed->reset();
  });
}

Capture* capture_of_call(const char* operation, std::initializer_list<torch::Tensor> tensors) {
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
