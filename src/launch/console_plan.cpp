#include "launch/console_plan.hpp"

#include <algorithm>

namespace lockstep {
namespace {

bool contains(const std::vector<int>& list, int number) {
  return std::find(list.begin(), list.end(), number) != list.end();
}

bool chosen(const std::vector<int>& bits, int local_rank, Stream stream) {
  const auto place = static_cast<size_t>(local_rank);
  const int bit = stream == Stream::kOut ? 1 : 2;
  return place < bits.size() && (bits[place] & bit) != 0;
}

}  // namespace

Shown decide_shown(const ConsolePlan& plan, int rank, int local_rank, Stream stream) {
  if (plan.local_ranks && !contains(*plan.local_ranks, local_rank)) return Shown::kHidden;
  if (chosen(plan.tee, local_rank, stream)) return Shown::kLive;
  if (chosen(plan.redirects, local_rank, stream)) return Shown::kHidden;
  if (plan.local_ranks || !plan.ranks || contains(*plan.ranks, rank)) return Shown::kLive;
  return stream == Stream::kErr ? Shown::kHeld : Shown::kHidden;
}

}  // namespace lockstep
