#include "cli/lab7_results.hpp"

namespace lockstep::cli {
namespace {

AccumulationRuns& with_micro_steps(Lab7Results& results, int64_t micro_steps) {
  auto& all = results.accumulations;
  auto place = std::find_if(all.begin(), all.end(), [micro_steps](const AccumulationRuns& runs) {
    return runs.micro_steps >= micro_steps;
  });
  if (place == all.end() || place->micro_steps != micro_steps) {
    place = all.insert(place, AccumulationRuns{.micro_steps = micro_steps});
  }
  return *place;
}

RunSet& set_for(Lab7Results& results, const Variant& variant) {
  if (variant.amp != "off") {
    if (variant.overflow_at > 0) {
      results.overflow_at = variant.overflow_at;
      return variant.scaler ? results.overflow : results.overflow_no_scaler;
    }
    if (!variant.scaler) return results.no_scaler;
    return variant.accum_steps > 1 ? results.combined : results.amp;
  }
  if (variant.effective_factor() == 1) return results.fp32;
  AccumulationRuns& runs = with_micro_steps(results, variant.effective_factor());
  if (variant.row_factor > 1) return runs.one_batch;
  if (!variant.divide) return runs.undivided;
  return variant.sync_every_step ? runs.synced : runs.no_sync;
}

}  // namespace

Lab7Results collect_lab7(const Finished& finished) {
  Lab7Results results;
  for (const auto& [experiment, record] : finished) {
    RunSet& set_up = set_for(results, experiment.variant);
    set_up.devices = experiment.devices;
    set_up.runs.push_back(record);
  }
  return results;
}

}  // namespace lockstep::cli
