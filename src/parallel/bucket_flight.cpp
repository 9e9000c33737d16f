#include "parallel/bucket_flight.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "device/capture.hpp"
#include "lockstep/clock.hpp"
#include "lockstep/error.hpp"
#include "lockstep/trace.hpp"
#include "lockstep/units.hpp"
#include "parallel/comm_hooks.hpp"

namespace lockstep {
namespace {

// Adds the time of its life to a counter.
class Stopwatch {
 public:
  explicit Stopwatch(int64_t& total_ns) : total_ns_(total_ns), begun_ns_(monotonic_ns()) {}
  ~Stopwatch() { total_ns_ += monotonic_ns() - begun_ns_; }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

 private:
  int64_t& total_ns_;
  int64_t begun_ns_;
};

}  // namespace

// While a step is captured nothing may be asked of the GPU, and its times are not those of a step.

void BucketFlight::begin_backward(torch::Device device) {
  if (Capture::current() == nullptr) started_ = Moment::now(device);
}

void BucketFlight::begin_step() {
  stats_.last_step.clear();
  ++step_;
  if (Capture::current() != nullptr) return;
  while (!landings_.empty() && landings_.front().went_on.reached()) count_oldest();
}

void BucketFlight::launch(const GradientBucket& bucket, int64_t bytes, int64_t parameters,
                          double weight) {
  const torch::Device device = bucket.gradients.device();
  note_arrivals();  // before the side stream waits for this bucket's gradients
  const int64_t begun_ns = monotonic_ns();
  const Moment launched = Moment::now(device);
  auto work = hook_ ? hook_(comm_, bucket, weight) : begin_mean(comm_, bucket, weight);
  if (!work) {
    const std::string message =
        fmt::format("the hook gave no BucketWork for bucket {}", bucket.index);
    comm_.abort(message);
    throw Error(Code::kSyncMisuse, message,
                "return one whose advance() is true where the hook has done all work itself");
  }
  auto side = comm_.side_stream();
  if (side && side->device() != device) side.reset();
  int64_t launched_ns = begun_ns;
  if (!side) {
    if (device.is_cuda() && launched.reached()) launched_ns = follow_gpu(launched, begun_ns);
    stats_.exposed_ns += monotonic_ns() - launched_ns;
    if (carried_++ == 0) carried_since_ns_ = launched_ns;
  }
  in_flight_.push_back({{.index = bucket.index,
                         .bytes = bytes,
                         .parameters = parameters,
                         .launched_ns = launched_ns,
                         .finished_ns = 0},
                        launched,
                        side,
                        std::move(work)});
  stats_.all_reduces += 1;
  stats_.bytes += bytes;
}

// Through the host's memory: the host is ahead of the GPU and has waited for its gradients, which
// is not communication.
int64_t BucketFlight::follow_gpu(const Moment& launched, int64_t begun_ns) {
  const int64_t launched_ns = std::clamp(launched.ns(), begun_ns, monotonic_ns());
  if (started_) {
    stats_.backward_started_ns =
        std::max(stats_.backward_started_ns, launched_ns - launched.since(*started_));
  }
  stats_.backward_finished_ns = launched_ns;
  return launched_ns;
}

// Buckets on a side stream are done when they are waited for, and arrive in the order they left.
void BucketFlight::note_arrivals() {
  for (InFlight& each : in_flight_) {
    if (each.arrived) continue;
    if (!each.side) return;
    each.work->advance();
    each.arrived = each.work->arrived();
    if (!each.arrived) return;
  }
}

void BucketFlight::advance() {
  if (in_flight_.empty()) return;
  if (in_flight_.front().side) return note_arrivals();
  const Stopwatch exposed(stats_.exposed_ns);
  while (!in_flight_.empty() && in_flight_.front().work->advance()) finish_front();
}

void BucketFlight::wait() {
  while (!in_flight_.empty()) {
    if (in_flight_.front().side) {
      land(in_flight_.front().side->device());
    } else {
      const Stopwatch exposed(stats_.exposed_ns);
      in_flight_.front().work->wait();
      finish_front();
    }
  }
}

void BucketFlight::finish_front() {
  BucketTiming timing = in_flight_.front().timing;
  timing.finished_ns = monotonic_ns();
  stats_.last_step.push_back(timing);
  draw(timing);
  in_flight_.pop_front();
  if (--carried_ == 0) stats_.travelling_ns += timing.finished_ns - carried_since_ns_;
}

// All that travel on this GPU.
void BucketFlight::land(torch::Device gpu) {
  Landing landing{.step = step_, .started = started_, .waited = Moment::now(gpu)};
  while (!in_flight_.empty() && in_flight_.front().side) {
    InFlight& front = in_flight_.front();
    front.work->wait();
    if (!front.arrived) front.arrived = front.work->arrived();
    landing.buckets.push_back(
        {front.timing, front.launched, front.arrived ? *front.arrived : Moment::now(gpu)});
    in_flight_.pop_front();
  }
  landing.went_on = Moment::now(gpu);
  landings_.push_back(std::move(landing));
}

void BucketFlight::settle() {
  if (Capture::current() != nullptr) return;
  while (!landings_.empty()) count_oldest();
}

void BucketFlight::count_oldest() {
  count(landings_.front());
  show(landings_.front());
  landings_.pop_front();
}

void BucketFlight::count(const Landing& landing) {
  const Moment& begun = landing.buckets.front().launched;
  int64_t travelled_ns = 0;
  int64_t until_ns = 0;  // since `begun`; the buckets before have been counted so far
  for (const auto& bucket : landing.buckets) {
    const int64_t from_ns = std::max(until_ns, bucket.launched.since(begun));
    until_ns = std::max(from_ns, bucket.finished.since(begun));
    travelled_ns += until_ns - from_ns;
  }
  stats_.travelling_ns += travelled_ns;
  stats_.exposed_ns += std::clamp<int64_t>(landing.went_on.since(landing.waited), 0, travelled_ns);
}

void BucketFlight::show(const Landing& landing) {
  const bool is_last = landing.step == step_;
  if (!is_last && trace_ == nullptr) return;
  const Moment& begun = landing.buckets.front().launched;
  const int64_t begun_ns = begun.ns();
  for (const auto& bucket : landing.buckets) {
    BucketTiming timing = bucket.timing;
    timing.launched_ns = begun_ns + bucket.launched.since(begun);
    timing.finished_ns = std::max(timing.launched_ns, begun_ns + bucket.finished.since(begun));
    if (is_last) stats_.last_step.push_back(timing);
    draw(timing);
  }
  if (!is_last) return;
  if (landing.started) stats_.backward_started_ns = begun_ns - begun.since(*landing.started);
  stats_.backward_finished_ns = begun_ns + landing.waited.since(begun);
}

void BucketFlight::draw(const BucketTiming& timing) {
  if (trace_ == nullptr) return;
  trace_->add({.rank = trace_rank_,
               .device = trace_row_,
               .name = fmt::format("all_reduce bucket {}", timing.index),
               .begin_ns = timing.launched_ns,
               .end_ns = timing.finished_ns,
               .args = {{"bytes", format_bytes(timing.bytes)}}});
}

void BucketFlight::record_to(Trace* trace, int rank, int row) {
  if (trace != nullptr) settle();
  trace_ = trace;
  trace_rank_ = rank;
  trace_row_ = row;
}

}  // namespace lockstep
