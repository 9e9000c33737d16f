#include "cli/lab/homework2_plan.hpp"

#include "cli/lab/lab_ground.hpp"

namespace lockstep::cli {
namespace {

// An optimizer step is up to 32 micro-steps here: a few of them take minutes.
GroundDefaults defaults_for(bool quick) {
  if (quick) return {{8, 256, 1024, 1024, 2}, {8, 4096, 2048, 4096, 2}, {4, 8, 16, 32}};
  return {{16, 256, 1024, 1024, 2}, {20, 4096, 2048, 4096, 2}, {4, 8, 16, 32}};
}

}  // namespace

LabPlan plan_homework2(const LabOptions& options, const Hardware& hardware) {
  const Ground ground = choose_ground(options, hardware, defaults_for(options.quick));
  const int64_t first = ground.accum_steps.front();
  std::vector<Variant> timed = {{}, {.amp = ground.amp}};
  for (const int64_t micro_steps : ground.accum_steps) {
    timed.push_back({.accum_steps = micro_steps});
    timed.push_back({.accum_steps = micro_steps, .amp = ground.amp});
  }
  timed.push_back({.accum_steps = first, .sync_every_step = true});
  const std::vector<Variant> once = {{.row_factor = first},
                                     {.accum_steps = first, .divide = false}};
  return plan_variants(timed, once, options.quick ? 2 : 3, ground, hardware);
}

}  // namespace lockstep::cli
