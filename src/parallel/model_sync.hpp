#pragma once

#include <string>
#include <vector>

#include "lockstep/communicator.hpp"

namespace lockstep {

/// A parameter or buffer under its full name.
struct NamedTensor {
  std::string name;
  torch::Tensor tensor;
  bool trained = false;
};

/// Refuses models that are not the same on all ranks: names, order, shapes, layouts, dtypes and
/// what is trained. kReplicasDiffer on every rank, naming the first difference. Collective.
void require_same_model(const Communicator& comm, const std::vector<NamedTensor>& tensors);

/// The root's values to all ranks. Small tensors travel together. Collective.
void broadcast_tensors(const Communicator& comm, const std::vector<NamedTensor>& tensors, int root,
                       const char* label);

/// Refuses values that differ between ranks, by hash. kReplicasDiffer on every rank, naming the
/// first tensor and the ranks. Collective.
void require_same_values(const Communicator& comm, const std::vector<NamedTensor>& tensors);

/// How far a rank's values are from those of the group's first.
struct Deviation {
  std::string name;      ///< of the tensor
  int rank = 0;          ///< in the world
  double largest = 0;    ///< difference of an element
  double magnitude = 0;  ///< of the first rank's largest element, over all tensors
};

/// The largest deviation of all ranks and tensors, the same answer on every rank. Collective.
Deviation largest_deviation(const Communicator& comm, const std::vector<NamedTensor>& tensors);

}  // namespace lockstep
