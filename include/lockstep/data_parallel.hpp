#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "lockstep/detail/tensor_tree.hpp"
#include "lockstep/device.hpp"
#include "lockstep/verify.hpp"

namespace lockstep {

/// The untyped part of DataParallel: runs a step on the replicas. See docs/parallel.md.
class ReplicaGroup {
 public:
  using Tensors = std::vector<torch::Tensor>;
  using MakeReplica = std::function<std::shared_ptr<torch::nn::Module>()>;
  /// What one replica's forward returned: its tensors and their arrangement (structure_of).
  struct Output {
    Tensors tensors;
    std::string structure;
  };
  using Forward = std::function<Output(size_t replica, const Tensors& inputs)>;

  /// Makes one replica for each device after the first, by clone() if `make_replica` is empty.
  ReplicaGroup(std::shared_ptr<torch::nn::Module> module, const Devices& devices,
               const MakeReplica& make_replica);
  ~ReplicaGroup();
  ReplicaGroup(const ReplicaGroup&) = delete;
  ReplicaGroup& operator=(const ReplicaGroup&) = delete;

  /// Replica 0 is the module itself.
  const std::shared_ptr<torch::nn::Module>& replica(size_t index) const;

  /// The parameters of the module, each once.
  Tensors parameters() const;

  /// The rows that each device would get of these inputs. Refuses inputs that cannot be divided.
  std::vector<int64_t> split(const Tensors& inputs) const;

  /// Refreshes the replicas, scatters the inputs, runs `forward` on the devices that get rows and
  /// gathers the outputs on device 0. One autograd node behind them runs the replicas' backwards in
  /// parallel.
  Tensors run(const Tensors& inputs, const Forward& forward);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// Trains one module on several devices of this process, as torch.nn.DataParallel does.
///
///     lockstep::Devices devices("cpu:4");
///     lockstep::UseDevice home(devices[0]);
///     Net net;
///     lockstep::DataParallel parallel(net, devices);
///     auto loss = torch::mse_loss(parallel(x), y);   // divides x by rows and gathers the output
///     loss.backward();                               // sums gradients onto net's parameters
///
/// forward() takes any arguments. Tensors, also inside tuples, vectors and maps, are divided along
/// dimension 0 by torch.chunk's rule; everything else is copied to each replica. It must return
/// tensors, or tuples, vectors or maps of tensors. Scalars are gathered into a vector.
template <class Module>
class DataParallel {
 public:
  /// Replicas are made by clone(), so Module must derive from torch::nn::Cloneable, or by
  /// `make_replica`.
  DataParallel(std::shared_ptr<Module> module, const Devices& devices,
               std::function<std::shared_ptr<Module>()> make_replica = {})
      : group_(module, devices, make_replica) {
    modules_.push_back(std::move(module));
    for (size_t i = 1; i < devices.size(); ++i) {
      modules_.push_back(std::dynamic_pointer_cast<Module>(group_.replica(i)));
    }
  }
  DataParallel(const torch::nn::ModuleHolder<Module>& module, const Devices& devices,
               std::function<std::shared_ptr<Module>()> make_replica = {})
      : DataParallel(module.ptr(), devices, std::move(make_replica)) {}

  template <class... Arguments>
  auto forward(const Arguments&... arguments) {
    using Result = std::decay_t<decltype(modules_[0]->forward(arguments...))>;
    static_assert(
        detail::HoldsOnlyTensors<Result>::value,
        "DataParallel gathers tensors, and tuples, vectors, optionals and maps of tensors");
    if (detail::is_verified()) detail::verify_rows(tensors_of(std::tie(arguments...)));
    if (modules_.size() == 1) return Result(modules_[0]->forward(arguments...));

    const std::tuple<std::decay_t<Arguments>...> packed(arguments...);
    Result result;  // replica 0's; the gathered tensors take its arrangement
    const auto gathered =
        group_.run(tensors_of(packed), [&](size_t replica, const ReplicaGroup::Tensors& inputs) {
          auto mine = packed;
          replace_tensors(mine, inputs);
          auto& module = *modules_[replica];
          auto output =
              std::apply([&](auto&... parts) -> Result { return module.forward(parts...); }, mine);
          ReplicaGroup::Output parts{tensors_of(output), structure_of(output)};
          if (replica == 0) result = std::move(output);
          return parts;
        });
    replace_tensors(result, gathered);
    return result;
  }

  template <class... Arguments>
  auto operator()(const Arguments&... arguments) {
    return forward(arguments...);
  }

  /// The trained module; give its parameters to the optimizer.
  const std::shared_ptr<Module>& module() const { return modules_[0]; }
  /// Its parameters, each once: libtorch's own list has a shared one for each of its owners.
  std::vector<torch::Tensor> parameters() const { return group_.parameters(); }

  /// Calls `visit` with every replica, the module itself first. Plain members are copied only when
  /// replicas are made; use this to change one later in all of them.
  template <class Visit>
  void for_each_replica(Visit&& visit) {
    for (auto& module : modules_) visit(*module);
  }

  /// The rows that each device gets of these arguments, e.g. 22, 22, 20.
  template <class... Arguments>
  std::vector<int64_t> split(const Arguments&... arguments) const {
    return group_.split(tensors_of(std::tuple<const Arguments&...>(arguments...)));
  }

 private:
  ReplicaGroup group_;
  std::vector<std::shared_ptr<Module>> modules_;  // [device]; the first is the user's own
};

template <class Module>
DataParallel(const torch::nn::ModuleHolder<Module>&, const Devices&) -> DataParallel<Module>;

}  // namespace lockstep
