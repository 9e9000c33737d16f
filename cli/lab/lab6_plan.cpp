#include "cli/lab/lab6_plan.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "lockstep/error.hpp"

namespace lockstep::cli {
namespace {

constexpr int kCourseRanks[] = {1, 2, 4};

// Ascending, with 1 among them: every speed-up is against one rank.
std::vector<int> with_one(const std::vector<int>& ranks) {
  std::set<int> sorted(ranks.begin(), ranks.end());
  sorted.insert(1);
  return {sorted.begin(), sorted.end()};
}

struct Scale {
  std::vector<SlotPlan> slots;  // of all devices
  std::vector<int> ranks;
};

// A rank needs a device of its own. Without --devices the GPUs serve where there are enough of
// them, else the cores, which may be shared.
Scale choose_scale(const LabOptions& options, const Hardware& hardware) {
  if (!options.devices.empty()) {
    Scale scale{plan_devices(options.devices, hardware), {}};
    const int devices = static_cast<int>(scale.slots.size());
    scale.ranks = options.ranks.empty() ? scaling_points(devices) : with_one(options.ranks);
    if (scale.ranks.back() > devices) {
      throw Error(Code::kUsage,
                  fmt::format("{} ranks need a device each, but --devices {} names {}",
                              scale.ranks.back(), options.devices, devices),
                  "name more devices, fewer --ranks, or leave --devices out");
    }
    return scale;
  }
  if (options.ranks.empty() && hardware.gpus > 1) {
    return {plan_devices("cuda", hardware), scaling_points(hardware.gpus)};
  }
  const auto ranks = with_one(
      options.ranks.empty() ? std::vector<int>(std::begin(kCourseRanks), std::end(kCourseRanks))
                            : options.ranks);
  // Ranks that shared a GPU would show no scaling.
  const int most = ranks.back();
  const std::string spec =
      hardware.gpus >= most ? default_devices(hardware, most) : fmt::format("cpu:{}", most);
  return {plan_devices(spec, hardware), ranks};
}

}  // namespace

LabPlan plan_lab6(const LabOptions& options, const Hardware& hardware) {
  const auto [slots, ranks] = choose_scale(options, hardware);
  const Sizes sizes = choose_sizes(options, slots[0].kind);
  if (sizes.batch < ranks.back()) {
    throw Error(Code::kSplit,
                fmt::format("--batch {} cannot be divided over {} ranks: each needs a row",
                            sizes.batch, ranks.back()),
                "give a larger --batch, or fewer --ranks");
  }
  LabPlan plan;
  plan.repetitions = options.quick ? 2 : 3;
  for (int run = 1; run <= plan.repetitions; ++run) {
    const auto add = [&, &all = slots](Role role, int devices) {
      auto experiment = timed_experiment(role, all, devices, sizes, hardware);
      if (role == Role::kDistributed && options.bucket_mib) {
        experiment.arguments.insert(experiment.arguments.end(),
                                    {"--bucket-mib", fmt::format("{}", *options.bucket_mib)});
      }
      plan.experiments.push_back(repetition(std::move(experiment), run, plan.repetitions));
    };
    add(Role::kSingle, 1);
    for (const int count : ranks) {
      add(Role::kDataParallel, count);
      add(Role::kDistributed, count);
    }
  }
  return plan;
}

}  // namespace lockstep::cli
