#pragma once

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "course/options.hpp"
#include "lockstep/captured_step.hpp"
#include "lockstep/device.hpp"
#include "lockstep/distributed_data_parallel.hpp"
#include "lockstep/master_weights.hpp"
#include "lockstep/world.hpp"

// What flags say about the parts of a program, in the library's words.
namespace course {

/// --optimizer. With masters it updates those too.
std::unique_ptr<torch::optim::Optimizer> make_optimizer(
    std::vector<torch::Tensor> parameters, const Options& options,
    const std::optional<lockstep::MasterWeights>& masters = std::nullopt);

/// Loads --init into the net where it was given.
void load_initial_weights(torch::nn::Module& net, const Options& options);

/// --master-weights: from here on the net's own weights are of the precision that --amp names.
std::optional<lockstep::MasterWeights> make_masters(torch::nn::Module& net, const Options& options);

/// --devices, --backend and --timeout.
lockstep::WorldOptions world_options(const Options& options, int devices_per_rank = 1);

/// --bucket-mib in bytes.
int64_t bucket_cap_bytes(const Options& options);

/// --nonfinite.
lockstep::Nonfinite nonfinite_answer(const Options& options);

/// --bucket-mib, --check-replicas and --compress.
lockstep::DdpOptions ddp_options(const Options& options);

/// --capture. Asking for it where there is no GPU is an Error.
lockstep::CaptureOptions capture_options(const Options& options, const lockstep::Device& device);

/// Why a step on a GPU is not captured, by --capture and the other flags; "" where it is.
std::string why_not_captured(const Options& options);

}  // namespace course
