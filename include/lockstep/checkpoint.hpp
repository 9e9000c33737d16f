#pragma once

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/schedulers/lr_scheduler.h>
#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "lockstep/communicator.hpp"
#include "lockstep/device.hpp"
#include "lockstep/distributed_sampler.hpp"
#include "lockstep/fully_sharded_data_parallel.hpp"
#include "lockstep/grad_scaler.hpp"
#include "lockstep/lr_schedule.hpp"
#include "lockstep/master_weights.hpp"
#include "lockstep/pipeline.hpp"
#include "lockstep/weight_average.hpp"

namespace lockstep {

/// Exit code of a program that was asked to stop, saved a checkpoint and can be started again.
inline constexpr int kExitPreempted = 75;

/// When a Checkpoint saves, and how many it keeps.
struct CheckpointOptions {
  int64_t every = 0;  ///< step() saves after each multiple of this; 0: only save() does
  int keep = 3;       ///< how many checkpoints the folder keeps

  /// true: a save returns when everything is copied, and a thread writes the files.
  bool asynchronous = true;

  /// With `every`: SIGTERM or SIGUSR1 on any rank makes step() save on all ranks after the same
  /// step and return false. A second signal has its usual effect.
  bool preemption = true;
};

/// Saves the complete state of a training run, so that a resumed run has the same bits.
///
///     lockstep::Checkpoint checkpoint("runs/a", world.comm(), {.every = 100});
///     checkpoint.add("model", *net).add("optimizer", optimizer, *net).add("scaler", scaler);
///     for (int64_t step = checkpoint.resume() + 1; step <= steps; ++step) {
///       ...
///       if (!checkpoint.step(step)) return lockstep::kExitPreempted;
///     }
///     checkpoint.finish();
///
/// A checkpoint is a folder of safetensors files with a manifest: docs/checkpoint.md. It appears
/// when it is complete and on disk, and never replaces a good one. Data that ranks have in common
/// is written by the first of them; slices of tensor-parallel layers and stages of a pipeline are
/// written by the ranks that have them. All ranks need access to the same folder.
///
/// Everything added must outlive the Checkpoint. Every rank makes the same calls in the same order.
class Checkpoint {
 public:
  /// With `every`, checks at once that the folder can be written to, and that no other run saves
  /// there. Collective over `ranks`, if given.
  explicit Checkpoint(std::string folder, const CheckpointOptions& options = {});
  Checkpoint(std::string folder, const Communicator& ranks, const CheckpointOptions& options = {});

  /// Waits for the last save, and reports its failure on standard error unless finish() did.
  ~Checkpoint();
  Checkpoint(const Checkpoint&) = delete;
  Checkpoint& operator=(const Checkpoint&) = delete;

  /// Parameters and buffers, under their names. A part of a model has its names in the whole model,
  /// and parts are added under one name, so that the model can be divided differently later.
  Checkpoint& add(const std::string& name, torch::nn::Module& module);

  /// The stages of this process, and the pipeline's random numbers.
  Checkpoint& add(const std::string& name, Pipeline& pipeline);

  /// The shards of this rank and the buffers, under the module's names. They can be loaded on
  /// another number of ranks, in another stage and without sharding, and vice versa.
  Checkpoint& add(const std::string& name, ShardedModel& model);
  template <class Module>
  Checkpoint& add(const std::string& name, FullyShardedDataParallel<Module>& fsdp) {
    return add(name, fsdp.sharded());
  }

  /// State and options (learning rates) of an optimizer; its parameters are named by the module.
  /// SGD, Adam, AdamW, Adagrad and RMSprop, of lockstep or torch::optim.
  Checkpoint& add(const std::string& name, torch::optim::Optimizer& optimizer,
                  const torch::nn::Module& module);
  Checkpoint& add(const std::string& name, torch::optim::Optimizer& optimizer,
                  const Pipeline& pipeline);

  Checkpoint& add(const std::string& name, torch::optim::Optimizer& optimizer,
                  const ShardedModel& model);
  template <class Module>
  Checkpoint& add(const std::string& name, torch::optim::Optimizer& optimizer,
                  const FullyShardedDataParallel<Module>& fsdp) {
    return add(name, optimizer, fsdp.sharded());
  }

  Checkpoint& add(const std::string& name, GradScaler& scaler);
  Checkpoint& add(const std::string& name, const MasterWeights& masters,
                  const torch::nn::Module& module);
  Checkpoint& add(const std::string& name, const MasterWeights& masters, const ShardedModel& model);
  template <class Module>
  Checkpoint& add(const std::string& name, const MasterWeights& masters,
                  const FullyShardedDataParallel<Module>& fsdp) {
    return add(name, masters, fsdp.sharded());
  }

  /// How many updates it has seen, and the groups' base rates.
  Checkpoint& add(const std::string& name, LrScheduler& scheduler);

  /// The averages, under the names of what they are of, and how many updates they have seen.
  Checkpoint& add(const std::string& name, WeightAverage& average);

  /// How many steps it has made. Rates are the optimizer's. A scheduler with more state needs the
  /// functions below.
  Checkpoint& add(const std::string& name, torch::optim::LRScheduler& scheduler);

  /// Epoch and position: the rows that next_batch(), or the next loop over a loader, will give.
  Checkpoint& add(const std::string& name, DistributedSampler& sampler);

  /// The program's own values; text is UTF-8. If they differ between ranks, each rank gets its own
  /// back; with another number of ranks, all get those of rank 0. A tensor is always that of rank
  /// 0.
  Checkpoint& add(const std::string& name, torch::Tensor& tensor);
  Checkpoint& add(const std::string& name, int64_t& value);
  Checkpoint& add(const std::string& name, double& value);
  Checkpoint& add(const std::string& name, std::string& value);
  Checkpoint& add(const std::string& name, nlohmann::json& value);
  Checkpoint& add(const std::string& name, std::function<nlohmann::json()> save,
                  std::function<void(const nlohmann::json&)> load);

  /// The random streams of these devices' workers, which DataParallel and Device::run use. The
  /// streams of the calling thread are always saved.
  Checkpoint& add(const Devices& devices);

  /// Loads the latest good checkpoint into everything that was added and returns the step after
  /// which it was saved; 0 if there is none. Damaged ones are named on standard error and skipped.
  /// A checkpoint of another model is an Error that names the difference; then nothing has changed.
  /// So is a file that cannot be read. The program's own load functions run after all checks, in
  /// the order in which parts were added: one that throws leaves what was added later as it was.
  /// Call it when everything has been added, after Pipeline and DistributedDataParallel were
  /// constructed.
  int64_t resume();

  /// Call it after each optimizer step. Saves if this step is due. Returns false if the run should
  /// end (see CheckpointOptions::preemption); it has then been saved. If that save fails, it is an
  /// Error.
  [[nodiscard]] bool step(int64_t step);

  /// Saves now, unless this step was the last to be saved or resumed. Waits for the previous save,
  /// if it has not ended yet. A save that fails is reported on standard error, and by finish();
  /// training can continue, and earlier checkpoints are intact.
  void save(int64_t step);

  /// Waits for the last save. An Error if any save has failed.
  void finish();

 private:
  class State;
  std::unique_ptr<State> state_;
};

}  // namespace lockstep
