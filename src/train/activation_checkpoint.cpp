#include "lockstep/activation_checkpoint.hpp"

#include <ATen/SequenceNumber.h>
#include <ATen/autocast_mode.h>
#include <ATen/record_function.h>
#include <c10/util/Type.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <typeindex>
#include <unordered_set>

#include "base/counted.hpp"
#include "device/capture.hpp"
#include "device/rng.hpp"
#include "lockstep/device.hpp"
#include "lockstep/error.hpp"
#include "lockstep/tensor_text.hpp"
#include "torch_compat.hpp"

// Note [Checkpointed functions in the graph]
// PyTorch's reentrant variant hides the function's parameters: their gradients come from a backward
// of their own inside the outer one, which DistributedDataParallel, DataParallel and split
// backwards of a pipeline would have to know about. Here the first call runs with grad mode, so
// that its graph shows which parameters it reaches; then the graph is dropped, and one node takes
// its place that has edges to the inputs and to those parameters. To everybody else it is an
// operation like any other. The peak of memory is the same: the last function's activations exist
// in its forward, and those of each in its backward.

namespace lockstep::detail {
namespace {

using torch::autograd::AccumulateGrad;
using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Engine;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
using torch::autograd::impl::gradient_edge;
using Tensors = std::vector<torch::Tensor>;

// Autocast of the calling thread, for both kinds of devices.
struct AutocastModes {
  compat::AutocastSwitch cpu = compat::AutocastSwitch::get(at::kCPU);
  compat::AutocastSwitch cuda = compat::AutocastSwitch::get(at::kCUDA);

  void set() const {
    cpu.set(at::kCPU);
    cuda.set(at::kCUDA);
  }
};

// Guard: runs the function under these modes, without autocast's cache of weights. A cast that an
// earlier operation has cached belongs to that operation's graph, and would not be there in
// backward.
class UnderAutocast {
 public:
  explicit UnderAutocast(const AutocastModes& modes)
      : cache_before_(at::autocast::is_autocast_cache_enabled()) {
    modes.set();
    at::autocast::set_autocast_cache_enabled(false);
    at::autocast::increment_nesting();
  }
  ~UnderAutocast() {
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    at::autocast::set_autocast_cache_enabled(cache_before_);
    before_.set();
  }
  UnderAutocast(const UnderAutocast&) = delete;
  UnderAutocast& operator=(const UnderAutocast&) = delete;

 private:
  AutocastModes before_;
  bool cache_before_;
};

// The graph that one call of the function made.
struct CallGraph {
  std::vector<std::type_index> operations;  // in the order of a walk from the outputs
  Tensors parameters;                       // the leaves that are not inputs
};

// Whether this thread has made the node since its next one had this number.
bool is_made_since(const Node& node, uint64_t first) {
  return node.thread_id() == at::RecordFunction::currentThreadId() && node.sequence_nr() >= first;
}

CallGraph walk(const Tensors& outputs, const Tensors& leaves, uint64_t first_node) {
  std::unordered_set<const c10::TensorImpl*> inputs;
  for (const auto& leaf : leaves) inputs.insert(leaf.unsafeGetTensorImpl());
  CallGraph graph;
  std::unordered_set<Node*> seen;
  std::vector<Node*> waiting;
  const auto visit = [&](const Edge& edge) {
    if (edge.is_valid() && seen.insert(edge.function.get()).second) {
      waiting.push_back(edge.function.get());
    }
  };
  for (const auto& output : outputs) {
    if (output.defined() && output.requires_grad()) visit(gradient_edge(output));
  }
  while (!waiting.empty()) {
    Node* node = waiting.back();
    waiting.pop_back();
    if (const auto* leaf = dynamic_cast<AccumulateGrad*>(node)) {
      if (!inputs.contains(leaf->variable.unsafeGetTensorImpl())) {
        graph.parameters.push_back(leaf->variable);
      }
      continue;
    }
    if (!is_made_since(*node, first_node)) {
      throw Error(
          Code::kUsage,
          fmt::format("a function under checkpoint_activations uses a result of {} that was "
                      "computed outside and requires a gradient",
                      node->name()),
          "pass that tensor as an argument, or detach() it");
    }
    graph.operations.emplace_back(typeid(*node));
    for (const auto& edge : node->next_edges()) visit(edge);
  }
  return graph;
}

// What the second call must repeat.
struct CallFacts {
  CallFacts(const CheckpointedOutput& output, CallGraph made)
      : structure(output.structure), graph(std::move(made)) {
    for (const auto& tensor : output.tensors) {
      outputs.push_back(tensor.defined() ? fmt::format("{} {}{}", dtype_text(tensor.scalar_type()),
                                                       shape_text(tensor.sizes()),
                                                       tensor.requires_grad() ? "" : ", detached")
                                         : "none");
    }
  }

