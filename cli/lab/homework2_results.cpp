#include "cli/lab/homework2_results.hpp"

namespace lockstep::cli {
namespace {

RunSet& set_for(Homework2Results& results, const Variant& variant) {
  if (variant.row_factor > 1) return results.one_batch;
  if (!variant.divide) return results.undivided;
  if (variant.sync_every_step) return results.synced;
  const bool fp32 = variant.amp == "off";
  if (variant.accum_steps == 1) return fp32 ? results.fp32 : results.amp;
  AccumPoint& point = place_for(results.points, &AccumPoint::accum_steps, variant.accum_steps);
  return fp32 ? point.fp32 : point.combined;
}

}  // namespace

Homework2Results collect_homework2(const Finished& finished) {
  Homework2Results results;
  collect_runs(finished,
               [&](const Variant& variant) -> RunSet& { return set_for(results, variant); });
  return results;
}

}  // namespace lockstep::cli
