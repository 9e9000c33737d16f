#pragma once

#include <fmt/format.h>
#include <torch/nn/module.h>

#include <exception>
#include <future>
#include <memory>
#include <type_traits>
#include <vector>

#include "lockstep/data_parallel.hpp"
#include "lockstep/device.hpp"
#include "lockstep/error.hpp"

namespace lockstep {

/// Tasks of several replicas, which refer to the caller's variables: however the scope is left, all
/// tasks have ended by then.
template <class Result>
class ReplicaTasks {
 public:
  ReplicaTasks() = default;
  ~ReplicaTasks() {
    for (const auto& replica : tasks_) {
      if (replica.valid()) replica.wait();
    }
  }
  ReplicaTasks(const ReplicaTasks&) = delete;
  ReplicaTasks& operator=(const ReplicaTasks&) = delete;

  /// Adds the task of the next replica.
  void add(std::future<Result> replica) { tasks_.push_back(std::move(replica)); }

  /// Waits for all tasks, even if one has failed. Returns their results or throws the first
  /// failure: the message names replica and device, and the original exception is nested. `doing`
  /// is "forward" or the like; `first` is the replica of the first task.
  auto wait(const Devices& devices, const char* doing, size_t first = 0) {
    for (const auto& replica : tasks_) replica.wait();
    std::conditional_t<std::is_void_v<Result>, std::vector<char>, std::vector<Result>> results;
    for (size_t i = 0; i < tasks_.size(); ++i) {
      try {
        if constexpr (std::is_void_v<Result>) {
          tasks_[i].get();
        } else {
          results.push_back(tasks_[i].get());
        }
      } catch (const std::exception& error) {
        std::throw_with_nested(Error(
            Code::kReplicaFailed,
            fmt::format("{} of replica {} on {}: {}", doing, first + i, devices[first + i].name(),
                        describe(error)),
            "the text after the device's name is the module's own error; run the module alone "
            "on that device's rows to find it"));
      }
    }
    return results;
  }

 private:
  std::vector<std::future<Result>> tasks_;
};

/// One module per device. The first is the user's own; the others are copies, which are made once
/// and refreshed from it before every forward.
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

  /// Copies device 0's parameters, buffers and modes to a replica. Runs on that replica's worker.
  void refresh(size_t index);

  /// Refuses a module that has other parameters, or another number of buffers, than at
  /// construction.
  void require_unchanged() const;

  /// The positions in parameters(0) of the distinct ones that require a gradient now.
  std::vector<size_t> trainable() const;

  /// Sums the replicas' gradients of the parameters at `positions`, in device order, onto device 0.
  /// `gradients[i]` holds replica i's, one for each of parameters(i); undefined if it has none.
  Tensors sum_gradients(std::vector<Tensors> gradients, const std::vector<size_t>& positions) const;

 private:
  struct Replica {
    std::shared_ptr<torch::nn::Module> module;
    Tensors parameters;  // in named_parameters() order, a shared one once for each of its names
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
