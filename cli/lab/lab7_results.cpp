#include "cli/lab/lab7_results.hpp"

namespace lockstep::cli {
namespace {

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
  AccumulationRuns& runs =
      place_for(results.accumulations, &AccumulationRuns::micro_steps, variant.effective_factor());
  if (variant.row_factor > 1) return runs.one_batch;
  if (!variant.divide) return runs.undivided;
  return variant.sync_every_step ? runs.synced : runs.no_sync;
}

}  // namespace

Lab7Results collect_lab7(const Finished& finished) {
  Lab7Results results;
  collect_runs(finished,
               [&](const Variant& variant) -> RunSet& { return set_for(results, variant); });
  return results;
}

}  // namespace lockstep::cli
