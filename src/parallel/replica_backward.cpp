#include "parallel/replica_backward.hpp"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/variable.h>

#include "device/stream_order.hpp"
#include "lockstep/error.hpp"
#include "parallel/running.hpp"
#include "torch_compat.hpp"

namespace lockstep {
namespace {

using torch::autograd::edge_list;
using torch::autograd::Engine;
using torch::autograd::variable_list;
using torch::autograd::impl::gradient_edge;
using Tensors = ReplicaBackward::Tensors;

// The roots and gradients that take part: autograd refuses undefined ones.
struct Roots {
  edge_list edges;
  Tensors gradients;

  void add(const ReplicaPass& pass, const Tensors& slices) {
    for (size_t output = 0; output < slices.size(); ++output) {
      if (!slices[output].defined()) continue;
      edges.push_back(pass.roots[output]);
      gradients.push_back(slices[output]);
    }
  }
};

}  // namespace

edge_list ReplicaPass::wanted() const {
  edge_list edges = parameters;
  for (const auto& input : inputs) {
    if (input.defined()) edges.push_back(gradient_edge(input));
  }
  return edges;
}

ReplicaBackward::ReplicaBackward(std::shared_ptr<Replicas> replicas,
                                 std::vector<ReplicaPass> passes, const Tensors& inputs)
    : replicas_(std::move(replicas)),
      passes_(std::move(passes)),
      trainable_(replicas_->trainable()) {
  edge_list edges;
  for (const size_t position : trainable_) {
    edges.push_back(gradient_edge(replicas_->parameters(0)[position]));
  }
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!passes_[0].inputs[i].defined()) continue;
    edges.push_back(gradient_edge(inputs[i]));
    input_devices_.push_back(inputs[i].device());
  }
  set_next_edges(std::move(edges));
}

variable_list ReplicaBackward::apply(variable_list&& gradients) {
  if (torch::GradMode::is_enabled()) {
    throw Error(Code::kEngine, "DataParallel cannot be differentiated twice (create_graph = true)",
                "call the module itself for the part that needs second derivatives");
  }
  if (passes_.empty()) {
    throw Error(Code::kEngine, "backward a second time through the same DataParallel forward",
                "pass retain_graph = true to the first backward");
  }
  const auto& devices = replicas_->devices();
  if (!devices.is_cuda()) devices.require_not_on_worker("DataParallel's backward");

  const UseDevice home(devices[0]);
  std::vector<Tensors> found;
  {
    // Replica 0's leaves are the user's own; their hooks are for the sum, which autograd hands on.
    const compat::HoldTensorHooks hooks(replicas_->parameters(0));
    found = devices.is_cuda() ? run_in_one_call(gradients) : run_on_workers(gradients);
  }
  gradients.clear();

  const Tensors for_inputs = gather_input_gradients(found);
  variable_list result = replicas_->sum_gradients(std::move(found), trainable_);
  result.insert(result.end(), for_inputs.begin(), for_inputs.end());
  return result;
}

// This replica's part of every output's gradient, on its own device. Runs on that device.
Tensors ReplicaBackward::slice_gradients(size_t replica, const Tensors& gradients) const {
  const torch::NoGradGuard no_grad;
  Device& home = replicas_->devices()[0];
  Device& device = replicas_->devices()[replica];
  Tensors slices(gradients.size());
  for (size_t output = 0; output < gradients.size(); ++output) {
    if (!gradients[output].defined() || !passes_[replica].roots[output].is_valid()) continue;
    const int64_t rows = passes_[replica].output_rows[output];
    if (rows < 0) {
      slices[output] = gradients[output].select(0, static_cast<int64_t>(replica));
    } else {
      int64_t begin = 0;
      for (size_t before = 0; before < replica; ++before) {
        begin += passes_[before].output_rows[output];
      }
      slices[output] = gradients[output].narrow(0, begin, rows);
    }
    if (replica == 0) continue;
    home.count_traffic_to(device, static_cast<int64_t>(slices[output].nbytes()));
    keep_for_current_stream(gradients[output]);
    slices[output] = slices[output].to(device.torch_device(), /*non_blocking=*/true, /*copy=*/true);
  }
  return slices;
}

