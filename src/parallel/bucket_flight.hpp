#pragma once

#include <cstdint>
#include <deque>
#include <memory>

#include "lockstep/distributed_data_parallel.hpp"

namespace lockstep {

/// The buckets between launch and finish, in the order of their launch, and what they cost.
class BucketFlight {
 public:
  BucketFlight(const Communicator& comm, CommHook hook, DdpStats& stats)
      : comm_(comm), hook_(std::move(hook)), stats_(stats) {}

  /// `parameters`: how many share the bucket.
  void launch(const GradientBucket& bucket, int64_t bytes, int64_t parameters, double weight);

  /// Finishes those at the front that need no waiting.
  void advance();

  /// Finishes all.
  void wait();

  void record_to(Trace* trace, int rank, int row);

 private:
  struct InFlight {
    BucketTiming timing;
    std::unique_ptr<BucketWork> work;
  };

  void finish_front();

  const Communicator comm_;
  const CommHook hook_;  // empty: the communicator's mean
  DdpStats& stats_;
  std::deque<InFlight> in_flight_;
  int64_t travelling_since_ns_ = 0;
  Trace* trace_ = nullptr;
  int trace_rank_ = 0;
  int trace_row_ = 0;
};

}  // namespace lockstep
