#include "gradients/in_flight_buckets.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <mutex>
#include <string>

#include "base/mutation.hpp"
#include "device/capture.hpp"
#include "lockstep/clock.hpp"
#include "lockstep/error.hpp"
#include "lockstep/tensor_text.hpp"
#include "lockstep/trace.hpp"
#include "lockstep/units.hpp"
#include "verify/step_recorder.hpp"

namespace lockstep {
namespace {

// The mean over the ranks, in place. `values` are those of the bucket, or stand for them. Ranks
// compare labels: those that disagree about when to synchronise stop here instead of adding
// gradients of different micro-steps.
Work begin_mean(const Communicator& comm, const torch::Tensor& values, const GradientBucket& bucket,
                double weight) {
  std::string label = fmt::format("bucket {}", bucket.index);
  if (bucket.micro_steps > 1) label += fmt::format(" of {} micro-steps", bucket.micro_steps);
  const bool drops_tail = is_planted(Mutation::kBucketTailDropped);
  const torch::Tensor sent =
      drops_tail ? values.narrow(0, 0, values.numel() - values.numel() / 8) : values;
  const bool divides = !is_planted(Mutation::kMeanNotDivided);
  return comm.begin_all_reduce(sent, divides ? ReduceOp::kMean : ReduceOp::kSum,
                               {.label = label, .bucket = bucket.index, .weight = weight});
}

// Memory for compressed buckets, allocated when a bucket is first sent and kept as long as the
// bucket's own. One hook may serve several models, whose buckets are in flight at the same time,
// and ranks that are threads.
class CompressionMemory {
 public:
  explicit CompressionMemory(torch::ScalarType dtype) : dtype_(dtype) {}

  // Allocation is collective, so whether to allocate must depend on what all ranks do alike. A
  // model is identified by the storage of its gradients, which is no other model's as long as it is
  // remembered here.
  torch::Tensor for_bucket(const Communicator& comm, const GradientBucket& bucket) {
    torch::Tensor memory = entry_of(bucket);
    if (!memory.defined() || memory.numel() != bucket.gradients.numel()) {
      memory = comm.allocate(bucket.gradients.numel(), bucket.gradients.options().dtype(dtype_));
      entry_of(bucket, memory);
    }
    return memory;
  }

 private:
  struct Entry {
    c10::weak_intrusive_ptr<c10::StorageImpl> gradients;
    int64_t bucket;
    torch::Tensor memory;
  };

  // Returns what the bucket's entry has, after putting `memory` there if it is defined.
  torch::Tensor entry_of(const GradientBucket& bucket, const torch::Tensor& memory = {}) {
    const auto gradients = bucket.gradients.storage().getWeakStorageImpl();
    const std::lock_guard lock(mutex_);
    std::erase_if(entries_, [](const Entry& entry) { return entry.gradients.expired(); });
    auto entry = std::find_if(entries_.begin(), entries_.end(), [&](const Entry& candidate) {
      return candidate.gradients == gradients && candidate.bucket == bucket.index;
    });
    if (entry == entries_.end()) {
      entry = entries_.insert(entry, Entry{gradients, bucket.index, {}});
    }
    if (memory.defined()) entry->memory = memory;
    return entry->memory;
  }

