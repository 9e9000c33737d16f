#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "device/moment.hpp"
#include "lockstep/distributed_data_parallel.hpp"

namespace lockstep {

/// The buckets between launch and finish, in the order of their launch, and what they cost: on the
/// CPU the host's time, on a GPU that of its streams, for which the host does not wait.
class BucketFlight {
 public:
  BucketFlight(const Communicator& comm, CommHook hook, DdpStats& stats)
      : comm_(comm), hook_(std::move(hook)), stats_(stats) {}

  /// A backward begins, with gradients on this device.
  void begin_backward(torch::Device device);

  /// The buckets of another step follow.
  void begin_step();

  /// `parameters`: how many share the bucket.
  void launch(const GradientBucket& bucket, int64_t bytes, int64_t parameters, double weight);

  /// Finishes those at the front that need no waiting.
  void advance();

  /// Finishes all.
  void wait();

  /// Completes the stats: waits until the GPU has done what was waited for, and tells its times.
  void settle();

  void record_to(Trace* trace, int rank, int row);

 private:
  struct InFlight {
    BucketTiming timing;
    Moment launched;
    std::optional<c10::Stream> side;  // of a GPU, in whose order the bucket travels
    std::unique_ptr<BucketWork> work;
  };

  // Buckets that were waited for by a GPU's stream, which the host does not: how long it took is
  // known when the GPU has got there.
  struct Landing {
    struct Bucket {
      BucketTiming timing;
      Moment launched;
      Moment finished;
    };
    int64_t step = 0;
    Moment started = {};  // the backward
    Moment waited = {};   // the training stream has nothing else to do
    Moment went_on = {};  // it has all of them
    std::vector<Bucket> buckets = {};
  };

  void finish_front();
  void land(torch::Device gpu);
  void count_oldest();
  void count(const Landing& landing);
  void show(const Landing& landing);
  void draw(const BucketTiming& timing);

  const Communicator comm_;
  const CommHook hook_;  // empty: the communicator's mean
  DdpStats& stats_;
  std::deque<InFlight> in_flight_;
  std::deque<Landing> landings_;  // not yet counted
  Moment started_;
  int64_t step_ = 0;
  int64_t travelling_since_ns_ = 0;
  Trace* trace_ = nullptr;
  int trace_rank_ = 0;
  int trace_row_ = 0;
};

}  // namespace lockstep
