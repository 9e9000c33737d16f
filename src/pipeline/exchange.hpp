#pragma once

#include <torch/types.h>

#include <condition_variable>
#include <exception>
#include <map>
#include <mutex>
#include <tuple>

#include "device/stream_order.hpp"

namespace lockstep {

/// What travels between stages.
enum class Cargo { kActivation, kGradient };

/// Which message: of what, from which stage, of which micro-batch.
struct ParcelName {
  Cargo cargo = Cargo::kActivation;
  int from_stage = 0;
  int micro_batch = 0;

  auto operator<=>(const ParcelName&) const = default;
};

/// A tensor, and when it is ready on its device.
struct Parcel {
  torch::Tensor tensor;
  StreamOrder order;
  Device* from = nullptr;  ///< null: the caller's
};

/// Another stage of this process has failed; its own error is the one to report.
class Stopped : public std::exception {
 public:
  const char* what() const noexcept override { return "another stage failed"; }
};

/// Where the stages of one process leave tensors for each other. Thread-safe.
class Exchange {
 public:
  void put(const ParcelName& name, Parcel parcel);

  /// Waits for it. Throws Stopped once a stage has failed.
  Parcel take(const ParcelName& name);

  /// From now on nobody waits. Keeps the first error.
  void fail(std::exception_ptr error);

  std::exception_ptr error() const;

  /// For the next step.
  void clear();

 private:
  mutable std::mutex mutex_;  // guards all below
  std::condition_variable arrived_;
  std::map<ParcelName, Parcel> parcels_;
  std::exception_ptr error_;
};

}  // namespace lockstep
