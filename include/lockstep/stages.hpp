#pragma once

#include <torch/nn/modules/container/sequential.h>
#include <torch/types.h>

#include <cstdint>
#include <span>
#include <vector>

namespace lockstep {

/// A model's layers as stages. They are the model's own modules and keep their names; layers per
/// stage come from cut_by_count() or cut_by_cost(), or from the user.
///
///     auto stages = lockstep::split_stages(model, lockstep::cut_by_count(model->size(), 4));
std::vector<torch::nn::Sequential> split_stages(const torch::nn::Sequential& model,
                                                std::span<const int64_t> layers_per_stage);

/// Seconds that each layer takes for forward and backward of these rows, best of a few tries: the
/// cost for cut_by_cost(). Weights, gradients and buffers stay as they are.
std::vector<double> measure_layers(const torch::nn::Sequential& model, const torch::Tensor& rows);

}  // namespace lockstep
