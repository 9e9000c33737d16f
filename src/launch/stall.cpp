#include "launch/stall.hpp"

#include <algorithm>

namespace lockstep {

bool waits_for_others(const RankStatus& rank) {
  return rank.collective.sequence != 0 && rank.collective.finished_ns == 0;
}

bool StallWatch::look(const std::vector<RankStatus>& ranks, int64_t now_ns) {
  std::vector<Reading> now;
  for (const RankStatus& rank : ranks) {
    now.push_back({rank.step, rank.collective.sequence, rank.collective.finished_ns});
  }
  last_.resize(now.size());
  if (now != last_) {
    last_ = std::move(now);
    progressed_ns_ = now_ns;
    return false;
  }
  return progressed_ns_ >= 0 && now_ns - progressed_ns_ >= longest_ns_ &&
         !std::all_of(ranks.begin(), ranks.end(), waits_for_others);
}

}  // namespace lockstep