  std::string structure;
  std::vector<std::string> outputs;
  CallGraph graph;
};

[[noreturn]] void refuse_difference(const std::string& what, const std::string& first,
                                    const std::string& second) {
  throw Error(
      Code::kTensorMismatch,
      fmt::format("a function under checkpoint_activations did not repeat in backward what "
                  "it did in forward: {} was {} and is {}",
                  what, first, second),
      "let it depend on nothing but its inputs, parameters and random numbers; what changes "
      "between forward and backward must be an argument");
}

void require_repeated(const CallFacts& first, const CallFacts& second) {
  if (first.structure != second.structure) {
    refuse_difference("its result", first.structure, second.structure);
  }
  for (size_t i = 0; i < first.outputs.size(); ++i) {
    if (first.outputs[i] == second.outputs[i]) continue;
    refuse_difference(fmt::format("output {}", i), first.outputs[i], second.outputs[i]);
  }
  const auto& before = first.graph.operations;
  const auto& after = second.graph.operations;
  for (size_t i = 0; i < std::min(before.size(), after.size()); ++i) {
    if (before[i] == after[i]) continue;
    refuse_difference(fmt::format("operation {}, counted from the outputs,", i),
                      c10::demangle(before[i].name()), c10::demangle(after[i].name()));
  }
  if (before.size() != after.size()) {
    refuse_difference("the number of operations", std::to_string(before.size()),
                      std::to_string(after.size()));
  }
  const auto same = [](const torch::Tensor& a, const torch::Tensor& b) { return a.is_same(b); };
  if (!std::equal(first.graph.parameters.begin(), first.graph.parameters.end(),
                  second.graph.parameters.begin(), second.graph.parameters.end(), same)) {
    refuse_difference("the set of its parameters", counted(first.graph.parameters.size(), "tensor"),
                      "another one");
  }
}

// Leaves of the function's own graph, which share the inputs' memory and versions.
Tensors as_leaves(const Tensors& inputs) {
  Tensors leaves;
  for (const auto& input : inputs) {
    leaves.push_back(input.defined() ? input.detach() : torch::Tensor());
    if (input.defined() && input.requires_grad()) leaves.back().set_requires_grad(true);
  }
  return leaves;
}

std::optional<c10::Device> gpu_of(const Tensors& inputs) {
  for (const auto& input : inputs) {
    if (input.defined() && input.is_cuda()) return input.device();
  }
  const Device* device = current_device();
  if (device != nullptr && device->torch_device().is_cuda()) return device->torch_device();
  return std::nullopt;
}

std::vector<int64_t> versions_of(const Tensors& tensors) {
  std::vector<int64_t> versions;
  for (const auto& tensor : tensors) {
    const bool counts = tensor.defined() && !tensor.is_inference();
    versions.push_back(counts ? static_cast<int64_t>(tensor._version()) : 0);
  }
  return versions;
}

class RecomputeBackward : public Node {
 public:
  RecomputeBackward(const Tensors& inputs, CheckpointedCall again, CallFacts facts,
                    RecordedRng random, const AutocastModes& autocast);

  variable_list apply(variable_list&& gradients) override;
  std::string name() const override { return "lockstep::RecomputeBackward"; }
  void release_variables() override;

 private:
  Tensors saved_inputs();
  variable_list find_gradients(const Tensors& outputs, const Tensors& leaves,
                               const variable_list& gradients);

