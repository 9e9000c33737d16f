#pragma once

#include <torch/types.h>

#include <string>

#include "lockstep/device.hpp"
#include "lockstep/pipeline.hpp"
#include "pipeline/exchange.hpp"

namespace lockstep {

/// How one place gets tensors from stages elsewhere, and sends them its own.
class Wire {
 public:
  virtual ~Wire() = default;

  /// Does not wait for the receiver. `rows` are the micro-batch's.
  virtual void send(const ParcelName& name, const torch::Tensor& tensor, int64_t rows) = 0;

  /// The tensor on this place's device, ready for its current stream.
  virtual torch::Tensor receive(const ParcelName& name, int64_t rows) = 0;

  /// Nobody shall wait for this place any more.
  virtual void abort(const std::string& reason) = 0;

  /// What went to other places so far.
  virtual LinkStats stats() const = 0;
};

/// Between the places of one process. Each device gets a copy of its own, as if it could not reach
/// the others' memory; stages on one device hand tensors over as they are.
class LocalWire final : public Wire {
 public:
  LocalWire(Exchange& exchange, Device& device) : exchange_(exchange), device_(device) {}

  void send(const ParcelName& name, const torch::Tensor& tensor, int64_t rows) override;
  torch::Tensor receive(const ParcelName& name, int64_t rows) override;
  void abort(const std::string&) override {}
  LinkStats stats() const override { return stats_; }

 private:
  Exchange& exchange_;
  Device& device_;
  LinkStats stats_;  // of what came here
};

}  // namespace lockstep
