#include "lockstep/data_parallel.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <unordered_set>

#include "device/stream_order.hpp"
#include "lockstep/error.hpp"
#include "lockstep/split.hpp"
#include "lockstep/tensor_text.hpp"
#include "parallel/replica_backward.hpp"
#include "parallel/replicas.hpp"
#include "parallel/running.hpp"

namespace lockstep {
namespace {

using torch::autograd::Edge;
using torch::autograd::Node;
using torch::autograd::impl::gradient_edge;
using Tensors = ReplicaGroup::Tensors;

// What a replica's worker hands back after forward.
struct ReplicaResult {
  ReplicaGroup::Output output;
  ReplicaPass pass;
  StreamOrder done;
};

// Device `index`'s rows of every input: views on device 0, copies elsewhere. Where the user wants a
// gradient of an input, its piece is a leaf of the replica's own graph.
Tensors scatter(const Tensors& inputs, const std::vector<int64_t>& rows, size_t index,
                const Devices& devices) {
  Device& device = devices[index];
  int64_t begin = 0;
  for (size_t before = 0; before < index; ++before) begin += rows[before];
  Tensors pieces;
  for (const auto& input : inputs) {
    if (!input.defined()) {
      pieces.emplace_back();
      continue;
    }
    torch::Tensor piece;
    {
      const torch::NoGradGuard no_grad;
      piece = input.narrow(0, begin, rows[index]).detach();
      if (index > 0) {
        devices[0].count_traffic_to(device, static_cast<int64_t>(piece.nbytes()));
      }
      keep_for_current_stream(input);
      piece = piece.to(device.torch_device(), /*non_blocking=*/true, /*copy=*/index > 0);
    }
    if (torch::GradMode::is_enabled()) piece.set_requires_grad(input.requires_grad());
    pieces.push_back(piece);
  }
  return pieces;
}

// Outputs number `output` of all replicas, concatenated on device 0.
torch::Tensor gather(const std::vector<ReplicaResult>& results, size_t output,
                     const Devices& devices) {
  const torch::NoGradGuard no_grad;
  Tensors parts;
  for (size_t i = 0; i < results.size(); ++i) {
    if (!results[i].output.tensors[output].defined()) return {};
    torch::Tensor part = results[i].output.tensors[output].detach();
    if (i > 0) devices[i].count_traffic_to(devices[0], static_cast<int64_t>(part.nbytes()));
    if (part.dim() == 0) part = part.unsqueeze(0);
    keep_for_current_stream(part);
    parts.push_back(part.to(devices[0].torch_device(), /*non_blocking=*/true));
  }
  try {
    return torch::cat(parts);
  } catch (const c10::Error&) {
    std::vector<std::string> shapes;
    for (const auto& part : parts) shapes.push_back(shape_text(part.sizes()));
    throw Error(Code::kSplit, "the replicas' outputs cannot be gathered along dimension 0",
                "return tensors whose other dimensions do not depend on the rows",
                {fmt::format("shapes: {}", fmt::join(shapes, " "))});
  }
}

void require_same_structure(const std::vector<ReplicaResult>& results, const Devices& devices) {
  for (size_t i = 1; i < results.size(); ++i) {
    if (results[i].output.structure == results[0].output.structure) continue;
    throw Error(
        Code::kSplit,
        fmt::format("replica {} on {} returned another arrangement of tensors than replica 0", i,
                    devices[i].name()),
        "return the same keys and the same number of tensors from every forward",
        {"replica 0: " + results[0].output.structure,
         fmt::format("replica {}: {}", i, results[i].output.structure)});
  }
}

// What backward needs of one replica's forward.
ReplicaPass pass_of(const Tensors& parameters, const Tensors& pieces, const Tensors& outputs) {
  ReplicaPass pass;
  for (const auto& parameter : parameters) {
    pass.parameters.push_back(parameter.requires_grad() ? gradient_edge(parameter) : Edge());
  }
  for (const auto& piece : pieces) {
    pass.inputs.push_back(piece.defined() && piece.requires_grad() ? piece : torch::Tensor());
  }
  for (const auto& output : outputs) {
    const bool differentiable = output.defined() && output.requires_grad();
    pass.roots.push_back(differentiable ? gradient_edge(output) : Edge());
    pass.output_rows.push_back(!output.defined() ? 0 : output.dim() == 0 ? -1 : output.size(0));
  }
  return pass;
}

// Refuses a graph with leaves that are neither parameters nor arguments: their gradients would be
// lost.
void require_known_leaves(const ReplicaPass& pass) {
  std::unordered_set<const Node*> seen;
  for (const auto& edge : pass.wanted()) seen.insert(edge.function.get());
  std::vector<Node*> todo;
  const auto visit = [&](const Edge& edge) {
    if (edge.is_valid() && seen.insert(edge.function.get()).second) {
      todo.push_back(edge.function.get());
    }
  };
  for (const auto& root : pass.roots) visit(root);
  while (!todo.empty()) {
    Node* node = todo.back();
    todo.pop_back();
    if (const auto* leaf = dynamic_cast<torch::autograd::AccumulateGrad*>(node)) {
      throw Error(Code::kReplicate,
                  fmt::format("forward uses a tensor of shape {} that wants a gradient but is "
                              "neither a parameter nor an argument",
                              shape_text(leaf->variable.sizes())),
                  "register it with register_parameter, or pass it to forward");
    }
    for (const auto& edge : node->next_edges()) visit(edge);
  }
}

}  // namespace

struct ReplicaGroup::State {
  std::shared_ptr<Replicas> replicas;
  bool leaves_known = false;  // a graph of this module has been looked through

