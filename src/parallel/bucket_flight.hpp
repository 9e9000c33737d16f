#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "lockstep/distributed_data_parallel.hpp"
#include "lockstep/moment.hpp"

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

  /// Draws what is settled from now on.
  void record_to(Trace* trace, int rank, int row);

 private:
  struct InFlight {
    BucketTiming timing;
    Moment launched;
    std::optional<c10::Stream> side;  // of a GPU, in whose order the bucket travels
    std::unique_ptr<BucketWork> work;
    std::optional<Moment> arrived = {};  // on that stream
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
    std::optional<Moment> started = {};  // the backward, where somebody said so
    Moment waited = {};                  // the training stream has nothing else to do
    Moment went_on = {};                 // it has all of them
    std::vector<Bucket> buckets = {};
  };

  int64_t follow_gpu(const Moment& launched, int64_t begun_ns);
  void note_arrivals();
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
  std::deque<Landing> landings_;   // not yet counted
  std::optional<Moment> started_;  // the backward
  int64_t step_ = 0;
  int64_t carried_ = 0;  // buckets in flight that the host carries
  int64_t carried_since_ns_ = 0;
  Trace* trace_ = nullptr;
  int trace_rank_ = 0;
  int trace_row_ = 0;
};

}  // namespace lockstep
