#pragma once

#include <torch/nn/module.h>

#include <string>
#include <vector>

#include "gradients/trained_parameters.hpp"
#include "lockstep/communicator.hpp"

namespace lockstep {

/// A parameter or buffer with its full name.
struct NamedTensor {
  std::string name;
  torch::Tensor tensor;
  bool trained = false;
};

std::vector<NamedTensor> buffers_of(const torch::nn::Module& module);

/// Parameters, then buffers, in the order in which the module registered them.
std::vector<NamedTensor> model_tensors(const torch::nn::Module& module);

/// The trained parameters in full precision: the float32 weight stands for a parameter that
/// MasterWeights hold.
std::vector<NamedTensor> trained_in_full_precision(const torch::nn::Module& module);

/// Refuses models that are not the same on all ranks: names, order, shapes, layouts, dtypes and
/// what is trained. Throws kReplicasDiffer on every rank, naming the first difference. Collective.
void require_same_model(const Communicator& comm, const std::vector<NamedTensor>& tensors);

/// Sends the root's values to all ranks, small tensors together. Collective.
void broadcast_tensors(const Communicator& comm, const std::vector<NamedTensor>& tensors, int root,
                       const char* label);

/// Sends the root's parameters and buffers to all ranks. Where MasterWeights hold a parameter, its
/// float32 weight is sent and the parameter rounded from it: otherwise the ranks would agree only
/// on the rounded weights and drift apart at the first update. Collective.
void broadcast_model(const Communicator& comm, const torch::nn::Module& module, int root,
                     const char* label);

/// Refuses values that differ between ranks, by hash. Throws kReplicasDiffer on every rank, naming
/// the first tensor and the ranks. Collective.
void require_same_values(const Communicator& comm, const std::vector<NamedTensor>& tensors);

/// How far a rank's values are from those of the group's first rank.
struct Deviation {
  std::string name;      ///< of the tensor
  int rank = 0;          ///< in the world
  double largest = 0;    ///< difference of an element
  double magnitude = 0;  ///< of the first rank's largest element, over all tensors
};

/// The largest deviation over all ranks and tensors; every rank gets the same answer. Collective.
Deviation largest_deviation(const Communicator& comm, const std::vector<NamedTensor>& tensors);

/// The embeddings of a module with a max_norm.
///
/// Note [Limited embeddings] Embedding(max_norm) shortens the rows that a forward looks up, in
/// place. On each rank these would be other rows, and replicas would drift apart, as they do in
/// PyTorch; a replica of DataParallel would shorten its copy. So all rows are shortened before
/// every forward, on all ranks alike: the lookup then finds nothing to do. A row is as long when it
/// is looked up as it would be in one process.
class LimitedEmbeddings {
 public:
  explicit LimitedEmbeddings(const torch::nn::Module& module);
  bool empty() const { return tables_.empty(); }
  const std::string& first() const { return tables_.front().name; }  ///< its name
  void shorten_rows() const;

 private:
  struct Table {
    std::string name;
    torch::Tensor weight;
    double max_norm;
    double norm_type;
  };
  std::vector<Table> tables_;
};

/// Calls a collective that the other ranks do not: what `lockstep run --inject mismatch` asks for.
void call_mismatch(const Communicator& comm);

/// Provokes in this rank's gradients, which are about to be averaged, what `lockstep run --inject`
/// asks for.
void inject_faults(const Communicator& comm, const torch::Tensor& gradients);

}  // namespace lockstep
