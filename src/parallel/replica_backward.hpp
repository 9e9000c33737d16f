#pragma once

#include <torch/csrc/autograd/function.h>

#include <memory>
#include <string>
#include <vector>

#include "parallel/replicas.hpp"

namespace lockstep {

/// One replica's way through a forward, with what its backward needs. Outputs themselves are not
/// kept. All edges are those of the forward: what is frozen or thawed later does not change a
/// recorded graph.
struct ReplicaPass {
  torch::autograd::edge_list roots;  // [output]: where its gradient enters this replica's graph
  torch::autograd::edge_list parameters;  // [named parameter]; invalid where no gradient is wanted
  std::vector<torch::Tensor> inputs;      // [input]: this replica's leaf; undefined likewise
  std::vector<int64_t> output_rows;       // [output]; -1 for a scalar

  /// Where this replica's gradients come out: parameters, then inputs that want one.
  torch::autograd::edge_list wanted() const;
};

/// The autograd node behind DataParallel's gathered outputs. Its backward divides the outputs'
/// gradients as the forward gathered them, runs every replica's backward at the same time, sums the
/// parameters' gradients onto device 0 and concatenates the inputs'.
///
/// Note [Backward in parallel]
/// On the CPU autograd runs a whole graph in the thread that asked for it, so each replica's graph
/// is kept apart and run by its own worker. On GPUs autograd has one thread per GPU already, and
/// those threads are busy with this very node: a worker that asked for more would wait for ever.
/// There the node itself asks once, for all replicas, which autograd allows on its own threads; it
/// spreads the work over the GPUs.
class ReplicaBackward : public torch::autograd::Node {
 public:
  using Tensors = std::vector<torch::Tensor>;

  /// `inputs` are the user's; the edges to them and to the trainable parameters are made here.
  ReplicaBackward(std::shared_ptr<Replicas> replicas, std::vector<ReplicaPass> passes,
                  const Tensors& inputs);

  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override;
  std::string name() const override { return "lockstep::DataParallelBackward"; }
  void will_release_variables() override { keep_graph_ = false; }
  void release_variables() override { passes_.clear(); }

 private:
  Tensors slice_gradients(size_t replica, const Tensors& gradients) const;
  std::vector<Tensors> run_on_workers(const Tensors& gradients);
  std::vector<Tensors> run_in_one_call(const Tensors& gradients);
  Tensors find_gradients(const torch::autograd::edge_list& roots, const Tensors& root_gradients,
                         const torch::autograd::edge_list& wanted) const;
  Tensors gather_input_gradients(std::vector<Tensors>& found) const;

  std::shared_ptr<Replicas> replicas_;
  std::vector<ReplicaPass> passes_;           // [replica]; empty once released
  std::vector<size_t> trainable_;             // positions among the named parameters, at forward
  std::vector<torch::Device> input_devices_;  // [input that wants a gradient]
  bool keep_graph_ = true;
};

}  // namespace lockstep
