#include "pipeline/exchange.hpp"

#include <utility>

namespace lockstep {

void Exchange::put(const ParcelName& name, Parcel parcel) {
  {
    const std::lock_guard lock(mutex_);
    parcels_.insert_or_assign(name, std::move(parcel));
  }
  arrived_.notify_all();
}

Parcel Exchange::take(const ParcelName& name) {
  std::unique_lock lock(mutex_);
  arrived_.wait(lock, [&] { return error_ != nullptr || parcels_.contains(name); });
  if (error_) throw Stopped();
  return std::move(parcels_.extract(name).mapped());
}

void Exchange::fail(std::exception_ptr error) {
  {
    const std::lock_guard lock(mutex_);
    if (!error_) error_ = std::move(error);
  }
  arrived_.notify_all();
}

std::exception_ptr Exchange::error() const {
  const std::lock_guard lock(mutex_);
  return error_;
}

void Exchange::clear() {
  const std::lock_guard lock(mutex_);
  parcels_.clear();
  error_ = nullptr;
}

}  // namespace lockstep
