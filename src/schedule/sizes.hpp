#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace lockstep {

constexpr int kMaxStages = 4096;
/// Stages times micro-batches: three actions for each still make lists that memory holds with ease.
constexpr int64_t kMaxForwards = int64_t{1} << 18;

/// kSchedule where a number is below 1 or the schedule would be too large to be meant.
void require_sizes(int64_t stages, int64_t micro_batches);

/// kSchedule unless `count` is at least 1; `what` names it: "chunks".
void require_positive(const char* what, int64_t count);

/// "1 stage", "4 stages".
std::string counted(int64_t count, std::string_view noun);

}  // namespace lockstep