  std::vector<StreamOrder> refresh_all(size_t used, const StreamOrder& inputs_ready) const;
  ReplicaResult forward_one(size_t index, const Tensors& inputs, const std::vector<int64_t>& rows,
                            const StreamOrder& inputs_ready, const Forward& forward) const;
  void connect_gradients(Tensors& gathered, std::vector<ReplicaResult>& results,
                         const Tensors& inputs);
};

ReplicaGroup::ReplicaGroup(std::shared_ptr<torch::nn::Module> module, const Devices& devices,
                           const MakeReplica& make_replica)
    : state_(std::make_unique<State>()) {
  if (!module) {
    throw Error(Code::kReplicate, "DataParallel got no module",
                "pass a module, not a null pointer");
  }
  devices.require_not_on_worker("DataParallel");
  state_->replicas = std::make_shared<Replicas>(std::move(module), devices, make_replica);
}

ReplicaGroup::~ReplicaGroup() = default;

const std::shared_ptr<torch::nn::Module>& ReplicaGroup::replica(size_t index) const {
  return state_->replicas->module(index);
}

std::vector<int64_t> ReplicaGroup::split(const Tensors& inputs) const {
  const torch::Tensor* first = nullptr;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!inputs[i].defined()) continue;
    if (inputs[i].dim() == 0) {
      throw Error(
          Code::kSplit,
          fmt::format("tensor {} of DataParallel's arguments is a scalar: it has no rows", i),
          "pass single numbers as C++ numbers; they are copied to every replica");
    }
    if (first == nullptr) first = &inputs[i];
    if (inputs[i].size(0) != first->size(0)) {
      throw Error(Code::kSplit,
                  fmt::format("tensor {} of DataParallel's arguments has {} rows, others have {}",
                              i, inputs[i].size(0), first->size(0)),
                  "give all tensors the same size in dimension 0");
    }
  }
  if (first == nullptr) {
    throw Error(Code::kSplit, "DataParallel got no tensor to divide",
                "pass at least one tensor with rows");
  }
  return chunk_rows(first->size(0), static_cast<int64_t>(state_->replicas->devices().size()));
}

