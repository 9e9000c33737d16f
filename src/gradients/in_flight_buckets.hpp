#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <utility>
#include <vector>

#include "lockstep/device_event.hpp"
#include "lockstep/gradients.hpp"

namespace lockstep {

class Trace;

/// The buckets between launch and finish, in launch order, and what they cost: on the CPU the
/// host's time, on a GPU the time of its streams, for which the host does not wait.
class InFlightBuckets {
 public:
  InFlightBuckets(const Communicator& comm, CommHook hook, DdpStats& stats)
      : comm_(comm), hook_(std::move(hook)), stats_(stats) {}

  /// A backward begins whose gradients are on this device.
  void begin_backward(torch::Device device);

  /// The buckets of another step follow.
  void begin_step();

  /// `parameters` is the number of parameters in the bucket.
  void launch(const GradientBucket& bucket, int64_t bytes, int64_t parameters, double weight);

  /// Finishes the buckets at the front that need no waiting.
  void advance();

  /// Finishes all buckets.
  void wait();

  /// Completes the stats: waits until the GPU has finished all buckets, and reads its times.
  void settle();

  /// Draws what is settled from now on.
  void record_to(Trace* trace, int rank, int row);

 private:
  struct InFlight {
    BucketTiming timing;
    DeviceEvent launched;
    std::optional<c10::Stream> side;  // the GPU stream that orders this bucket's communication
    Work work;
    std::optional<DeviceEvent> arrived = {};  // on that stream
  };

  // Buckets that a GPU's stream waited for and the host did not: how long they took is known once
  // the GPU has got there.
  struct Completion {
    struct Bucket {
      BucketTiming timing;
      DeviceEvent launched;
      DeviceEvent finished;
    };
    int64_t step = 0;
    std::optional<DeviceEvent> backward_started = {};  // if begin_backward() was called
    DeviceEvent wait_began = {};                       // the training stream had nothing else to do
    DeviceEvent wait_ended = {};                       // all buckets were finished
    std::vector<Bucket> buckets = {};
  };

  int64_t follow_gpu(const DeviceEvent& launched, int64_t begun_ns);
  void note_arrivals();
  void finish_front();
  void wait_on(torch::Device gpu);
  void settle_oldest();
  void count(const Completion& completion);
  void show(const Completion& completion);
  void draw(const BucketTiming& timing);

  const Communicator comm_;
  const CommHook hook_;  // empty: the communicator's mean
  DdpStats& stats_;
  std::deque<InFlight> in_flight_;
  std::deque<Completion> completions_;           // not yet settled
  std::optional<DeviceEvent> backward_started_;  // on the device
  int64_t step_ = 0;
  int64_t on_host_ = 0;  // buckets in flight that the host moves
  int64_t on_host_since_ns_ = 0;
  Trace* trace_ = nullptr;
  int trace_rank_ = 0;
  int trace_row_ = 0;
};

}  // namespace lockstep
