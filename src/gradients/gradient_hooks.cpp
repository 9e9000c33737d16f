#include "gradients/gradient_hooks.hpp"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <unordered_set>

namespace lockstep {

struct GradientHooks::Target {
  GradientListener* listener;  // null once the guard is gone
};

class GradientHooks::BeforeAccumulation : public torch::autograd::FunctionPreHook {
 public:
  BeforeAccumulation(std::shared_ptr<Target> target, size_t parameter)
      : target_(std::move(target)), parameter_(parameter) {}

  torch::autograd::variable_list operator()(
      const torch::autograd::variable_list& gradients) override {
    if (target_->listener == nullptr || gradients.empty() || !gradients[0].defined()) {
      return gradients;
    }
    return {target_->listener->gradient_computed(parameter_, gradients[0])};
  }

 private:
  std::shared_ptr<Target> target_;
  size_t parameter_;
};

class GradientHooks::AfterAccumulation : public torch::autograd::FunctionPostHook {
 public:
  AfterAccumulation(std::shared_ptr<Target> target, size_t parameter)
      : target_(std::move(target)), parameter_(parameter) {}

  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list& inputs) override {
    const bool has_gradient = !inputs.empty() && inputs[0].defined();
    if (target_->listener != nullptr && has_gradient) {
      target_->listener->gradient_accumulated(parameter_);
    }
    return outputs;
  }

 private:
  std::shared_ptr<Target> target_;
  size_t parameter_;
};

GradientHooks::GradientHooks(std::span<const TrainedParameter> parameters,
                             GradientListener& listener)
    : target_(std::make_shared<Target>(Target{&listener})), accumulators_(parameters.size()) {
  for (size_t i = 0; i < parameters.size(); ++i) listen(i, parameters[i].tensor);
}

void GradientHooks::listen(size_t parameter, const torch::Tensor& tensor) {
  auto accumulator = torch::autograd::impl::grad_accumulator(tensor);
  accumulator->add_pre_hook(std::make_unique<BeforeAccumulation>(target_, parameter));
  accumulator->add_post_hook(std::make_unique<AfterAccumulation>(target_, parameter));
  accumulators_[parameter] = std::move(accumulator);
}

GradientHooks::~GradientHooks() {
  target_->listener = nullptr;
}

void GradientHooks::follow(std::span<const TrainedParameter> parameters) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    const torch::Tensor& tensor = parameters[i].tensor;
    if (!tensor.requires_grad()) continue;  // frozen since it was wrapped
    if (torch::autograd::impl::try_get_grad_accumulator(tensor) != accumulators_[i]) {
      listen(i, tensor);
    }
  }
}

bool GradientHooks::watch(const std::vector<torch::Tensor>& outputs) const {
  bool any = false;
  for (const auto& output : outputs) {
    if (!output.defined() || !output.requires_grad() || output.is_leaf()) continue;
    any = true;
    output.register_hook([target = target_](const torch::Tensor&) {
      if (target->listener != nullptr) target->listener->output_reached();
    });
  }
  return any;
}

std::vector<bool> GradientHooks::reachable_from(const std::vector<torch::Tensor>& outputs) const {
  std::unordered_set<torch::autograd::Node*> seen;
  std::vector<torch::autograd::Node*> waiting;
  const auto visit = [&](torch::autograd::Node* node) {
    if (node != nullptr && seen.insert(node).second) waiting.push_back(node);
  };
  for (const auto& output : outputs) {
    if (output.defined() && output.requires_grad()) {
      visit(torch::autograd::impl::gradient_edge(output).function.get());
    }
  }
  while (!waiting.empty()) {
    const auto* node = waiting.back();
    waiting.pop_back();
    for (const auto& edge : node->next_edges()) visit(edge.function.get());
  }
  std::vector<bool> reachable;
  for (const auto& each : accumulators_) reachable.push_back(seen.contains(each.get()));
  return reachable;
}

bool inside_backward() {
  return torch::autograd::get_current_graph_task_exec_info() != nullptr;
}

void at_end_of_backward(std::function<void()> callback) {
  torch::autograd::Engine::get_default_engine().queue_callback(std::move(callback));
}

GradientStreams::GradientStreams(std::span<const TrainedParameter> parameters)
    : parameters_(parameters) {
  for (const auto& [name, tensor] : parameters_) {
    const bool known = std::find(gpus_.begin(), gpus_.end(), tensor.device()) != gpus_.end();
    if (tensor.is_cuda() && !known) gpus_.push_back(tensor.device());
  }
}

void GradientStreams::follow_current() {
#if LOCKSTEP_CUDA
  cuda::accumulate_on_current_stream(parameters_);
#endif
  streams_.clear();
  for (const auto& gpu : gpus_) {
    streams_.push_back(c10::impl::VirtualGuardImpl(gpu.type()).getStream(gpu));
  }
}

}  // namespace lockstep
