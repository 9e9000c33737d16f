#include "lockstep/script_module.hpp"

#include <torch/types.h>

#include "device/parameter_notes.hpp"

namespace lockstep {

ScriptModuleBase::ScriptModuleBase(torch::jit::Module script)
    : torch::nn::Module("ScriptModule"), script_(std::move(script)) {
  mirror(script_, *this);
  torch::nn::Module::train(script_.is_training());
}

// Names of torch::nn modules have no dots, so the tree of submodules is rebuilt.
void ScriptModuleBase::mirror(const torch::jit::Module& script, torch::nn::Module& module) {
  for (const auto& parameter : script.named_parameters(/*recurse=*/false)) {
    module.register_parameter(parameter.name, parameter.value, parameter.value.requires_grad());
  }
  for (const auto& buffer : script.named_buffers(/*recurse=*/false)) {
    module.register_buffer(buffer.name, buffer.value);
    script_buffers_.push_back({script, buffer.name, buffer.value});
  }
  for (const auto& child : script.named_children()) {
    auto part = std::make_shared<torch::nn::Module>(child.name);
    module.register_module(child.name, part);
    mirror(child.value, *part);
  }
}

void ScriptModuleBase::train(bool on) {
  torch::nn::Module::train(on);
  script_.train(on);
}

torch::jit::IValue ScriptModuleBase::call(std::vector<torch::jit::IValue> inputs) {
  auto result = script_.forward(std::move(inputs));
  // A script may put another tensor in a buffer's place, as BatchNorm does when it counts batches.
  // The one that ranks and replicas know must stay the buffer.
  for (auto& [owner, name, tensor] : script_buffers_) {
    const torch::Tensor now = owner.attr(name).toTensor();
    if (now.is_same(tensor)) continue;
    const torch::NoGradGuard no_grad;
    tensor.copy_(now);
    owner.setattr(name, tensor);
  }
  return result;
}

torch::jit::Module ScriptModuleBase::copy_script() const {
  const torch::NoGradGuard no_grad;  // the copies are leaves
  torch::jit::Module copy = script_.deepcopy();
  const auto mine = script_.named_parameters();
  auto own = mine.begin();
  for (const auto& parameter : copy.named_parameters()) {
    torch::Tensor(parameter.value).set_requires_grad((*own).value.requires_grad());
    ++own;
  }
  return copy;
}

void ScriptModuleBase::save_script(const std::string& path) const {
  require_not_sharded(*this, "ScriptModule::save_script()", "call it inside GatheredParameters");
  script_.save(path);
}

}  // namespace lockstep
