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
  const Tensors& parameters(size_t index) const { return replicas_[index].parameters; }
  bool has_buffers() const { return !replicas_[0].buffers.empty(); }

  /// Copies device 0's parameters, buffers and modes into a replica. Runs on that replica's worker.
  void refresh(size_t index);

  /// Refuses a module whose parameters or buffers have changed in number since construction.
  void require_unchanged() const;

  /// Positions in parameters(0) of the distinct ones that want a gradient now.
  std::vector<size_t> trainable() const;

  /// Sums the replicas' gradients of the parameters at `positions`, in device order, onto device 0.
  /// `gradients[i]` holds replica i's, one for each of parameters(i), undefined where it has none.
  Tensors sum_gradients(std::vector<Tensors> gradients, const std::vector<size_t>& positions) const;

 private:
  struct Replica {
    std::shared_ptr<torch::nn::Module> module;
    Tensors parameters;  // in named_parameters() order, shared ones as often as they are named
    Tensors buffers;
  };

  static Replica describe(std::shared_ptr<torch::nn::Module> module);
  std::shared_ptr<torch::nn::Module> make(size_t index,
                                          const ReplicaGroup::MakeReplica& make_replica) const;
  std::shared_ptr<torch::nn::Module> clone_to(torch::Device device) const;
  void require_same_tensors(const Replica& replica) const;
  void require_home() const;
  int64_t collect_parts(size_t replica, Tensors& gradients, std::vector<Tensors>& parts) const;

  Devices devices_;
  std::vector<Replica> replicas_;  // [device]
  std::vector<size_t> owners_;     // [named parameter] -> position of the first name of its tensor
};

}  // namespace lockstep