std::vector<Tensors> ReplicaBackward::run_on_workers(const Tensors& gradients) {
  Running<Tensors> running;
  for (size_t replica = 0; replica < passes_.size(); ++replica) {
    running.add(replicas_->devices()[replica].submit("backward", [&, replica] {
      Roots roots;
      roots.add(passes_[replica], slice_gradients(replica, gradients));
      return find_gradients(roots.edges, roots.gradients, passes_[replica].wanted());
    }));
  }
  return running.wait(replicas_->devices(), "backward");
}

std::vector<Tensors> ReplicaBackward::run_in_one_call(const Tensors& gradients) {
  Roots roots;
  edge_list wanted;
  const auto gradients_ready = StreamOrder::now(replicas_->devices()[0]);
  for (size_t replica = 0; replica < passes_.size(); ++replica) {
    const UseDevice device(replicas_->devices()[replica]);
    gradients_ready.hold_back(replicas_->devices()[replica]);
    roots.add(passes_[replica], slice_gradients(replica, gradients));
    const edge_list mine = passes_[replica].wanted();
    wanted.insert(wanted.end(), mine.begin(), mine.end());
  }
  const Tensors all = find_gradients(roots.edges, roots.gradients, wanted);
  std::vector<Tensors> found;
  const auto each = static_cast<long>(wanted.size() / passes_.size());
  for (auto begin = all.begin(); begin != all.end(); begin += each) {
    found.emplace_back(begin, begin + each);
  }
  return found;
}

// One gradient for each wanted edge; undefined where the edge is invalid or nothing reached it.
Tensors ReplicaBackward::find_gradients(const edge_list& roots, const Tensors& root_gradients,
                                        const edge_list& wanted) const {
  edge_list valid;
  for (const auto& edge : wanted) {
    if (edge.is_valid()) valid.push_back(edge);
  }
  Tensors found(wanted.size());
  if (roots.empty() || valid.empty()) return found;
  Tensors given = Engine::get_default_engine().execute(roots, root_gradients, keep_graph_,
                                                       /*create_graph=*/false,
                                                       /*accumulate_grad=*/false, valid);
  auto next = given.begin();
  for (size_t i = 0; i < wanted.size(); ++i) {
    if (wanted[i].is_valid()) found[i] = std::move(*next++);
  }
  return found;
}

// Takes the inputs' gradients off the ends of the replicas' lists and concatenates them on device
// 0.
Tensors ReplicaBackward::gather_input_gradients(std::vector<Tensors>& found) const {
  const torch::NoGradGuard no_grad;
  const auto& devices = replicas_->devices();
  const size_t parameters = replicas_->parameters(0).size();
  Tensors gathered;
  for (size_t i = 0; i < passes_[0].inputs.size(); ++i) {
    if (!passes_[0].inputs[i].defined()) continue;
    Tensors parts;
    bool any = false;
    for (size_t replica = 0; replica < found.size(); ++replica) {
      torch::Tensor part = found[replica][parameters + gathered.size()];
      any = any || part.defined();
      if (!part.defined()) part = torch::zeros_like(passes_[replica].inputs[i]);
      if (replica > 0) {
        devices[replica].count_traffic_to(devices[0], static_cast<int64_t>(part.nbytes()));
      }
      keep_for_current_stream(part);
      parts.push_back(part.to(devices[0].torch_device()));
    }
    gathered.push_back(any ? torch::cat(parts).to(input_devices_[gathered.size()])
                           : torch::Tensor());
  }
  for (auto& gradients : found) gradients.resize(parameters);
  return gathered;
}

}  // namespace lockstep
