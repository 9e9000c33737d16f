#include "cli/lab/lab7_plan.hpp"

#include <algorithm>

#include "cli/lab/lab_ground.hpp"

namespace lockstep::cli {
namespace {

// Wide layers and many rows: lower precision shows where matrix products outweigh all else.
GroundDefaults defaults_for(bool quick) {
  if (quick) return {{8, 256, 1024, 1024, 2}, {10, 4096, 2048, 4096, 2}, {4}};
  return {{20, 256, 1024, 1024, 2}, {30, 4096, 2048, 4096, 2}, {4, 8}};
}

}  // namespace

LabPlan plan_lab7(const LabOptions& options, const Hardware& hardware) {
  const Ground ground = choose_ground(options, hardware, defaults_for(options.quick));
  const std::string& amp = ground.amp;
  std::vector<Variant> timed = {{}, {.amp = amp}};
  std::vector<Variant> once;
  for (const int64_t micro_steps : ground.accum_steps) {
    timed.push_back({.accum_steps = micro_steps});
    timed.push_back({.accum_steps = micro_steps, .sync_every_step = true});
    timed.push_back({.row_factor = micro_steps});
    once.push_back({.accum_steps = micro_steps, .divide = false});
  }
  timed.push_back({.accum_steps = ground.accum_steps.front(), .amp = amp});
  // In the middle, so that the curve is seen to go on after it.
  const int64_t overflow_at = std::max<int64_t>(1, ground.sizes.steps / 2);
  once.push_back({.amp = amp, .scaler = false});
  once.push_back({.amp = amp, .overflow_at = overflow_at});
  once.push_back({.amp = amp, .scaler = false, .overflow_at = overflow_at});
  return plan_variants(timed, once, options.quick ? 2 : 3, ground, hardware);
}

}  // namespace lockstep::cli
