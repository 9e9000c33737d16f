#include "parallel/bucket_flight.hpp"

#include <fmt/format.h>

#include <utility>

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

void BucketFlight::launch(const GradientBucket& bucket, int64_t bytes, int64_t parameters,
                          double weight) {
  const Stopwatch exposed(stats_.exposed_ns);
  const int64_t now_ns = monotonic_ns();
  if (in_flight_.empty()) travelling_since_ns_ = now_ns;
  auto work = hook_ ? hook_(comm_, bucket, weight) : begin_mean(comm_, bucket, weight);
  if (!work) {
    const std::string message =
        fmt::format("the hook gave no BucketWork for bucket {}", bucket.index);
    comm_.abort(message);
    throw Error(Code::kSyncMisuse, message,
                "return one whose advance() is true where the hook has done all work itself");
  }
  in_flight_.push_back({{.index = bucket.index,
                         .bytes = bytes,
                         .parameters = parameters,
                         .launched_ns = now_ns,
                         .finished_ns = 0},
                        std::move(work)});
  stats_.all_reduces += 1;
  stats_.bytes += bytes;
}

void BucketFlight::advance() {
  const Stopwatch exposed(stats_.exposed_ns);
  while (!in_flight_.empty() && in_flight_.front().work->advance()) finish_front();
}

void BucketFlight::wait() {
  const Stopwatch exposed(stats_.exposed_ns);
  while (!in_flight_.empty()) {
    in_flight_.front().work->wait();
    finish_front();
  }
}

void BucketFlight::finish_front() {
  BucketTiming timing = in_flight_.front().timing;
  timing.finished_ns = monotonic_ns();
  stats_.last_step.push_back(timing);
  if (trace_ != nullptr) {
    trace_->add({.rank = trace_rank_,
                 .device = trace_row_,
                 .name = fmt::format("all_reduce bucket {}", timing.index),
                 .begin_ns = timing.launched_ns,
                 .end_ns = timing.finished_ns,
                 .args = {{"bytes", format_bytes(timing.bytes)}}});
  }
  in_flight_.pop_front();
  if (in_flight_.empty()) stats_.travelling_ns += timing.finished_ns - travelling_since_ns_;
}

void BucketFlight::record_to(Trace* trace, int rank, int row) {
  trace_ = trace;
  trace_rank_ = rank;
  trace_row_ = row;
}

}  // namespace lockstep
