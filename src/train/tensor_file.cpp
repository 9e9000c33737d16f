#include "lockstep/tensor_file.hpp"

#include <fmt/format.h>

#include <span>

#include "base/safetensors.hpp"
#include "device/dtype_map.hpp"
#include "device/parameter_notes.hpp"
#include "lockstep/error.hpp"
#include "lockstep/tensor_text.hpp"

namespace lockstep {
namespace {

Dtype require_dtype(const std::string& name, const torch::Tensor& tensor) {
  if (const auto dtype = lockstep::dtype_of(tensor.scalar_type())) return *dtype;
  throw Error(Code::kTensorMismatch,
              fmt::format("tensor \"{}\" is {}, which safetensors cannot hold", name,
                          dtype_text(tensor.scalar_type())),
              "convert it first, e.g. with .to(torch::kFloat32)");
}

torch::Tensor read_tensor(const SafetensorsReader& file, const TensorInfo& info) {
  torch::Tensor tensor = torch::empty(info.shape, scalar_type_of(info.dtype));
  file.read(info, {static_cast<std::byte*>(tensor.data_ptr()), static_cast<size_t>(info.bytes())});
  return tensor;
}

// Parameters and buffers by name.
TensorMap state_of(const torch::nn::Module& module, const char* what) {
  require_not_sharded(module, what, "call it on every rank inside GatheredParameters");
  TensorMap state;
  for (const auto& item : module.named_parameters()) state[item.key()] = item.value();
  for (const auto& item : module.named_buffers()) state[item.key()] = item.value();
  return state;
}

void require_fit(const std::string& path, const std::string& name, const torch::Tensor& wanted,
                 const TensorInfo* info) {
  if (info == nullptr) {
    throw Error(Code::kTensorMismatch, fmt::format("{} has no tensor \"{}\"", path, name),
                "save it from a model of the same shape");
  }
  const auto scalar_type = scalar_type_of(info->dtype);
  if (wanted.sizes() == torch::IntArrayRef(info->shape) && wanted.scalar_type() == scalar_type)
    return;
  throw Error(Code::kTensorMismatch,
              fmt::format("tensor \"{}\" of {} is {} {}, the model's is {} {}", name, path,
                          dtype_text(scalar_type), shape_text(info->shape),
                          dtype_text(wanted.scalar_type()), shape_text(wanted.sizes())),
              "save it from a model with the same sizes and dtype");
}

}  // namespace

TensorMap load_tensors(const std::string& path) {
  const SafetensorsReader file(path);
  file.verify();
  TensorMap tensors;
  for (const auto& info : file.tensors()) tensors.emplace(info.name, read_tensor(file, info));
  return tensors;
}

void save_tensors(const std::string& path, const TensorMap& tensors,
                  const std::map<std::string, std::string>& metadata) {
  std::vector<torch::Tensor> held;  // contiguous on the CPU; copies where the originals are not
  std::vector<TensorBytes> parts;
  for (const auto& [name, tensor] : tensors) {
    held.push_back(tensor.detach().to(torch::kCPU).contiguous());
    const auto& flat = held.back();
    parts.push_back({name, require_dtype(name, flat), flat.sizes().vec(),
                     std::span(static_cast<const std::byte*>(flat.data_ptr()), flat.nbytes())});
  }
  write_safetensors(path, std::move(parts), metadata, FileChecksum::kOwn);
}

void load_weights(torch::nn::Module& module, const std::string& path) {
  const SafetensorsReader file(path);
  const TensorMap state = state_of(module, "load_weights()");
  for (const auto& [name, tensor] : state) require_fit(path, name, tensor, file.find(name));
  for (const auto& info : file.tensors()) {
    if (state.count(info.name) != 0) continue;
    throw Error(Code::kTensorMismatch,
                fmt::format("{} has a tensor \"{}\" that the model does not", path, info.name),
                "save it from a model of the same shape");
  }
  file.verify();
  TensorMap loaded;  // everything is read before anything is changed
  for (const auto& info : file.tensors()) loaded.emplace(info.name, read_tensor(file, info));
  const torch::NoGradGuard no_grad;
  for (const auto& [name, tensor] : loaded) torch::Tensor(state.at(name)).copy_(tensor);
}

void save_weights(const torch::nn::Module& module, const std::string& path) {
  save_tensors(path, state_of(module, "save_weights()"), {{"format", "pt"}});
}

void save_weights(ShardedModel& model, const std::string& path) {
  const GatheredParameters gathered(model);
  if (model.comm().rank() == 0) save_weights(*model.module(), path);
}

}  // namespace lockstep
