#pragma once

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>
#include <torch/types.h>

#include <string>
#include <vector>

namespace lockstep {

/// Tells `lockstep verify` the names of a module's parameters and buffers. DataParallel,
/// DistributedDataParallel, FullyShardedDataParallel and Pipeline do so themselves; a program that
/// trains a bare module calls it once, before the first step. Outside of `lockstep verify` this and
/// the functions below do nothing.
void verify_model(const torch::nn::Module& module);

/// Gives a parameter its name in the whole model, if a rank's module has it under another. Call it
/// before a wrapper or verify_model() sees the parameter.
void verify_name(const torch::Tensor& parameter, const std::string& name);

/// Records one update. lockstep's optimizers and GradScaler do so themselves. An update of
/// torch::optim is noticed on DistributedDataParallel and DataParallel, without its state and
/// rates; for these, and on other wrappers, a program calls this after step() and before
/// zero_grad().
void verify_step(const torch::optim::Optimizer& optimizer);

/// Records the loss of the last update. RunMeter does so itself.
void verify_loss(const torch::Tensor& loss);

namespace detail {

/// Whether this process runs under `lockstep verify`.
bool is_verified();

/// Records which rows a forward is given; wrappers call it.
void verify_rows(const std::vector<torch::Tensor>& inputs);

}  // namespace detail
}  // namespace lockstep
