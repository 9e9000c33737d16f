#pragma once

#include <torch/csrc/jit/api/module.h>
#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace lockstep {

/// The untyped part of ScriptModule.
class ScriptModuleBase : public torch::nn::Module {
 public:
  explicit ScriptModuleBase(torch::jit::Module script);

  torch::jit::Module& script() { return script_; }

  /// The module's mode is its submodules' too.
  void train(bool on = true) override;

  /// Writes the script with the weights and buffers that it has now, for torch.jit.load.
  void save_script(const std::string& path) const;

 protected:
  torch::jit::IValue call(std::vector<torch::jit::IValue> inputs);

  /// A copy of the script with tensors of its own.
  torch::jit::Module copy_script() const;

 private:
  // A buffer of the script, and where the script keeps it.
  struct Buffer {
    torch::jit::Module owner;
    std::string name;
    torch::Tensor tensor;
  };

  void mirror(const torch::jit::Module& script, torch::nn::Module& module);

  torch::jit::Module script_;
  std::vector<Buffer> script_buffers_;
};

/// A TorchScript module (torch.jit.script or torch.jit.trace, saved from Python) as a torch::nn
/// module, so that it can be trained in DistributedDataParallel and DataParallel, given to
/// optimizers and saved in a Checkpoint. Parameters and buffers have the script's names and are the
/// script's own tensors.
///
///     auto net = std::make_shared<lockstep::ScriptModule<>>(torch::jit::load("net.pt"));
///     net->to(world.device().torch_device());
///     lockstep::DistributedDataParallel ddp(net, world.comm());
///     ...
///     if (world.rank() == 0) net->save_script("trained.pt");
///
/// `Result` is what the script's forward returns: a tensor, or a tuple, vector or map of tensors.
template <class Result = torch::Tensor>
class ScriptModule : public ScriptModuleBase {
 public:
  explicit ScriptModule(torch::jit::Module script) : ScriptModuleBase(std::move(script)) {}

  template <class... Inputs>
  Result forward(const Inputs&... inputs) {
    return call({torch::jit::IValue(inputs)...}).template to<Result>();
  }

  std::shared_ptr<torch::nn::Module> clone(
      const torch::optional<torch::Device>& device = torch::nullopt) const override {
    auto copy = std::make_shared<ScriptModule>(copy_script());
    copy->train(is_training());
    if (device) copy->to(*device);
    return copy;
  }
};

}  // namespace lockstep
