#include "lockstep/stages.hpp"

#include <fmt/format.h>
#include <torch/torch.h>

#include <algorithm>
#include <numeric>

#include "lockstep/clock.hpp"
#include "lockstep/error.hpp"
#include "pipeline/keep_buffers.hpp"

namespace lockstep {
namespace {

constexpr int kTries = 3;

void require_cut(int64_t layers, std::span<const int64_t> layers_per_stage) {
  const int64_t total =
      std::accumulate(layers_per_stage.begin(), layers_per_stage.end(), int64_t{0});
  const bool any_empty = std::any_of(layers_per_stage.begin(), layers_per_stage.end(),
                                     [](int64_t count) { return count < 1; });
  if (total == layers && !any_empty) return;
  throw Error(Code::kStageMismatch,
              fmt::format("{} layers cannot be cut into {} stages of {} layers in all{}", layers,
                          layers_per_stage.size(), total, any_empty ? ", one without a layer" : ""),
              "give every stage at least one layer, and as many in all as the model has");
}

// Forward and backward of one layer on its own, in nanoseconds; replaces `rows` by its output.
int64_t time_layer(torch::nn::AnyModule& layer, torch::Tensor& rows) {
  const torch::Tensor leaf = rows.detach();
  if (leaf.is_floating_point()) leaf.requires_grad_();
  const torch::Tensor input = leaf.clone();  // a layer may work in place, but not on a leaf
  const int64_t begin_ns = monotonic_ns();
  const torch::Tensor output = layer.forward(input);
  std::vector<torch::Tensor> wanted;
  for (const auto& parameter : layer.ptr()->parameters()) {
    if (parameter.requires_grad()) wanted.push_back(parameter);
  }
  if (leaf.requires_grad()) wanted.push_back(leaf);
  if (output.requires_grad() && !wanted.empty()) {
    torch::autograd::grad({output}, wanted, {torch::ones_like(output)}, /*retain_graph=*/false,
                          /*create_graph=*/false, /*allow_unused=*/true);
  }
  if (output.is_cuda()) torch::cuda::synchronize(output.device().index());
  const int64_t took_ns = monotonic_ns() - begin_ns;
  rows = output.detach();
  return took_ns;
}

}  // namespace

std::vector<torch::nn::Sequential> split_stages(const torch::nn::Sequential& model,
                                                std::span<const int64_t> layers_per_stage) {
  require_cut(static_cast<int64_t>(model->size()), layers_per_stage);
  const auto children = model->named_children();
  std::vector<torch::nn::Sequential> stages;
  auto layer = model->begin();
  size_t number = 0;
  for (const int64_t count : layers_per_stage) {
    torch::nn::Sequential stage;
    for (int64_t i = 0; i < count; ++i, ++layer, ++number) {
      stage->push_back(children[number].key(), *layer);
    }
    stages.push_back(std::move(stage));
  }
  return stages;
}

std::vector<double> measure_layers(const torch::nn::Sequential& model, const torch::Tensor& rows) {
  const KeepBuffers buffers(*model);
  const torch::AutoGradMode grad_mode(true);
  std::vector<double> seconds(model->size(), std::numeric_limits<double>::infinity());
  for (int attempt = 0; attempt < kTries; ++attempt) {
    torch::Tensor flowing = rows;
    size_t number = 0;
    for (auto& layer : *model.ptr()) {
      const double took_s = static_cast<double>(time_layer(layer, flowing)) * 1e-9;
      seconds[number] = std::min(seconds[number], took_s);
      ++number;
    }
  }
  return seconds;
}

}  // namespace lockstep
