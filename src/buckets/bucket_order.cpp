#include "buckets/bucket_order.hpp"

#include <numeric>
#include <utility>

namespace lockstep {

BucketOrder::BucketOrder(size_t parameters, bool learns)
    : expected_(parameters), stage_(learns ? Stage::kWatching : Stage::kSettled) {
  std::iota(expected_.rbegin(), expected_.rend(), size_t{0});
}

void BucketOrder::begin_backward(std::vector<size_t> gradients) {
  missing_ = std::move(gradients);
  next_ = 0;
}

void BucketOrder::mark_ready(size_t parameter, size_t bucket) {
  if (stage_ == Stage::kWatching) seen_.push_back(parameter);
  --missing_[bucket];
}

std::optional<size_t> BucketOrder::take_ready() {
  if (next_ == missing_.size() || missing_[next_] > 0) return std::nullopt;
  return next_++;
}

void BucketOrder::end_backward() {
  if (stage_ == Stage::kWatching) stage_ = Stage::kSeen;
}

std::optional<std::vector<size_t>> BucketOrder::take_proposal() {
  if (stage_ != Stage::kSeen) return std::nullopt;
  stage_ = Stage::kSettled;
  // A rank that has not had a step of its own yet has seen no order.
  return seen_.size() == expected_.size() ? seen_ : expected_;
}

bool BucketOrder::agree(std::vector<size_t> order) {
  if (order == expected_) return false;
  expected_ = std::move(order);
  return true;
}

}  // namespace lockstep