  const torch::ScalarType dtype_;
  std::mutex mutex_;
  std::vector<Entry> entries_;  // guarded by mutex_
};

// Adds its lifetime to a counter.
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

CommHook compress_gradients(torch::ScalarType dtype) {
  if (dtype != torch::kBFloat16 && dtype != torch::kFloat16) {
    throw Error(Code::kUsage,
                fmt::format("gradients cannot be compressed to {}", dtype_text(dtype)),
                "use torch::kBFloat16 or torch::kFloat16");
  }
  auto memory = std::make_shared<CompressionMemory>(dtype);
  if (auto* recorder = StepRecorder::of_process()) recorder->note_compression(dtype);
  return [memory](const Communicator& comm, const GradientBucket& bucket, double weight) {
    const torch::Tensor small = memory->for_bucket(comm, bucket);
    small.copy_(bucket.gradients);
    return begin_mean(comm, small, bucket, weight).then([small, gradients = bucket.gradients] {
      gradients.copy_(small);
    });
  };
}

// While a step is being captured, nothing may be asked of the GPU, and its times are not those of a
// step.

void InFlightBuckets::begin_backward(torch::Device device) {
  if (Capture::current() == nullptr) backward_started_ = DeviceEvent::now(device);
}

void InFlightBuckets::begin_step() {
  stats_.last_step.clear();
  ++step_;
  if (Capture::current() != nullptr) return;
  while (!completions_.empty() && completions_.front().wait_ended.reached()) settle_oldest();
}

void InFlightBuckets::launch(const GradientBucket& bucket, int64_t bytes, int64_t parameters,
                             double weight) {
  const torch::Device device = bucket.gradients.device();
  note_arrivals();  // before the side stream waits for this bucket's gradients
  const int64_t begun_ns = monotonic_ns();
  const DeviceEvent launched = DeviceEvent::now(device);
  Work work =
      hook_ ? hook_(comm_, bucket, weight) : begin_mean(comm_, bucket.gradients, bucket, weight);
  auto side = comm_.side_stream();
  if (side && side->device() != device) side.reset();
  int64_t launched_ns = begun_ns;
  if (!side) {
    if (device.is_cuda() && launched.reached()) launched_ns = follow_gpu(launched, begun_ns);
    stats_.exposed_ns += monotonic_ns() - launched_ns;
    if (on_host_++ == 0) on_host_since_ns_ = launched_ns;
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

// A GPU's bucket that goes through the host's memory: the host is ahead of the GPU and has waited
// for its gradients, which is not communication.
int64_t InFlightBuckets::follow_gpu(const DeviceEvent& launched, int64_t begun_ns) {
  const int64_t launched_ns = std::clamp(launched.ns(), begun_ns, monotonic_ns());
  if (backward_started_) {
    stats_.backward_started_ns =
        std::max(stats_.backward_started_ns, launched_ns - launched.since(*backward_started_));
  }
  stats_.backward_finished_ns = launched_ns;
  return launched_ns;
}

// Buckets on a side stream are done only when they are waited for; they arrive in launch order.
void InFlightBuckets::note_arrivals() {
  for (InFlight& each : in_flight_) {
    if (each.arrived) continue;
    if (!each.side) return;
    each.work.advance();
    each.arrived = each.work.arrived();
    if (!each.arrived) return;
  }
}

void InFlightBuckets::advance() {
  if (in_flight_.empty()) return;
  if (in_flight_.front().side) return note_arrivals();
  const Stopwatch exposed(stats_.exposed_ns);
  while (!in_flight_.empty() && in_flight_.front().work.advance()) finish_front();
}

void InFlightBuckets::wait() {
  while (!in_flight_.empty()) {
    if (in_flight_.front().side) {
      wait_on(in_flight_.front().side->device());
    } else {
      const Stopwatch exposed(stats_.exposed_ns);
      in_flight_.front().work.wait();
      finish_front();
    }
  }
}

void InFlightBuckets::finish_front() {
  BucketTiming timing = in_flight_.front().timing;
  timing.finished_ns = monotonic_ns();
  stats_.last_step.push_back(timing);
  draw(timing);
  in_flight_.pop_front();
  if (--on_host_ == 0) stats_.communication_ns += timing.finished_ns - on_host_since_ns_;
}

// Lets the GPU's training stream wait for all buckets on its side stream.
void InFlightBuckets::wait_on(torch::Device gpu) {
  Completion completion{
      .step = step_, .backward_started = backward_started_, .wait_began = DeviceEvent::now(gpu)};
  while (!in_flight_.empty() && in_flight_.front().side) {
    InFlight& front = in_flight_.front();
    front.work.wait();
    if (!front.arrived) front.arrived = front.work.arrived();
    completion.buckets.push_back(
        {front.timing, front.launched, front.arrived ? *front.arrived : DeviceEvent::now(gpu)});
    in_flight_.pop_front();
  }
  completion.wait_ended = DeviceEvent::now(gpu);
  completions_.push_back(std::move(completion));
}

void InFlightBuckets::settle() {
  if (Capture::current() != nullptr) return;
  while (!completions_.empty()) settle_oldest();
}

void InFlightBuckets::settle_oldest() {
  count(completions_.front());
  show(completions_.front());
  completions_.pop_front();
}

void InFlightBuckets::count(const Completion& completion) {
  const DeviceEvent& begun = completion.buckets.front().launched;
  int64_t communication_ns = 0;
  int64_t until_ns = 0;  // since `begun`; earlier buckets are counted up to here
  for (const auto& bucket : completion.buckets) {
    const int64_t from_ns = std::max(until_ns, bucket.launched.since(begun));
    until_ns = std::max(from_ns, bucket.finished.since(begun));
    communication_ns += until_ns - from_ns;
  }
  stats_.communication_ns += communication_ns;
  stats_.exposed_ns +=
      std::clamp<int64_t>(completion.wait_ended.since(completion.wait_began), 0, communication_ns);
}

void InFlightBuckets::show(const Completion& completion) {
  const bool is_last = completion.step == step_;
  if (!is_last && trace_ == nullptr) return;
  const DeviceEvent& begun = completion.buckets.front().launched;
  const int64_t begun_ns = begun.ns();
  for (const auto& bucket : completion.buckets) {
    BucketTiming timing = bucket.timing;
    timing.launched_ns = begun_ns + bucket.launched.since(begun);
    timing.finished_ns = std::max(timing.launched_ns, begun_ns + bucket.finished.since(begun));
    if (is_last) stats_.last_step.push_back(timing);
    draw(timing);
  }
  if (!is_last) return;
  if (completion.backward_started) {
    stats_.backward_started_ns = begun_ns - begun.since(*completion.backward_started);
  }
  stats_.backward_finished_ns = begun_ns + completion.wait_began.since(begun);
}

void InFlightBuckets::draw(const BucketTiming& timing) {
  if (trace_ == nullptr) return;
  trace_->add({.rank = trace_rank_,
               .device = trace_row_,
               .name = fmt::format("all_reduce bucket {}", timing.index),
               .begin_ns = timing.launched_ns,
               .end_ns = timing.finished_ns,
               .args = {{"bytes", format_bytes(timing.bytes)}}});
}

void InFlightBuckets::record_to(Trace* trace, int rank, int row) {
  if (trace != nullptr) settle();
  trace_ = trace;
  trace_rank_ = rank;
  trace_row_ = row;
}

}  // namespace lockstep
