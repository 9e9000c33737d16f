#include "course/step_facts.hpp"

#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <unordered_set>
#include <vector>

namespace course {
namespace {

constexpr double kScale = 65536;                 // GradScaler's first
const double kLostBelow = std::ldexp(1.0, -25);  // and here: fp16 rounds it to 0
constexpr double kOverflowsFrom = 65520;         // fp16 rounds it to infinity

using torch::autograd::Node;

// Autograd's note of a conversion. What flows into a backward node has the type of what its forward
// made.
bool is_low_precision_copy(const Node& node) {
  if (node.name().find("ToCopy") == std::string::npos) return false;
  const auto dtype = node.input_metadata(0).dtype().toScalarType();
  return dtype == torch::kBFloat16 || dtype == torch::kHalf;
}

// Between a weight and its copy there are at most changes of view. 0: it is no copy of a weight.
int64_t elements_of_weight(const Node& copy) {
  const Node* node = &copy;
  while (node != nullptr && node->num_outputs() == 1) {
    node = node->next_edge(0).function.get();
    const auto* end = dynamic_cast<const torch::autograd::AccumulateGrad*>(node);
    if (end != nullptr) return end->variable.numel();
  }
  return 0;
}

int64_t state_bytes(const torch::optim::Optimizer& optimizer) {
  int64_t bytes = 0;
  const auto add = [&](const torch::Tensor& tensor) {
    if (tensor.defined()) bytes += static_cast<int64_t>(tensor.nbytes());
  };
  for (const auto& [parameter, state] : optimizer.state()) {
    if (const auto* sgd = dynamic_cast<const torch::optim::SGDParamState*>(state.get())) {
      add(sgd->momentum_buffer());
    }
    if (const auto* adamw = dynamic_cast<const torch::optim::AdamWParamState*>(state.get())) {
      add(adamw->exp_avg());
      add(adamw->exp_avg_sq());
    }
  }
  return bytes;
}

}  // namespace

int64_t low_precision_bytes(const torch::Tensor& loss) {
  int64_t bytes = 0;
  std::unordered_set<const Node*> seen;
  std::vector<const Node*> to_visit = {loss.grad_fn().get()};
  while (!to_visit.empty()) {
    const Node* node = to_visit.back();
    to_visit.pop_back();
    if (node == nullptr || !seen.insert(node).second) continue;
    if (is_low_precision_copy(*node)) bytes += 2 * elements_of_weight(*node);
    for (const auto& edge : node->next_edges()) to_visit.push_back(edge.function.get());
  }
  return bytes;
}

lockstep::GradientCheck check_gradients(const torch::nn::Module& net, double scale) {
  const torch::NoGradGuard no_grad;
  lockstep::GradientCheck check;
  double squares = 0;
  double zeros = 0;
  double lost = 0;
  double lost_scaled = 0;
  double overflow_scaled = 0;
  const auto count = [](const torch::Tensor& which) {
    return static_cast<double>(which.sum().item<int64_t>());
  };
  for (const auto& parameter : net.parameters()) {
    if (!parameter.grad().defined()) continue;
    const torch::Tensor size = parameter.grad().abs() / scale;
    squares += size.square().sum(torch::kDouble).item<double>();
    zeros += count(size == 0);
    lost += count((size > 0) & (size <= kLostBelow));
    lost_scaled += count((size > 0) & (size <= kLostBelow / kScale));
    overflow_scaled += count(size >= kOverflowsFrom / kScale);
    check.count += size.numel();
  }
  const auto elements = static_cast<double>(std::max<int64_t>(check.count, 1));
  check.norm = std::sqrt(squares);
  check.zero_share = zeros / elements;
  check.fp16_lost = lost / elements;
  check.fp16_lost_scaled = lost_scaled / elements;
  check.fp16_overflow_scaled = overflow_scaled / elements;
  return check;
}

lockstep::MemorySplit split_memory(const torch::nn::Module& net,
                                   const torch::optim::Optimizer& optimizer, int64_t low_precision,
                                   int64_t peak_bytes,
                                   const std::optional<lockstep::MasterWeights>& masters) {
  lockstep::MemorySplit split;
  split.low_precision = low_precision;
  for (const auto& parameter : net.parameters()) {
    const auto bytes = static_cast<int64_t>(parameter.nbytes());
    (masters && masters->holds(parameter) ? split.low_precision : split.weights) += bytes;
    if (parameter.requires_grad()) split.gradients += bytes;
  }
  if (masters) split.weights += masters->bytes();
  for (const auto& buffer : net.buffers()) split.weights += static_cast<int64_t>(buffer.nbytes());
  split.optimizer_state = state_bytes(optimizer);
  const int64_t known =
      split.weights + split.gradients + split.optimizer_state + split.low_precision;
  split.activations = std::max<int64_t>(0, peak_bytes - known);
  return split;
}

}  // namespace course
