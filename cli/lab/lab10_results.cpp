#include "cli/lab/lab10_results.hpp"

namespace lockstep::cli {
namespace {

RunSet& schedule_set(Lab10Results& results, const std::string& schedule) {
  if (schedule == "sequential") return results.sequential;
  if (schedule == "gpipe") return results.gpipe;
  return schedule == "1f1b" ? results.one_f_one_b : results.zero_bubble;
}

RunSet& set_for(Lab10Results& results, const HybridVariant& variant) {
  switch (variant.part) {
    case HybridPart::kSingle:
      return results.single;
    case HybridPart::kBase:
      return results.base;
    case HybridPart::kMicroBatches:
      return place_for(results.micro_batches, &SizedRuns::size, variant.micro_batches).runs;
    case HybridPart::kBatch:
      return place_for(results.batches, &SizedRuns::size, variant.rows).runs;
    case HybridPart::kOneProcess:
      return results.one_process;
    case HybridPart::kSameDevice:
      return results.same_device;
    case HybridPart::kSchedule:
      break;
  }
  return schedule_set(results, variant.schedule);
}

}  // namespace

Lab10Results collect_lab10(const Finished& finished) {
  Lab10Results results;
  for (const auto& [experiment, record] : finished) {
    const HybridVariant& variant = experiment.hybrid;
    RunSet& set_up = set_for(results, variant);
    set_up.devices = experiment.devices;
    set_up.runs.push_back(record);
    if (variant.part != HybridPart::kBase) continue;
    place_for(results.micro_batches, &SizedRuns::size, variant.micro_batches).runs = set_up;
    place_for(results.batches, &SizedRuns::size, variant.rows).runs = set_up;
  }
  return results;
}

}  // namespace lockstep::cli
