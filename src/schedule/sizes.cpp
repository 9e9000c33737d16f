#include "schedule/sizes.hpp"

#include <fmt/format.h>

#include "lockstep/error.hpp"

namespace lockstep {

void require_positive(const char* what, int64_t count) {
  if (count >= 1) return;
  throw Error(Code::kSchedule, fmt::format("a schedule cannot have {} {}", count, what),
              fmt::format("use 1 or more {}", what));
}

void require_sizes(int64_t stages, int64_t micro_batches) {
  require_positive("stages", stages);
  require_positive("micro-batches", micro_batches);
  if (stages > kMaxStages) {
    throw Error(Code::kSchedule, fmt::format("a schedule of {} stages is too large", stages),
                fmt::format("use at most {} stages", kMaxStages));
  }
  if (micro_batches > kMaxForwards / stages) {
    throw Error(Code::kSchedule,
                fmt::format("a schedule of {} and {} is too large", counted(stages, "stage"),
                            counted(micro_batches, "micro-batch")),
                fmt::format("use at most {} with {}", counted(kMaxForwards / stages, "micro-batch"),
                            counted(stages, "stage")));
  }
}

std::string counted(int64_t count, std::string_view noun) {
  if (count == 1) return fmt::format("1 {}", noun);
  return fmt::format("{} {}{}", count, noun, noun.ends_with("ch") ? "es" : "s");
}

}  // namespace lockstep
