#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>

#include "lockstep/distributed_data_parallel.hpp"
#include "lockstep/error.hpp"
#include "lockstep/fully_sharded_data_parallel.hpp"

namespace lockstep {

/// One micro-step of a loop over accumulate().
template <class Batch>
struct MicroStep {
  Batch& batch;
  int64_t steps;  ///< micro-steps of its window: divide the loss by it
  bool is_last;   ///< of its window: update the weights after its backward
};

/// See accumulate().
template <class Range>
class MicroSteps {
 public:
  MicroSteps(Range&& range, int64_t steps, Accumulating* wrapper)
      : range_(std::forward<Range>(range)), steps_(steps), wrapper_(wrapper) {
    if (steps < 1) {
      throw Error(Code::kUsage,
                  "a window of accumulation cannot have " + std::to_string(steps) + " micro-steps",
                  "accumulate over 1 batch or more");
    }
  }

  class Iterator {
   public:
    using Position = decltype(std::begin(std::declval<std::remove_reference_t<Range>&>()));
    using Batch = std::remove_reference_t<decltype(*std::declval<Position&>())>;

    template <class End>
    bool operator!=(const End& end) {
      return at_ != end;
    }
    MicroStep<Batch> operator*() {
      const int64_t first = index_ / steps_ * steps_;
      const int64_t window = std::min(steps_, batches_ - first);
      const bool is_last = index_ + 1 == first + window;
      if (is_last) {
        no_sync_.reset();
      } else if (wrapper_ != nullptr && !no_sync_) {
        no_sync_ = std::make_unique<NoSync>(*wrapper_);
      }
      return {*at_, window, is_last};
    }
    Iterator& operator++() {
      ++at_;
      ++index_;
      return *this;
    }

   private:
    friend class MicroSteps;
    Iterator(Position at, int64_t batches, int64_t steps, Accumulating* wrapper)
        : at_(std::move(at)), batches_(batches), steps_(steps), wrapper_(wrapper) {}

    Position at_;
    int64_t index_ = 0;
    int64_t batches_;
    int64_t steps_;
    Accumulating* wrapper_;
    std::unique_ptr<NoSync> no_sync_;  // from the first micro-step of a window to its last
  };

  Iterator begin() {
    const auto batches = static_cast<int64_t>(std::size(range_));  // before the loop begins
    return Iterator(std::begin(range_), batches, steps_, wrapper_);
  }
  auto end() { return std::end(range_); }

 private:
  Range range_;  // a reference if it is not a temporary
  int64_t steps_;
  Accumulating* wrapper_;
};

/// Gradient accumulation over windows of `steps` batches, the last of which may be shorter:
///
///     for (auto [batch, steps, is_last] : lockstep::accumulate(batches, 4, ddp)) {
///       (loss_of(ddp(batch.data), batch.target) / steps).backward();
///       if (is_last) optimizer.step({.zero_grad = true});
///     }
///
/// All micro-steps but the last of a window are inside NoSync, also if the loop is left early by an
/// exception. `batches` is anything with a size to loop over: a vector, or
/// sampler.batches(*loader). Without a wrapper it only counts, for a plain module
/// or a Pipeline.
template <class Range>
MicroSteps<Range> accumulate(Range&& batches, int64_t steps) {
  return MicroSteps<Range>(std::forward<Range>(batches), steps, nullptr);
}
template <class Range, class Module>
MicroSteps<Range> accumulate(Range&& batches, int64_t steps, DistributedDataParallel<Module>& ddp) {
  return MicroSteps<Range>(std::forward<Range>(batches), steps, &ddp.sync());
}
template <class Range, class Module>
MicroSteps<Range> accumulate(Range&& batches, int64_t steps,
                             FullyShardedDataParallel<Module>& fsdp) {
  return MicroSteps<Range>(std::forward<Range>(batches), steps, &fsdp.sharded());
}

}  // namespace lockstep
