#include "cli/homework2_results.hpp"

namespace lockstep::cli {
namespace {

AccumPoint& point_at(Homework2Results& results, int64_t accum_steps) {
  auto& all = results.points;
  auto place = std::find_if(all.begin(), all.end(), [accum_steps](const AccumPoint& point) {
    return point.accum_steps >= accum_steps;
  });
  if (place == all.end() || place->accum_steps != accum_steps) {
    place = all.insert(place, AccumPoint{.accum_steps = accum_steps});
  }
  return *place;
}

RunSet& set_for(Homework2Results& results, const Variant& variant) {
  if (variant.row_factor > 1) return results.one_batch;
  if (!variant.divide) return results.undivided;
  if (variant.sync_every_step) return results.synced;
  const bool fp32 = variant.amp == "off";
  if (variant.accum_steps == 1) return fp32 ? results.fp32 : results.amp;
  AccumPoint& point = point_at(results, variant.accum_steps);
  return fp32 ? point.fp32 : point.combined;
}

}  // namespace

Homework2Results collect_homework2(const Finished& finished) {
  Homework2Results results;
  for (const auto& [experiment, record] : finished) {
    RunSet& set_up = set_for(results, experiment.variant);
    set_up.devices = experiment.devices;
    set_up.runs.push_back(record);
  }
  return results;
}

}  // namespace lockstep::cli
