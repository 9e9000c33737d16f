#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace lockstep::cli {

/// What a run of practical 10 is for.
enum class HybridPart {
  kSingle,        ///< one process, one stage, the batch whole: what the losses must equal
  kBase,          ///< 10.1
  kMicroBatches,  ///< 10.2
  kBatch,         ///< 10.3
  kOneProcess,    ///< 10.4
  kSameDevice,    ///< 10.5
  kSchedule       ///< one schedule against the others, in one process
};

/// One way to train in practical 10.
struct HybridVariant {
  HybridPart part = HybridPart::kBase;
  int ranks = 2;
  int stages = 2;
  int64_t micro_batches = 4;
  int64_t rows = 64;  ///< of a step, over all ranks
  std::string schedule = "gpipe";

  bool operator==(const HybridVariant&) const = default;

  std::string name() const;                    ///< of its records: "micro-batches-2"
  std::string title() const;                   ///< for people: "10.2: 2 micro-batches"
  std::vector<std::string> arguments() const;  ///< beyond the flags that all programs share
};

}  // namespace lockstep::cli
