#pragma once

#include <torch/nn/modules/container/sequential.h>

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "course/model.hpp"
#include "course/options.hpp"
#include "lockstep/communicator.hpp"

namespace course {

/// Refuses a --hidden that cannot be divided over that many ranks, and names one that can.
void require_tensor_parallel_sizes(const Options& options, int64_t tensor_parallel);

/// The number of layers that `Layers` has with that many ranks of tensor parallelism.
int64_t count_layers(const Options& options, int64_t tensor_parallel);

/// The net that --model names as a list of layers, for a pipeline to cut anywhere.
///
/// On one rank the layers are the net's own modules: training them trains net(). Over several ranks
/// of a tensor axis matrices are divided, and two that belong together (Column, ReLU, Row) form one
/// layer, so that every layer's output is whole and the same on all ranks of that axis.
class Layers {
 public:
  /// A parameter of the whole model, what the layer trains of it and, if that is a part, how to put
  /// the parts together.
  struct Trained {
    torch::Tensor whole;
    torch::Tensor own;
    std::function<torch::Tensor()> gather = {};  ///< collective; none: it is trained itself
  };

  /// Sets --seed, makes the net in the host's memory and loads --init, so that all ranks begin with
  /// the same weights. `tensor_axis` is Communicator::self() for none. Does not communicate.
  Layers(const Options& options, const lockstep::Communicator& tensor_axis);

  /// The whole model under its usual names, for --save. It holds the trained weights after
  /// collect().
  const Model& net() const { return net_; }

  const torch::nn::Sequential& layers() const { return layers_; }

  /// For stages that run at the same time in one process: gives each a tensor axis of its own,
  /// since ranks could otherwise call collectives of two stages in different orders. Collective
  /// over the tensor axis; does nothing if that has one rank.
  void separate_stages(std::span<const int64_t> layers_per_stage);

  /// Copies the trained weights into net() on every rank: the parts are gathered over the tensor
  /// axis, and the owner of a stage broadcasts it over the pipeline axis. rank_of_stage is the
  /// schedule's; it is ignored with a pipeline axis of one rank, which has all stages. Collective
  /// over both axes.
  void collect(const lockstep::Communicator& pipeline_axis,
               std::span<const int64_t> layers_per_stage, std::span<const int> rank_of_stage);

  /// What the layers of this rank have sent over the tensor axis so far.
  lockstep::CommStats tensor_traffic() const;

 private:
  void cut_mlp();
  void cut_transformer();
  void name_parameters() const;
  template <class Layer>
  void add(Layer layer, std::vector<Trained> trained);

  lockstep::Communicator tensor_axis_;
  std::vector<lockstep::Communicator> stage_axes_;  // [stage]; empty: all use tensor_axis_
  Model net_;
  torch::nn::Sequential layers_;
  std::vector<std::vector<Trained>> trained_;  // [layer]
};

}  // namespace course
