#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/mutation.hpp"
#include "checkpoint/layout.hpp"
#include "device/parameter_map.hpp"

namespace lockstep {

/// Set in addition to kVerifyFolderVariable in the run that shows how fast rounding grows:
/// "DTYPE:SEED".
inline constexpr const char* kVerifyPerturbVariable = "LOCKSTEP_VERIFY_PERTURB";

/// Writes what `lockstep verify` compares: for each rank and update the gradients as the optimizer
/// used them, the weights, the optimizer's state and the buffers, under the names of the whole
/// model, each with the slice that this rank has.
///
/// Note [What a rank records of a step]
/// step-N.rank-R.facts.safetensors is written when the first optimizer of a step begins: this
/// rank's own gradients ("local/NAME"), as they went into the average, hashes of the rows that it
/// was given and of its random numbers, and what it sent. step-N.rank-R.update-K follows
/// for optimizer K, with own gradients that came after the first, as those of a GAN's other net.
/// rank-R.losses has a line for each loss. Every file is complete when it appears, so a rank that
/// is killed leaves whole steps.
///
/// Thread-safe: stages of a pipeline are updated on several threads.
class StepRecorder {
 public:
  /// Null unless this process runs under `lockstep verify`.
  static StepRecorder* of_process();

  /// `wrapper`: "ddp", "sharded", "virtual_shards", "data_parallel", "pipeline" or "module"; a
  /// pipeline with virtual shards is learnt as both. Perturbs the weights, if that was asked for:
  /// called when all ranks have the same.
  void learn(const torch::nn::Module& module, const char* wrapper);

  /// A parameter has this name from now on, as a shard has that of the parameter it is part of.
  void name(const torch::Tensor& parameter, const std::string& name);

  /// The name that a parameter has; a new one if it has none.
  std::string name_of(const torch::Tensor& parameter);

  /// `forwards`: how many the model makes of them, as a pipeline one for each of its parts.
  void note_rows(const std::vector<torch::Tensor>& inputs, int64_t forwards = 1);
  void note_random();                                  ///< a training forward drew random numbers
  void note_synchronised_forward();                    ///< by the program's own NoSync
  void note_buffers(const torch::nn::Module& module);  ///< as a synchronised forward begins
  void note_dtype(torch::ScalarType dtype);            ///< a precision that the model computes in
  void note_kind(const char* kind);  ///< of a layer whose result depends on how rows are divided

  /// The rows of each micro-batch, and the part of the batch's loss that it counts for.
  void note_micro_batches(const std::vector<int64_t>& rows, const std::vector<double>& shares);

  /// This rank's own gradient of a parameter goes into an average, with this weight.
  void note_local(const std::string& name, const torch::Tensor& gradient, const Slice& slice,
                  double weight);
  void note_tied(const torch::Tensor& copy);  ///< its gradient is that of two copies
  void note_weighed();  ///< local gradients were multiplied by their weight already
  void note_sent(int64_t bytes);
  void note_compression(torch::ScalarType dtype);  ///< what gradients are rounded to

  /// An optimizer is about to update.
  void begin_update(const torch::optim::Optimizer& optimizer);

  /// It has. `factor`: what it multiplied the gradients by; `master_of`: the float32 weight of a
  /// parameter, or the parameter itself.
  using MasterOf = std::function<torch::Tensor(const torch::Tensor&)>;
  void end_update(const torch::optim::Optimizer& optimizer, double factor,
                  const MasterOf& master_of);

  /// A GradScaler skipped this optimizer's update.
  void skip_update(const torch::optim::Optimizer& optimizer);

  void note_loss(double loss);

  /// A checkpoint of that step was loaded: the next update is the one after it.
  void resume_after(int64_t step);

 private:
  struct Updates {
    int64_t index = 0;  // of the optimizer
    int64_t step = 0;   // of its last update
    std::vector<std::pair<std::string, torch::Tensor>> gradients;
  };
  struct Item {
    torch::Tensor tensor;
    Slice slice;
  };
  using Items = std::map<std::string, Item>;

  explicit StepRecorder(std::string folder);

  void perturb(const torch::nn::Module& module);
  bool is_weight(const torch::Tensor& parameter);
  std::string known_name(const torch::Tensor& parameter);
  Updates& updates_of(const torch::optim::Optimizer& optimizer);
  void begin_step(int64_t step, const torch::optim::Optimizer& optimizer);
  void add_state(const torch::optim::Optimizer& optimizer, const torch::Tensor& parameter,
                 const std::string& name, Items& items) const;
  void write(const std::string& file, const Items& items, nlohmann::json facts) const;

  const std::string folder_;
  int rank_ = 0;
  int ranks_ = 1;
  std::optional<std::pair<double, uint64_t>> perturb_;  // relative size, seed

  std::mutex mutex_;  // guards all below
  ParameterMap<std::string> names_;
  ParameterMap<bool> moved_;  // by perturb()
  int64_t unnamed_ = 0;
  std::map<std::string, torch::Tensor> buffers_;  // of all modules
  std::set<std::string> kinds_;                   // of layers whose result depends on the division
  std::set<std::string> wrappers_;
  std::string dtype_ = "float32";
  std::string sent_dtype_ = "float32";
  std::map<const torch::optim::Optimizer*, Updates> updates_;
  int64_t resumed_after_ = 0;
  int64_t last_step_ = 0;

  // About the step that is being made.
  Items local_;
  std::map<std::string, int64_t> averages_;  // [name]
  double weight_ = 1;
  bool weighed_ = false;
  std::set<std::string> tied_;  // names
  int64_t forwards_ = 0;
  int64_t synchronised_forwards_ = 0;
  std::vector<int64_t> micro_batch_rows_;
  std::vector<double> micro_batch_shares_;
  int64_t sent_bytes_ = 0;
  int64_t all_reduces_ = 0;
  std::vector<int64_t> rows_;
  std::vector<int64_t> columns_;          // the same of dimension 1
  std::vector<int64_t> forward_buffers_;  // hashes
};

/// Guard around a training forward: notes if it drew random numbers, in whatever layer or function.
class WatchedForward {
 public:
  explicit WatchedForward(c10::Device device);
  explicit WatchedForward(const torch::nn::Module& module);  ///< on its device
  ~WatchedForward();
  WatchedForward(const WatchedForward&) = delete;
  WatchedForward& operator=(const WatchedForward&) = delete;

 private:
  StepRecorder* recorder_;
  std::map<std::string, at::Generator> generators_;
  int64_t before_ = 0;
};

}  // namespace lockstep
