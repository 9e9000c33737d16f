#include "launch/progress.hpp"

#include <fmt/format.h>

#include <algorithm>

namespace lockstep {
namespace {

constexpr int64_t kFewestSteps = 10;            // of every rank, between two looks
constexpr int64_t kShortestNs = 2'000'000'000;  // likewise
constexpr double kSlow = 1.3;                   // times the median of the others
constexpr double kMuchSlower = 1.5;             // times the ratio that was named

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<long>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace

std::optional<Straggler> StragglerWatch::look(const std::vector<RankStatus>& ranks) {
  std::vector<Reading> now;
  for (const RankStatus& rank : ranks) {
    const int64_t own_ns = rank.busy_ns + rank.idle_ns;
    now.push_back({rank.step, own_ns, own_ns + rank.communicating_ns});
  }
  if (last_.size() != now.size()) last_ = std::vector<Reading>(now.size());
  if (now.size() < 2) return std::nullopt;
  std::vector<double> own_ms;
  for (size_t i = 0; i < now.size(); ++i) {
    const int64_t steps = now[i].steps - last_[i].steps;
    if (steps < kFewestSteps || now[i].all_ns - last_[i].all_ns < kShortestNs) return std::nullopt;
    own_ms.push_back(static_cast<double>(now[i].own_ns - last_[i].own_ns) * 1e-6 /
                     static_cast<double>(steps));
  }
  last_ = now;
  const auto slowest = std::max_element(own_ms.begin(), own_ms.end());
  std::vector<double> others(own_ms.begin(), own_ms.end());
  others.erase(others.begin() + (slowest - own_ms.begin()));
  const double usual = median(others);
  if (usual <= 0 || *slowest < kSlow * usual) {
    named_ = -1;
    return std::nullopt;
  }
  const Straggler found{ranks[static_cast<size_t>(slowest - own_ms.begin())].rank, *slowest,
                        *slowest / usual};
  if (found.rank == named_ && found.ratio < kMuchSlower * named_ratio_) return std::nullopt;
  named_ = found.rank;
  named_ratio_ = found.ratio;
  return found;
}

std::string describe(const Straggler& straggler) {
  return fmt::format(
      "rank {} is slow: {:.3g} ms of its own per step, {:.1f} times the median of the other ranks, "
      "which wait for it",
      straggler.rank, straggler.own_ms, straggler.ratio);
}

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