  std::vector<SavedVariable> inputs_;  // notices changes in place
  std::vector<bool> requires_grad_;    // [input]
  CheckpointedCall again_;             // empty once released
  CallFacts facts_;
  RecordedRng random_;
  AutocastModes autocast_;
};

RecomputeBackward::RecomputeBackward(const Tensors& inputs, CheckpointedCall again, CallFacts facts,
                                     RecordedRng random, const AutocastModes& autocast)
    : again_(std::move(again)),
      facts_(std::move(facts)),
      random_(std::move(random)),
      autocast_(autocast) {
  edge_list edges;
  for (const auto& input : inputs) {
    inputs_.emplace_back(input, /*is_output=*/false);
    requires_grad_.push_back(input.defined() && input.requires_grad());
    if (requires_grad_.back()) edges.push_back(gradient_edge(input));
  }
  for (const auto& parameter : facts_.graph.parameters) edges.push_back(gradient_edge(parameter));
  set_next_edges(std::move(edges));
}

void RecomputeBackward::release_variables() {
  inputs_.clear();
  again_ = nullptr;
}

Tensors RecomputeBackward::saved_inputs() {
  Tensors inputs;
  for (const auto& saved : inputs_) inputs.push_back(saved.unpack());
  return inputs;
}

variable_list RecomputeBackward::apply(variable_list&& gradients) {
  if (torch::GradMode::is_enabled()) {
    throw Error(Code::kEngine,
                "checkpoint_activations cannot be differentiated twice (create_graph = true)",
                "call the function itself for the part that needs second derivatives");
  }
  if (!again_) {
    throw Error(Code::kEngine, "backward a second time through the same checkpoint_activations",
                "pass retain_graph = true to the first backward");
  }
  const Tensors leaves = as_leaves(saved_inputs());
  Tensors outputs;
  {
    const torch::AutoGradMode grad_mode(true);
    const UnderAutocast modes(autocast_);
    const RecordedRng::Replay random(random_);
    const RepeatableScope scope;
    const uint64_t first_node = at::sequence_number::peek();
    CheckpointedOutput output = again_(leaves);
    require_repeated(facts_, CallFacts(output, walk(output.tensors, leaves, first_node)));
    outputs = std::move(output.tensors);
  }
  return find_gradients(outputs, leaves, gradients);
}

// One gradient for each edge that this backward wants; undefined where nothing reached it.
variable_list RecomputeBackward::find_gradients(const Tensors& outputs, const Tensors& leaves,
                                                const variable_list& gradients) {
  edge_list roots;
  variable_list root_gradients;
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (!gradients[i].defined() || !outputs[i].requires_grad()) continue;
    roots.push_back(gradient_edge(outputs[i]));
    root_gradients.push_back(gradients[i]);
  }
  edge_list all;
  for (size_t i = 0; i < leaves.size(); ++i) {
    if (requires_grad_[i]) all.push_back(gradient_edge(leaves[i]));
  }
  for (const auto& parameter : facts_.graph.parameters) all.push_back(gradient_edge(parameter));
  edge_list wanted;
  for (size_t i = 0; i < all.size(); ++i) {
    if (task_should_compute_output(i)) wanted.push_back(all[i]);
  }
  variable_list found(all.size());
  if (roots.empty() || wanted.empty()) return found;
  // Hooks of the parameters see the gradient once, where the outer backward passes it on.
  const compat::HoldTensorHooks hooks(facts_.graph.parameters);
  auto given = Engine::get_default_engine().execute(roots, root_gradients, /*keep_graph=*/false,
                                                    /*create_graph=*/false,
                                                    /*accumulate_grad=*/false, wanted);
  auto next = given.begin();
  for (size_t i = 0; i < all.size(); ++i) {
    if (task_should_compute_output(i)) found[i] = std::move(*next++);
  }
  return found;
}

}  // namespace

Tensors run_checkpointed(const Tensors& inputs, const CheckpointedCall& first,
                         CheckpointedCall again) {
  const auto gpu = gpu_of(inputs);
  if (gpu) {
    require_not_capturing("checkpoint_activations on a GPU, which records random numbers,",
                          "run the step without capture, or without checkpointing");
  }
  const Tensors leaves = as_leaves(inputs);
  const auto versions = versions_of(leaves);
  RecordedRng random(gpu);
  const AutocastModes autocast;
  std::optional<CallFacts> facts;
  Tensors outputs;
  {
    const UnderAutocast modes(autocast);
    const RepeatableScope scope;
    const uint64_t first_node = at::sequence_number::peek();
    CheckpointedOutput output = first(leaves);
    facts.emplace(output, walk(output.tensors, leaves, first_node));
    outputs = std::move(output.tensors);
  }
  if (versions_of(leaves) != versions) {
    throw Error(Code::kUsage, "a function under checkpoint_activations changed an input in place",
                "let its first operation make a new tensor: backward needs the input as it was");
  }
  const auto differentiable = [](const torch::Tensor& output) {
    return output.defined() && output.requires_grad();
  };
  if (std::none_of(outputs.begin(), outputs.end(), differentiable)) return outputs;
  const auto node = std::make_shared<RecomputeBackward>(inputs, std::move(again), *std::move(facts),
                                                        random, autocast);
  Tensors connected;
  for (const auto& output : outputs) {
    connected.push_back(output.defined() ? output.detach() : output);
    if (differentiable(output)) {
      torch::autograd::create_gradient_edge(connected.back(), node);
    } else {
      node->add_input_metadata(Node::undefined_input());
    }
  }
  return connected;
}

}  // namespace lockstep::detail
