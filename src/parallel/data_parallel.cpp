#include "lockstep/data_parallel.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <optional>
#include <unordered_set>

#include "base/counted.hpp"
#include "device/streams.hpp"
#include "gradients/model_sync.hpp"
#include "lockstep/error.hpp"
#include "lockstep/split.hpp"
#include "lockstep/tensor_text.hpp"
#include "optim/optimizer_state.hpp"
#include "parallel/replicas.hpp"
#include "torch_compat.hpp"
#include "verify/step_recorder.hpp"

namespace lockstep {
namespace {

using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Engine;
using torch::autograd::Node;
using torch::autograd::variable_list;
using torch::autograd::impl::gradient_edge;
using Tensors = ReplicaGroup::Tensors;

/// What one replica's backward needs of its forward, without the outputs themselves. All edges are
/// those of the forward: freezing a parameter later does not change a recorded graph.
struct ReplicaPass {
  edge_list roots;                    // [output] where its gradient enters this replica's graph
  edge_list parameters;               // [named parameter]; invalid if it requires no gradient
  std::vector<torch::Tensor> inputs;  // [input] this replica's leaf; undefined likewise
  std::vector<int64_t> output_rows;   // [output]; -1 for a scalar

  /// The edges whose gradients are wanted: parameters, then inputs that require one.
  edge_list wanted() const;
};

/// The autograd node behind DataParallel's gathered outputs. Its backward divides the outputs'
/// gradients as the forward gathered them, runs all replicas' backwards at the same time, sums the
/// parameters' gradients onto device 0 and concatenates those of the inputs.
///
/// Note [Backward in parallel]
/// On the CPU, autograd runs a whole graph in the thread that calls it, so each replica's graph is
/// kept apart and run by the replica's worker. For GPUs, autograd has one thread per GPU, and these
/// threads are busy with this very node: a worker that called autograd would wait forever. So the
/// node itself makes one call for all replicas, which autograd allows on its own threads; it
/// spreads the work over the GPUs.
class ReplicaBackward : public Node {
 public:
  /// Makes the edges to `inputs`, which are the user's, and to the trainable parameters.
  ReplicaBackward(std::shared_ptr<Replicas> replicas, std::vector<ReplicaPass> passes,
                  const Tensors& inputs);

  variable_list apply(variable_list&& gradients) override;
  std::string name() const override { return "lockstep::DataParallelBackward"; }
  void will_release_variables() override { keep_graph_ = false; }
  void release_variables() override { passes_.clear(); }

 private:
  Tensors slice_gradients(size_t replica, const Tensors& gradients) const;
  std::vector<Tensors> run_on_workers(const Tensors& gradients);
  std::vector<Tensors> run_in_one_call(const Tensors& gradients);
  Tensors find_gradients(const edge_list& roots, const Tensors& root_gradients,
                         const edge_list& wanted) const;
  Tensors gather_input_gradients(std::vector<Tensors>& found) const;

  std::shared_ptr<Replicas> replicas_;
  std::vector<ReplicaPass> passes_;           // [replica]; empty once released
  std::vector<size_t> trainable_;             // Replicas::trainable() at forward
  std::vector<torch::Device> input_devices_;  // [input that requires a gradient]
  bool keep_graph_ = true;
};

// The defined roots and gradients: autograd refuses undefined ones.
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
    // Replica 0's leaves are the user's own. Their hooks must see only the sum, which autograd
    // passes on afterwards.
    const compat::HoldTensorHooks hooks(replicas_->parameters(0));
    found = devices.is_cuda() ? run_in_one_call(gradients) : run_on_workers(gradients);
  }
  gradients.clear();

  const Tensors for_inputs = gather_input_gradients(found);
  variable_list result = replicas_->sum_gradients(std::move(found), trainable_);
  result.insert(result.end(), for_inputs.begin(), for_inputs.end());
  return result;
}