// Before any forward starts, where the module has buffers: replica 0's forward changes them.
std::vector<StreamOrder> ReplicaGroup::State::refresh_all(size_t used,
                                                          const StreamOrder& inputs_ready) const {
  const auto& devices = replicas->devices();
  Running<StreamOrder> running;
  for (size_t i = 1; i < used; ++i) {
    running.add(devices[i].submit("refresh", [&, i] {
      inputs_ready.hold_back(devices[i]);
      replicas->refresh(i);
      return StreamOrder::now(devices[i]);
    }));
  }
  return running.wait(devices, "refresh", /*first=*/1);
}

ReplicaResult ReplicaGroup::State::forward_one(size_t index, const Tensors& inputs,
                                               const std::vector<int64_t>& rows,
                                               const StreamOrder& inputs_ready,
                                               const Forward& forward) const {
  const auto& devices = replicas->devices();
  inputs_ready.hold_back(devices[index]);
  if (!replicas->has_buffers()) replicas->refresh(index);
  const Tensors pieces = scatter(inputs, rows, index, devices);
  ReplicaResult result;
  result.output = forward(index, pieces);
  result.pass = pass_of(replicas->parameters(index), pieces, result.output.tensors);
  if (!leaves_known) require_known_leaves(result.pass);
  result.done = StreamOrder::now(devices[index]);
  return result;
}

// Hangs one node behind all gathered outputs that have a gradient in any replica.
void ReplicaGroup::State::connect_gradients(Tensors& gathered, std::vector<ReplicaResult>& results,
                                            const Tensors& inputs) {
  std::vector<bool> differentiable(gathered.size());
  bool any = false;
  for (const auto& result : results) {
    for (size_t output = 0; output < gathered.size(); ++output) {
      if (result.pass.roots[output].is_valid()) differentiable[output] = any = true;
    }
  }
  if (!any) return;
  leaves_known = true;
  std::vector<ReplicaPass> passes;
  for (auto& result : results) passes.push_back(std::move(result.pass));
  auto node = std::make_shared<ReplicaBackward>(replicas, std::move(passes), inputs);
  for (size_t output = 0; output < gathered.size(); ++output) {
    if (differentiable[output]) {
      torch::autograd::create_gradient_edge(gathered[output], node);
    } else {
      node->add_input_metadata(Node::undefined_input());
    }
  }
}

Tensors ReplicaGroup::run(const Tensors& inputs, const Forward& forward) {
  const auto& devices = state_->replicas->devices();
  devices.require_not_on_worker("DataParallel's forward");
  const auto rows = split(inputs);
  state_->replicas->require_unchanged();

  const auto inputs_ready = StreamOrder::now(devices[0]);
  if (state_->replicas->has_buffers()) {
    const auto refreshed = state_->refresh_all(rows.size(), inputs_ready);
    for (const auto& replica : refreshed) replica.hold_back(devices[0]);
  }
  const auto may_start = StreamOrder::now(devices[0]);

  Running<ReplicaResult> running;
  for (size_t i = 0; i < rows.size(); ++i) {
    running.add(devices[i].submit(
        "forward", [&, i] { return state_->forward_one(i, inputs, rows, may_start, forward); }));
  }
  auto results = running.wait(devices, "forward");
  require_same_structure(results, devices);

  StreamOrder gathered_ready;
  Tensors gathered;
  {
    const UseDevice home(devices[0]);
    for (const auto& result : results) result.done.hold_back(devices[0]);
    for (size_t output = 0; output < results[0].output.tensors.size(); ++output) {
      gathered.push_back(gather(results, output, devices));
    }
    state_->connect_gradients(gathered, results, inputs);
    gathered_ready = StreamOrder::now(devices[0]);
  }
  gathered_ready.hold_back(devices[0]);
  for (const auto& tensor : gathered) keep_for_current_stream(tensor);
  return gathered;
}

}  // namespace lockstep
