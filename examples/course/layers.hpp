#pragma once

#include <torch/nn/modules/container/sequential.h>

#include <cstdint>
#include <span>
#include <vector>

#include "course/divided_layers.hpp"
#include "course/model.hpp"
#include "course/options.hpp"
#include "lockstep/communicator.hpp"

namespace course {

/// Refuses a --hidden that cannot be divided over that many ranks, with one that can.
void require_tensor_parallel_sizes(const Options& options, int64_t tensor_parallel);

/// How many layers `Layers` will have with that many ranks of tensor parallelism.
int64_t count_layers(const Options& options, int64_t tensor_parallel);

/// The net that --model names as a list of layers, for a pipeline to cut anywhere.
///
/// On one rank the layers are the net's own modules: training them trains net(). Over several ranks
/// of a tensor axis matrices are divided, and two that belong together (Column, ReLU, Row) are one
/// layer, so that what passes from layer to layer is whole and the same on all ranks of that axis.
class Layers {
 public:
  /// Sets --seed, makes the net and loads --init, so that all ranks begin with the same weights.
  /// `tensor_axis` is Communicator::self() for none. Communicates nothing.
  Layers(const Options& options, const lockstep::Communicator& tensor_axis);

  /// The whole model under its usual names, for --save. What the layers were trained to is in it
  /// after collect().
  const Model& net() const { return net_; }

  const torch::nn::Sequential& layers() const { return layers_; }

  /// For stages that run at the same time in one process: gives each a tensor axis of its own, so
  /// that their calls cannot meet in another order on another rank. Collective over the tensor
  /// axis; nothing to do where that has one rank.
  void separate_stages(std::span<const int64_t> layers_per_stage);

  /// Copies what was trained into net() on every rank: over the tensor axis the parts are put
  /// together, over the pipeline axis the owner of a stage tells the others. place_of_stage is the
  /// schedule's. With a pipeline axis of one rank all stages are here, whatever their places.
  /// Collective over both axes.
  void collect(const lockstep::Communicator& pipeline_axis,
               std::span<const int64_t> layers_per_stage, std::span<const int> place_of_stage);

  /// What the layers of this rank said over the tensor axis so far.
  lockstep::CommStats tensor_traffic() const;

 private:
  void cut_mlp();
  void cut_transformer();
  template <class Layer>
  void add(Layer layer, std::vector<Trained> trained);

  lockstep::Communicator tensor_axis_;
  std::vector<lockstep::Communicator> stage_axes_;  // [stage]; empty: all use tensor_axis_
  Model net_;
  torch::nn::Sequential layers_;
  std::vector<std::vector<Trained>> trained_;  // [layer]
};

}  // namespace course
