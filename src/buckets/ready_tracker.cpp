#include "buckets/ready_tracker.hpp"

#include <algorithm>
#include <utility>

namespace lockstep {

ReadyTracker::ReadyTracker(size_t parameters, bool static_graph)
    : static_graph_(static_graph),
      left_(parameters, 1),
      arrivals_(parameters, 0),
      used_(parameters, false),
      zero_filled_(parameters, false) {}

void ReadyTracker::add_reachable(const std::vector<bool>& reachable) {
  if (reachable_.empty()) reachable_.assign(reachable.size(), false);
  for (size_t i = 0; i < reachable.size(); ++i) reachable_[i] = reachable_[i] || reachable[i];
}

std::vector<size_t> ReadyTracker::begin_backward() {
  std::fill(arrivals_.begin(), arrivals_.end(), 0);
  last_arrivals_.clear();
  if (static_arrivals_.empty()) {
    std::fill(left_.begin(), left_.end(), 1);
  } else {
    left_ = static_arrivals_;
  }
  std::vector<size_t> unused;
  for (size_t i = 0; i < left_.size(); ++i) {
    if (reachable_.empty() ? left_[i] == 0 : !reachable_[i]) unused.push_back(i);
  }
  return unused;
}

ReadyTracker::Arrival ReadyTracker::arrive(size_t parameter) {
  used_[parameter] = true;
  arrivals_[parameter] += 1;
  if (left_[parameter] == 0) return Arrival::kLate;
  if (learns()) {
    std::erase(last_arrivals_, parameter);
    last_arrivals_.push_back(parameter);
    return Arrival::kOther;
  }
  return --left_[parameter] == 0 ? Arrival::kLast : Arrival::kOther;
}

std::vector<size_t> ReadyTracker::awaited() const {
  std::vector<size_t> parameters;
  for (size_t i = 0; i < left_.size(); ++i) {
    if (left_[i] > 0) parameters.push_back(i);
  }
  return parameters;
}

std::vector<size_t> ReadyTracker::learn() {
  static_arrivals_ = arrivals_;
  for (const size_t parameter : last_arrivals_) left_[parameter] = 0;
  return std::exchange(last_arrivals_, {});
}

void ReadyTracker::end_window() {
  std::fill(used_.begin(), used_.end(), false);
  std::fill(zero_filled_.begin(), zero_filled_.end(), false);
}

}  // namespace lockstep
