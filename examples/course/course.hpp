#pragma once

// The one include of the course's programs: flags (options.hpp), models (model.hpp), batches
// (batches.hpp), measuring and printing (run.hpp), and what flags mean for the parts of a program
// (below). practical10_hybrid adds hybrid.hpp.

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "course/batches.hpp"
#include "course/model.hpp"
#include "course/options.hpp"
#include "course/run.hpp"
#include "lockstep/device.hpp"
#include "lockstep/distributed_data_parallel.hpp"
#include "lockstep/error.hpp"
#include "lockstep/master_weights.hpp"
#include "lockstep/world.hpp"

namespace course {

/// --devices, --backend and --timeout.
lockstep::WorldOptions world_options(const Options& options, int devices_per_rank = 1);

/// Rank 0 prints the texts of all ranks, by rank: a launcher's console shows rank 0 alone unless
/// told otherwise. Collective.
void print_from_all_ranks(const lockstep::World& world, const Options& options,
                          const std::string& text);

/// Prints "Rank: 0 | Local Rank: 0 | Device: …" of every rank, unless --quiet. Collective.
void print_rank(const lockstep::World& world, const Options& options);

/// Loads --init into the net, if it was given.
void load_initial_weights(torch::nn::Module& net, const Options& options);

/// --optimizer. It updates the masters too, if there are any.
std::unique_ptr<torch::optim::Optimizer> make_optimizer(
    std::vector<torch::Tensor> parameters, const Options& options,
    const std::optional<lockstep::MasterWeights>& masters = std::nullopt);

/// --bucket-mib, --check-replicas, --compress and --nonfinite.
lockstep::DdpOptions ddp_options(const Options& options);
int64_t bucket_cap_bytes(const Options& options);
lockstep::Nonfinite nonfinite_answer(const Options& options);

/// What --amp asks for on a device.
struct Precision {
  bool lower = false;  ///< matrix products run in `dtype`
  torch::ScalarType dtype = torch::kBFloat16;
};

/// Completes options.amp if it was not given. A precision that the device cannot compute with is an
/// Error.
Precision choose_precision(Options& options, const lockstep::Device& device);

/// --master-weights: from here on the net's own weights have the precision that --amp names.
std::optional<lockstep::MasterWeights> make_masters(torch::nn::Module& net, const Options& options);

/// Called on a rank that is about to end with `error`. Flags and files are the same on all ranks,
/// so every rank finds the same mistake in them, and a checkpoint fails on all ranks. Rank 0
/// reports it at once; the others wait a moment, so that the launcher stops them before they repeat
/// it.
void let_rank_0_speak(const lockstep::Error& error);

/// The body of a program that is started once for each rank, for lockstep::run_program.
template <int (*Body)(int argc, char** argv)>
int on_rank(int argc, char** argv) {
  try {
    return Body(argc, argv);
  } catch (const lockstep::Error& error) {
    let_rank_0_speak(error);
    throw;
  }
}

}  // namespace course
