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
  const int64_t now_ns = monotonic_ns();
  if (in_flight_.empty()) travelling_since_ns_ = now_ns;
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
  if (!side) stats_.exposed_ns += monotonic_ns() - now_ns;
  in_flight_.push_back({{.index = bucket.index,
                         .bytes = bytes,
                         .parameters = parameters,
                         .launched_ns = now_ns,
                         .finished_ns = 0},
                        launched,
                        side,
                        std::move(work)});
  stats_.all_reduces += 1;
  stats_.bytes += bytes;
}

void BucketFlight::advance() {
  if (in_flight_.empty()) return;
  std::optional<Stopwatch> exposed;
  if (!in_flight_.front().side) exposed.emplace(stats_.exposed_ns);
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
  if (in_flight_.empty()) stats_.travelling_ns += timing.finished_ns - travelling_since_ns_;
}

// All that travel on this GPU.
void BucketFlight::land(torch::Device gpu) {
  Landing landing{.step = step_, .started = started_, .waited = Moment::now(gpu)};
  while (!in_flight_.empty() && in_flight_.front().side) {
    InFlight& front = in_flight_.front();
    front.work->wait();
    landing.buckets.push_back({front.timing, front.launched, Moment::of(*front.side)});
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
  for (const auto& bucket : landing.buckets) {
    BucketTiming timing = bucket.timing;
    timing.launched_ns = bucket.launched.ns();
    timing.finished_ns = std::max(timing.launched_ns, bucket.finished.ns());
    if (is_last) stats_.last_step.push_back(timing);
    draw(timing);
  }
  if (!is_last) return;
  stats_.backward_started_ns = landing.started.ns();
  stats_.backward_finished_ns = landing.waited.ns();
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
  trace_ = trace;
  trace_rank_ = rank;
  trace_row_ = row;
}

}  // namespace lockstep
