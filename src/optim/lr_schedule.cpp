#include "lockstep/lr_schedule.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numbers>
#include <utility>

#include "base/counted.hpp"
#include "base/mutation.hpp"
#include "lockstep/error.hpp"

namespace lockstep {
namespace {

void require_updates(const char* schedule, int64_t updates) {
  if (updates >= 1) return;
  throw Error(Code::kUsage, fmt::format("{} over {} updates", schedule, updates),
              "give it 1 update or more");
}

}  // namespace

LrSchedule constant_lr(double factor) {
  return [factor](int64_t, double base_lr) { return base_lr * factor; };
}

LrSchedule linear_lr(double start_factor, double end_factor, int64_t updates) {
  require_updates("linear_lr", updates);
  return [=](int64_t done, double base_lr) {
    const auto share = static_cast<double>(std::min(done, updates)) / static_cast<double>(updates);
    return base_lr * (start_factor + (end_factor - start_factor) * share);
  };
}

LrSchedule cosine_lr(int64_t updates, double min_lr) {
  require_updates("cosine_lr", updates);
  return [=](int64_t done, double base_lr) {
    const double angle =
        std::numbers::pi * static_cast<double>(done) / static_cast<double>(updates);
    return min_lr + (base_lr - min_lr) * (1 + std::cos(angle)) / 2;
  };
}

LrSchedule step_lr(int64_t every, double gamma) {
  require_updates("step_lr", every);
  return [=](int64_t done, double base_lr) {
    return base_lr * std::pow(gamma, static_cast<double>(done / every));
  };
}

LrSchedule sequential_lr(std::vector<LrSchedule> schedules, std::vector<int64_t> milestones) {
  const bool ascending = std::adjacent_find(milestones.begin(), milestones.end(),
                                            std::greater_equal<>()) == milestones.end() &&
                         (milestones.empty() || milestones.front() >= 0);
  if (schedules.empty() || milestones.size() + 1 != schedules.size() || !ascending) {
    throw Error(Code::kUsage,
                fmt::format("sequential_lr of {} schedules with {} milestones{}", schedules.size(),
                            milestones.size(), ascending ? "" : " that do not ascend"),
                "give one schedule more than milestones, and milestones in ascending order");
  }
  return [schedules = std::move(schedules), milestones = std::move(milestones)](int64_t done,
                                                                                double base_lr) {
    const auto part = std::upper_bound(milestones.begin(), milestones.end(), done);
    const int64_t begin = part == milestones.begin() ? 0 : *std::prev(part);
    return schedules[static_cast<size_t>(part - milestones.begin())](done - begin, base_lr);
  };
}

LrSchedule warmup_cosine_lr(int64_t warmup, int64_t updates, double min_lr) {
  require_updates("warmup_cosine_lr", updates);
  if (warmup < 0 || warmup >= updates) {
    throw Error(
        Code::kUsage,
        fmt::format("warmup_cosine_lr warms up for {} of {}", warmup, counted(updates, "update")),
        "give it fewer updates of warm-up than updates in all");
  }
  LrSchedule rest = sequential_lr(
      {cosine_lr(updates - warmup, min_lr), [min_lr](int64_t, double) { return min_lr; }},
      {updates - warmup});
  if (warmup == 0) return rest;
  return sequential_lr({linear_lr(1 / static_cast<double>(warmup), 1, warmup), std::move(rest)},
                       {warmup});
}

LrScheduler::LrScheduler(torch::optim::Optimizer& optimizer, LrSchedule schedule)
    : optimizer_(optimizer), schedule_(std::move(schedule)) {
  if (!schedule_) {
    throw Error(Code::kUsage, "LrScheduler got no schedule",
                "give it one, such as cosine_lr(1000)");
  }
  state_.base_lrs = rates();
  set_rates();
}

void LrScheduler::step() {
  ++state_.updates;
  set_rates();
}

std::vector<double> LrScheduler::rates() const {
  std::vector<double> rates;
  for (const auto& group : optimizer_.param_groups()) rates.push_back(group.options().get_lr());
  return rates;
}

void LrScheduler::load(const State& state) {
  if (state.base_lrs.size() != optimizer_.param_groups().size()) {
    throw Error(
        Code::kTensorMismatch,
        fmt::format("the saved schedule is of {}, and the optimizer has {}",
                    counted(state.base_lrs.size(), "group"), optimizer_.param_groups().size()),
        "make the optimizer with the groups that it had");
  }
  state_ = state;
  set_rates();
}

void LrScheduler::set_rates() {
  auto& groups = optimizer_.param_groups();
  if (groups.size() != state_.base_lrs.size()) {
    throw Error(Code::kUsage, "the optimizer got another group after its LrScheduler was made",
                "add all groups first, and make the LrScheduler afterwards");
  }
  for (size_t i = 0; i < groups.size(); ++i) {
    const int64_t ahead = is_planted(Mutation::kRateAhead) ? 1 : 0;
    groups[i].options().set_lr(schedule_(state_.updates + ahead, state_.base_lrs[i]));
  }
}

}  // namespace lockstep
