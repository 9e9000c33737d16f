#pragma once

#include <torch/types.h>

#include <memory>
#include <optional>
#include <vector>

#include "lockstep/grad_scaler.hpp"
#include "precision/gradient_scan.hpp"

namespace lockstep {

/// The scale, its rules, and how often it was updated. These numbers are on the host, or on the GPU
/// of the first loss; then updates(), value(), inverse() and state() wait for the device.
class LossScale {
 public:
  /// Refuses rules that cannot work.
  explicit LossScale(const GradScalerState& state);

  /// Returns the loss times the scale. The first loss decides where the scale lives.
  torch::Tensor multiply(const torch::Tensor& loss);
  bool has_scaled() const { return has_scaled_; }
  bool on_gpu() const { return memory_.defined(); }

  /// 1 / scale, as PyTorch rounds it: once from double to float.
  float inverse() const;
  torch::Tensor inverse_on(torch::Device device) const;

  /// Updates after a step whose outcome the host knows. `new_scale` becomes the scale.
  void update(bool found_inf, std::optional<double> new_scale);

  /// Updates after a step whose outcome only GPUs know; needs on_gpu(). Skipped updates go to the
  /// ring.
  void update(const std::vector<GpuScan>& scans, std::optional<double> new_scale);

  int64_t updates() const;
  double value() const;
  GradScalerState state() const;
  void load(const GradScalerState& state);

  /// The scale as a float scalar, and the ring of skipped updates. Both need on_gpu().
  const torch::Tensor& tensor() const { return scale_; }
  const std::shared_ptr<SkipRing>& ring() const { return ring_; }

 private:
  void move_to(torch::Device gpu);
  void settle(const std::vector<GpuScan>& scans, bool found_on_host,
              std::optional<double> new_scale);

  GradScalerState state_;  // scale and tracker are stale if on_gpu()
  int64_t updates_ = 0;    // stale if on_gpu()
  torch::Tensor memory_;   // the bytes of a GpuScale, with two views of it:
  torch::Tensor scale_;    // float
  torch::Tensor tracker_;  // int
  std::shared_ptr<SkipRing> ring_;
  bool has_scaled_ = false;
};

/// Refuses a state with which no scaler can go on.
void require_usable(const GradScalerState& state);

/// Refuses a scale that is not a positive finite float.
void require_scale(double scale);

}  // namespace lockstep
