#pragma once

#include <torch/nn/module.h>

#include <map>
#include <string>

namespace lockstep {

using TensorMap = std::map<std::string, torch::Tensor>;

/// All tensors of a safetensors file, on the CPU.
TensorMap load_tensors(const std::string& path);

/// Writes tensors as safetensors, from any device; the file appears whole or not at all.
void save_tensors(const std::string& path, const TensorMap& tensors,
                  const std::map<std::string, std::string>& metadata = {});

/// Sets every parameter and buffer from a file with exactly those names, shapes and dtypes.
/// Anything that does not fit is an Error, and then the module is untouched.
void load_weights(torch::nn::Module& module, const std::string& path);

/// Writes every parameter and buffer under its name.
void save_weights(const torch::nn::Module& module, const std::string& path);

}  // namespace lockstep
