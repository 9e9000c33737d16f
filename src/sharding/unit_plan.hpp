#pragma once

#include <torch/nn/module.h>
#include <torch/types.h>

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/fully_sharded_data_parallel.hpp"

namespace lockstep {

/// A parameter of a unit, and what this rank has of it.
struct UnitParameter {
  std::string name;
  torch::Tensor whole;       ///< the module's own tensor
  int64_t offset = 0;        ///< of its first element in the unit
  int64_t first = 0;         ///< first element of the parameter that this rank has
  int64_t count = 0;         ///< of its elements; 0: none
  int64_t at = 0;            ///< of them in this rank's shard of the unit
  torch::Tensor shard = {};  ///< these elements, as a leaf tensor; made with the unit's memory
  torch::Tensor home = {};   ///< where `whole` lies in the unit's memory
};

/// Parameters that are gathered and averaged together: of one dtype and device, all trained or
/// none. Their elements follow each other in one flat tensor, which is divided evenly over the
/// ranks.
///
/// Each parameter starts at a multiple of 64 bytes, as in a model that is not divided, so that
/// products over it run at the same speed. So does each rank's shard.
struct UnitPlan {
  std::string name;
  size_t group = 0;  ///< units of one group differ in dtype or training only, and are used together
  bool trained = true;
  std::vector<UnitParameter> parameters;
  int64_t elements = 0;        ///< of the flat tensor
  int64_t shard_elements = 0;  ///< of one rank
  torch::TensorOptions options;

  int64_t bytes() const { return elements * static_cast<int64_t>(options.dtype().itemsize()); }
};

/// Divides a module's parameters into units, in the order of their registration, each parameter
/// once. Stages 1 and 2 leave out parameters that are not trained.
std::vector<UnitPlan> plan_units(const torch::nn::Module& module, const ShardOptions& options,
                                 int rank, int ranks);

}  // namespace lockstep
