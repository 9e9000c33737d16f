#include "cli/lab/lab10_variant.hpp"

#include <fmt/format.h>

namespace lockstep::cli {

std::string HybridVariant::name() const {
  switch (part) {
    case HybridPart::kSingle:
      return "single";
    case HybridPart::kBase:
      return "base";
    case HybridPart::kMicroBatches:
      return fmt::format("micro-batches-{}", micro_batches);
    case HybridPart::kBatch:
      return fmt::format("batch-{}", rows);
    case HybridPart::kOneProcess:
      return "one-process";
    case HybridPart::kSameDevice:
      return "same-device";
    case HybridPart::kSchedule:
      return schedule;
  }
  return "";
}

std::string HybridVariant::title() const {
  switch (part) {
    case HybridPart::kSingle:
      return "one device, the batch whole";
    case HybridPart::kBase:
      return fmt::format("10.1: {} processes × {} stages, {} micro-batches", ranks, stages,
                         micro_batches);
    case HybridPart::kMicroBatches:
      return fmt::format("10.2: {} micro-batches", micro_batches);
    case HybridPart::kBatch:
      return fmt::format("10.3: a batch of {} rows", rows);
    case HybridPart::kOneProcess:
      return "10.4: one process";
    case HybridPart::kSameDevice:
      return "10.5: all stages on one device";
    case HybridPart::kSchedule:
      return fmt::format("{}, {} stages, {} micro-batches", schedule, stages, micro_batches);
  }
  return "";
}

std::vector<std::string> HybridVariant::arguments() const {
  std::vector<std::string> words = {"--micro-batches", std::to_string(micro_batches),
                                    "--stages",        std::to_string(stages),
                                    "--schedule",      schedule};
  if (part == HybridPart::kSameDevice) words.insert(words.end(), {"--place", "same"});
  return words;
}

}  // namespace lockstep::cli
