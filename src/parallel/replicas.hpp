#pragma once

#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/data_parallel.hpp"
#include "lockstep/device.hpp"

namespace lockstep {

/// One module per device that computes what the first one computes. The first is the user's own
/// module; the others are made once and refreshed from it before every forward.
class Replicas {
 public:
  using Tensors = std::vector<torch::Tensor>;

  Replicas(std::shared_ptr<torch::nn::Module> module, const Devices& devices,
           const ReplicaGroup::MakeReplica& make_replica);

  const Devices& devices() const { return devices_; }
  const std::shared_ptr<torch::nn::Module>& module(size_t index) const {
    return replicas_[index].module;
  }

  /// Copies device 0's parameters, buffers and modes into a replica. Runs on that replica's worker.
  void refresh(size_t index);

  /// Refuses a module whose parameters or buffers have changed in number since construction.
  void require_unchanged() const;

  /// The module's distinct parameters that want a gradient now.
  Tensors trainable() const;

  /// Sums the replicas' gradients of trainable(), in device order, onto device 0. `gradients[i]`
  /// holds replica i's, one for each of parameters(i), undefined where it has none.
  Tensors sum_gradients(std::vector<Tensors> gradients) const;

  const Tensors& parameters(size_t index) const { return replicas_[index].parameters; }

 private:
  struct Replica {
    std::shared_ptr<torch::nn::Module> module;
    Tensors parameters;  // in named_parameters() order, shared ones as often as they are named
    Tensors buffers;
  };

  static Replica describe(std::shared_ptr<torch::nn::Module> module);
  std::shared_ptr<torch::nn::Module> make(size_t index,
                                          const ReplicaGroup::MakeReplica& make_replica) const;
  void require_same_tensors(const Replica& replica) const;
  void require_home() const;
  int64_t collect_parts(size_t replica, Tensors& gradients, std::vector<Tensors>& parts) const;

  const Devices& devices_;
  std::vector<Replica> replicas_;  // [device]
  std::vector<size_t>
      owners_;  // [named parameter] -> position of the first name of the same tensor
};

}  // namespace lockstep