// This replica's part of every output's gradient, on the replica's device. Runs on that device.
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
  ReplicaTasks<Tensors> tasks;
  for (size_t replica = 0; replica < passes_.size(); ++replica) {
    tasks.add(replicas_->devices()[replica].submit("backward", [&, replica] {
      Roots roots;
      roots.add(passes_[replica], slice_gradients(replica, gradients));
      return find_gradients(roots.edges, roots.gradients, passes_[replica].wanted());
    }));
  }
  return tasks.wait(replicas_->devices(), "backward");
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

// One gradient for each wanted edge; undefined if the edge is invalid or nothing reached it.
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

// Takes the inputs' gradients off the replicas' lists and concatenates them on device 0.
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

// What a replica's worker returns after forward.
struct ReplicaResult {
  ReplicaGroup::Output output;
  ReplicaPass pass;
  StreamOrder done;
};

// The rows of every input for device `index`: views on device 0, copies elsewhere. If an input
// requires a gradient, its piece is a leaf of the replica's own graph.
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

// Output number `output` of all replicas, concatenated on device 0.
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
                  fmt::format("forward uses a tensor of shape {} that requires a gradient but is "
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
  std::optional<LimitedEmbeddings> limited_embeddings;  // with several devices
  bool leaves_known = false;                            // a graph of this module was checked

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
  if (devices.size() > 1) state_->limited_embeddings.emplace(*replica(0));
}

ReplicaGroup::~ReplicaGroup() = default;

const std::shared_ptr<torch::nn::Module>& ReplicaGroup::replica(size_t index) const {
  return state_->replicas->module(index);
}

Tensors ReplicaGroup::parameters() const {
  return without_repeats(replica(0)->parameters());
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
                  fmt::format("tensor {} of DataParallel's arguments has {}, others have {}", i,
                              counted(inputs[i].size(0), "row"), first->size(0)),
                  "give all tensors the same size in dimension 0");
    }
  }
  if (first == nullptr) {
    throw Error(Code::kSplit, "DataParallel got no tensor to divide",
                "pass at least one tensor with rows");
  }
  return chunk_rows(first->size(0), static_cast<int64_t>(state_->replicas->devices().size()));
}

// If the module has buffers, all refreshes end before any forward: replica 0's forward changes
// them.
std::vector<StreamOrder> ReplicaGroup::State::refresh_all(size_t used,
                                                          const StreamOrder& inputs_ready) const {
  const auto& devices = replicas->devices();
  ReplicaTasks<StreamOrder> tasks;
  for (size_t i = 1; i < used; ++i) {
    tasks.add(devices[i].submit("refresh", [&, i] {
      inputs_ready.hold_back(devices[i]);
      replicas->refresh(i);
      return StreamOrder::now(devices[i]);
    }));
  }
  return tasks.wait(devices, "refresh", /*first=*/1);
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
  {
    const WatchedForward watched(devices[index].torch_device());
    result.output = forward(index, pieces);
  }
  result.pass = pass_of(replicas->parameters(index), pieces, result.output.tensors);
  if (!leaves_known) require_known_leaves(result.pass);
  result.done = StreamOrder::now(devices[index]);
  return result;
}

// Attaches one node to all gathered outputs that have a gradient in any replica.
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
  if (state_->limited_embeddings) state_->limited_embeddings->shorten_rows();

  const auto inputs_ready = StreamOrder::now(devices[0]);
  if (state_->replicas->has_buffers()) {
    const auto refreshed = state_->refresh_all(rows.size(), inputs_ready);
    for (const auto& replica : refreshed) replica.hold_back(devices[0]);
  }
  const auto may_start = StreamOrder::now(devices[0]);

  ReplicaTasks<ReplicaResult> tasks;
  for (size_t i = 0; i < rows.size(); ++i) {
    tasks.add(devices[i].submit(
        "forward", [&, i] { return state_->forward_one(i, inputs, rows, may_start, forward); }));
  }
  auto results = tasks.wait(devices, "forward");
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
