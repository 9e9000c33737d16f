#pragma once

#include <torch/types.h>

#include <memory>
#include <optional>
#include <vector>

#include "lockstep/grad_scaler.hpp"
#include "precision/gpu_gradients.hpp"

namespace lockstep {

/// The scale, what moves it, and how often it was moved. Numbers of the host, or of the GPU of the
/// first loss: then updates(), value(), inverse() and state() wait for the device.
class LossScale {
 public:
  /// Refuses what no scale can be moved by.
  explicit LossScale(const GradScalerState& state);

  /// The loss times the scale. The first loss decides where the scale lives.
  torch::Tensor multiply(const torch::Tensor& loss);
  bool placed() const { return placed_; }
  bool on_gpu() const { return memory_.defined(); }

  /// 1 / scale, as PyTorch rounds it: once from double to float.
  float inverse() const;
  torch::Tensor inverse_on(torch::Device device) const;

  /// After a step whose outcome the host knows. `new_scale` becomes the scale.
  void update(bool found_inf, std::optional<double> new_scale);

  /// After a step whose outcome only GPUs know; needs on_gpu(). Skipped updates go to the ring.
  void update(const std::vector<GpuScan>& scans, std::optional<double> new_scale);

  int64_t updates() const;
  double value() const;
  GradScalerState state() const;
  void load(const GradScalerState& state);

  /// on_gpu() only: a float scalar, and where the GPU writes skipped updates.
  const torch::Tensor& tensor() const { return scale_; }
  const std::shared_ptr<SkipRing>& ring() const { return ring_; }

 private:
  void place_on(torch::Device gpu);
  void settle(const std::vector<GpuScan>& scans, bool found_on_host,
              std::optional<double> new_scale);

  GradScalerState state_;  // where on_gpu(): scale and tracker are stale
  int64_t updates_ = 0;    // where on_gpu(): stale too
  torch::Tensor memory_;   // a GpuScale's bytes, and two views of it:
  torch::Tensor scale_;    // float
  torch::Tensor tracker_;  // int
  std::shared_ptr<SkipRing> ring_;
  bool placed_ = false;
};

/// Refuses a scale that is not a positive finite float.
void require_scale(double scale);

}  // namespace lockstep
