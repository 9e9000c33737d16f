#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "course/hybrid.hpp"
#include "course/layers.hpp"
#include "course/precision.hpp"
#include "lockstep/world.hpp"

namespace course {

/// What one row of a batch is at a layer, in bytes.
struct LayerShape {
  int64_t input_bytes = 0;
  int64_t output_bytes = 0;
  int64_t tensor_calls = 0;  ///< over the tensor axis in its forward
  int64_t tensor_bytes = 0;  ///< that this rank sends in them
};

/// A model's layers as stages.
struct ModelCut {
  std::vector<int64_t> layers_per_stage;
  std::vector<LayerShape> layers;
};

/// Cuts the model as --cut says and sends one row through it, without gradients, to see its shapes.
/// `rows` are those of this rank's pipeline in a step. Collective.
ModelCut cut_model(const Options& options, const Layers& model, const lockstep::World& world,
                   const Precision& precision, int64_t rows);

/// What a rank with these stages tells others in one call of Pipeline::step, from shapes alone.
struct ExpectedTraffic {
  int64_t messages = 0;       ///< to other places
  int64_t message_bytes = 0;  ///< of them all: activations forward, gradients backward
  int64_t tensor_bytes = 0;
};
ExpectedTraffic expected_traffic(const HybridPlan& plan, std::span<const LayerShape> layers,
                                 std::span<const int64_t> layers_per_stage,
                                 std::span<const int> local_stages, int64_t rows, bool recompute);

/// Bytes of one row that stage `stage` gives to the next; 0 for the last.
int64_t output_bytes_of(int stage, std::span<const LayerShape> layers,
                        std::span<const int64_t> layers_per_stage);

}  // namespace course
