#pragma once

#include <torch/types.h>

#include "lockstep/grad_scaler.hpp"

namespace lockstep {

/// The scale and what moves it. Numbers of the host, or scalars on the GPU of the first loss: then
/// only value() and state() wait for the device.
class LossScale {
 public:
  /// Refuses what no scale can be moved by.
  explicit LossScale(const GradScalerState& state);

  /// The loss times the scale. The first loss decides where the scale lives.
  torch::Tensor multiply(const torch::Tensor& loss);
  bool placed() const { return placed_; }
  bool on_gpu() const { return scale_.defined(); }

  /// 1 / scale, as PyTorch rounds it: once from double to float.
  float inverse() const;
  torch::Tensor inverse_on(torch::Device device) const;

  void update(bool found_inf);
  void update(torch::Tensor found_inf);  ///< a float scalar on the scale's GPU; needs on_gpu()
  void set(double scale);

  double value() const;
  GradScalerState state() const;
  void load(const GradScalerState& state);
  const torch::Tensor& tensor() const { return scale_; }  ///< on_gpu() only

 private:
  void fill_tensors();

  GradScalerState state_;  // where on_gpu(): scale and tracker are stale
  torch::Tensor scale_;    // float
  torch::Tensor tracker_;  // int
  bool placed_ = false;
};

/// Refuses a scale that is not a positive finite float.
void require_scale(double scale);

}  // namespace lockstep
