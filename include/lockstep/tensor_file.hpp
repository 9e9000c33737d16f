#pragma once

#include <torch/nn/module.h>

#include <map>
#include <string>

#include "lockstep/fully_sharded_data_parallel.hpp"

namespace lockstep {

using TensorMap = std::map<std::string, torch::Tensor>;

/// Reads all tensors of a safetensors file to the CPU. A file of save_tensors() that was changed
/// since is an Error.
TensorMap load_tensors(const std::string& path);

/// Writes tensors, from any device, as safetensors with a checksum; the file appears complete or
/// not at all.
void save_tensors(const std::string& path, const TensorMap& tensors,
                  const std::map<std::string, std::string>& metadata = {});

/// Sets every parameter and buffer from a file with exactly those names, shapes and dtypes. Throws
/// an Error, and leaves the module unchanged, if anything does not fit.
void load_weights(torch::nn::Module& module, const std::string& path);

/// Writes every parameter and buffer under its name.
void save_weights(const torch::nn::Module& module, const std::string& path);

/// The same for a sharded model, whose first rank writes. Collective.
void save_weights(ShardedModel& model, const std::string& path);
template <class Module>
void save_weights(FullyShardedDataParallel<Module>& fsdp, const std::string& path) {
  save_weights(fsdp.sharded(), path);
}

}  // namespace lockstep
