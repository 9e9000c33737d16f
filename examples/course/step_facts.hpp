#pragma once

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <optional>

#include "lockstep/master_weights.hpp"
#include "lockstep/record.hpp"

namespace course {

/// Bytes of the low-precision copies of weights that autocast made for this loss.
int64_t low_precision_bytes(const torch::Tensor& loss);

/// The net's gradients, divided by the scale they carry.
lockstep::GradientCheck check_gradients(const torch::nn::Module& net, double scale);

/// What the peak of a device consists of; the rest of it counts to the activations. Where there are
/// masters they are the weights, and what the net holds are their low-precision copies.
lockstep::MemorySplit split_memory(const torch::nn::Module& net,
                                   const torch::optim::Optimizer& optimizer, int64_t low_precision,
                                   int64_t peak_bytes,
                                   const std::optional<lockstep::MasterWeights>& masters);

}  // namespace course
