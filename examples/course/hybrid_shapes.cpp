#include "course/hybrid_shapes.hpp"

#include <torch/torch.h>

#include <numeric>

#include "lockstep/autocast.hpp"

namespace course {
namespace {

int64_t first_layer(int stage, std::span<const int64_t> layers_per_stage) {
  return std::accumulate(layers_per_stage.begin(), layers_per_stage.begin() + stage, int64_t{0});
}

// Of one row. Backward, the input's gradient is summed as often as the output was forward; the
// model's own input needs none.
int64_t tensor_bytes_of(const LayerShape& layer, bool first, int ranks, bool recompute) {
  const int64_t backward =
      first ? 0 : layer.tensor_calls * layer.input_bytes * 2 * (ranks - 1) / ranks;
  return (recompute ? 2 : 1) * layer.tensor_bytes + backward;
}

std::vector<LayerShape> probe_layers(const Layers& model, torch::Tensor x) {
  const torch::NoGradGuard no_grad;
  std::vector<LayerShape> shapes;
  auto layers = model.layers();
  for (auto& layer : *layers) {
    const auto before = model.tensor_traffic();
    const auto out = layer.forward<torch::Tensor>(x);
    const auto after = model.tensor_traffic();
    shapes.push_back({.input_bytes = static_cast<int64_t>(x.nbytes()),
                      .output_bytes = static_cast<int64_t>(out.nbytes()),
                      .tensor_calls = after.calls - before.calls,
                      .tensor_bytes = after.sent_bytes - before.sent_bytes});
    x = out;
  }
  return shapes;
}

}  // namespace

ModelCut cut_model(const Options& options, const Layers& model, const lockstep::World& world,
                   const Precision& precision, int64_t rows) {
  const auto device = world.device().torch_device();
  const int64_t micro_batch_rows = rows / options.micro_batches;
  const auto x = torch::ones({micro_batch_rows, options.dim}, torch::TensorOptions(device));
  auto layers = model.layers();
  layers->to(device);
  ModelCut cut;
  {
    const lockstep::Autocast amp(world.device(), precision.dtype, precision.lower);
    cut.layers_per_stage = choose_cut(options, layers, x, world.comm());
    cut.layers = probe_layers(model, x.narrow(0, 0, 1));
  }
  layers->to(torch::kCPU);  // each stage goes to its own device later, and to no other
  return cut;
}

int64_t output_bytes_of(int stage, std::span<const LayerShape> layers,
                        std::span<const int64_t> layers_per_stage) {
  if (stage + 1 == static_cast<int>(layers_per_stage.size())) return 0;
  return layers[static_cast<size_t>(first_layer(stage + 1, layers_per_stage) - 1)].output_bytes;
}

ExpectedTraffic expected_traffic(const HybridPlan& plan, std::span<const LayerShape> layers,
                                 std::span<const int64_t> layers_per_stage,
                                 std::span<const int> local_stages, int64_t rows, bool recompute) {
  ExpectedTraffic expected;
  const auto& place = plan.schedule.place_of_stage;
  const auto message = [&](int from, int to, int64_t row_bytes) {
    if (place[static_cast<size_t>(from)] == place[static_cast<size_t>(to)]) return;
    expected.messages += plan.schedule.micro_batches;
    expected.message_bytes += rows * row_bytes;
  };
  for (const int stage : local_stages) {
    const bool last = stage + 1 == plan.schedule.stages();
    if (!last) message(stage, stage + 1, output_bytes_of(stage, layers, layers_per_stage));
    if (stage > 0) message(stage, stage - 1, output_bytes_of(stage - 1, layers, layers_per_stage));
    const int64_t first = first_layer(stage, layers_per_stage);
    for (int64_t i = first; i < first + layers_per_stage[static_cast<size_t>(stage)]; ++i) {
      expected.tensor_bytes +=
          rows * tensor_bytes_of(layers[static_cast<size_t>(i)], i == 0, plan.tensor, recompute);
    }
  }
  return expected;
}

}  // namespace course
