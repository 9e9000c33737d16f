#include "pipeline/split_backward.hpp"

#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include "torch_compat.hpp"

namespace lockstep {

using torch::autograd::AccumulateGrad;
using torch::autograd::edge_list;
using torch::autograd::Node;
using torch::autograd::variable_list;

struct SplitBackward::Fork {
  std::shared_ptr<Node> node;
  edge_list weights;        // accumulators reached from here and from no other fork
  variable_list gradients;  // [output of the forward operation], as they arrived
};

namespace {

// Keeps the gradients that arrive at a fork, as long as the fork exists.
template <class Fork>
class KeepGradients : public torch::autograd::FunctionPreHook {
 public:
  explicit KeepGradients(std::weak_ptr<Fork> fork) : fork_(std::move(fork)) {}

  variable_list operator()(const variable_list& gradients) override {
    if (const auto fork = fork_.lock(); fork && fork->gradients.empty()) {
      fork->gradients = gradients;
    }
    return gradients;
  }

 private:
  std::weak_ptr<Fork> fork_;
};

// The graph behind an output, as seen from one of its inputs.
class Graph {
 public:
  Graph(Node* root, const Node* target) : target_(target) { visit(root); }

  bool leads_to_input(const Node* node) const { return leads_.at(node); }

  // Every node on a path to the input, the output's first.
  const std::vector<Node*>& path() const { return path_; }

  // Accumulators that can be reached from `node`.
  void collect_weights(Node* node, std::unordered_set<Node*>& weights) const {
    std::vector<Node*> open = {node};
    std::unordered_set<Node*> seen;
    while (!open.empty()) {
      Node* each = open.back();
      open.pop_back();
      if (!seen.insert(each).second) continue;
      if (dynamic_cast<AccumulateGrad*>(each) != nullptr) weights.insert(each);
      for (const auto& edge : each->next_edges()) {
        if (edge.is_valid()) open.push_back(edge.function.get());
      }
    }
  }

 private:
  // Depth first without recursion: a graph may be deeper than the stack.
  void visit(Node* root) {
    struct Open {
      Node* node;
      size_t next;
    };
    std::vector<Open> open = {{root, 0}};
    leads_[root] = root == target_;
    while (!open.empty()) {
      auto& [node, next] = open.back();
      if (next < node->num_outputs()) {
        Node* below = node->next_edge(next++).function.get();
        if (below != nullptr && leads_.emplace(below, below == target_).second) {
          open.push_back({below, 0});
        }
        continue;
      }
      bool& leads = leads_[node];
      for (const auto& edge : node->next_edges()) {
        if (edge.is_valid()) leads = leads || leads_.at(edge.function.get());
      }
      if (leads && node != target_) path_.push_back(node);
      open.pop_back();
    }
    std::reverse(path_.begin(), path_.end());
  }

  const Node* target_;
  std::unordered_map<const Node*, bool> leads_;
  std::vector<Node*> path_;
};

}  // namespace

SplitBackward::SplitBackward(const torch::Tensor& output, const torch::Tensor& gradient,
                             const torch::Tensor& input) {
  const bool wants_input = input.defined() && input.requires_grad();
  if (wants_input && output.grad_fn() && find_forks(output, input)) {
    for (const auto& fork : forks_) {
      fork->node->add_pre_hook(std::make_unique<KeepGradients<Fork>>(fork));
    }
    input_gradient_ = torch::autograd::grad({output}, {input}, {gradient}, /*retain_graph=*/true,
                                            /*create_graph=*/false, /*allow_unused=*/true)
                          .front();
    return;
  }
  forks_.clear();
  if (output.requires_grad()) torch::autograd::backward({output}, {gradient});
  if (wants_input) input_gradient_ = input.grad();
}

bool SplitBackward::find_forks(const torch::Tensor& output, const torch::Tensor& input) {
  const auto target = torch::autograd::impl::gradient_edge(input).function;
  const Graph graph(output.grad_fn().get(), target.get());
  std::unordered_set<Node*> taken;  // weights that belong to a fork
  for (Node* node : graph.path()) {
    std::unordered_set<Node*> weights;
    for (const auto& edge : node->next_edges()) {
      if (edge.is_valid() && !graph.leads_to_input(edge.function.get())) {
        graph.collect_weights(edge.function.get(), weights);
      }
    }
    if (weights.empty()) continue;
    if (compat::has_pre_hooks(*node)) return false;
    auto fork = std::make_shared<Fork>();
    fork->node = node->shared_from_this();
    for (Node* weight : weights) {
      if (!taken.insert(weight).second) return false;
      fork->weights.emplace_back(weight->shared_from_this(), 0);
    }
    forks_.push_back(std::move(fork));
  }
  return !graph.path().empty();
}

void SplitBackward::accumulate_weights() {
  auto& engine = torch::autograd::Engine::get_default_engine();
  for (const auto& fork : forks_) {
    edge_list roots;
    variable_list gradients;
    for (size_t i = 0; i < fork->gradients.size(); ++i) {
      if (!fork->gradients[i].defined()) continue;
      roots.emplace_back(fork->node, static_cast<uint32_t>(i));
      gradients.push_back(fork->gradients[i]);
    }
    if (roots.empty()) continue;
    engine.execute(roots, gradients, /*keep_graph=*/false, /*create_graph=*/false,
                   /*accumulate_grad=*/true, fork->weights);
  }
  forks_.clear();
}

}  // namespace lockstep
