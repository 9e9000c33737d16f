#pragma once

#include <torch/torch.h>

#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "checkpoint/reader.hpp"
#include "lockstep/checkpoint.hpp"

// What a checkpoint consists of: each part knows its tensors and values, and how to take them back.

namespace lockstep {

/// What a part has to save.
struct PartContents {
  struct Item {
    std::string name;
    torch::Tensor tensor;
    Slice slice;
    bool trained = false;  ///< ranks that have it should have the same values
  };
  std::vector<Item> items;
  nlohmann::json value;  ///< null: none
};

/// A value as a manifest holds it: infinite numbers and NaN, which JSON does not have, are
/// {"lockstep:number": "inf"} there. SectionSource::value() undoes it.
nlohmann::json encode_numbers(const nlohmann::json& value);

/// One section of a checkpoint that is being loaded, as this rank sees it.
class SectionSource {
 public:
  SectionSource(const CheckpointReader& reader, std::string section, int rank, int ranks);

  const std::string& section() const { return section_; }

  const std::string& path() const { return reader_.path(); }

  /// Whether as many ranks load it as saved it, so that each finds its own.
  bool same_ranks() const { return same_ranks_; }

  /// The value of this rank, or what rank 0 had if the number of ranks is another. Null: none.
  nlohmann::json value() const;

  bool has(const std::string& name) const;

  /// Names of the section's tensors that start so.
  std::vector<std::string> names_with(const std::string& prefix) const;

  torch::ScalarType dtype_of(const std::string& name) const;

  /// Reads what `slice` has of a tensor. An Error if there is none of that name, shape and dtype.
  torch::Tensor read(const std::string& name, const Slice& slice, torch::ScalarType dtype);

  /// The same, of whatever dtype and shape it is.
  torch::Tensor read_whole(const std::string& name);

  /// Names that were read.
  const std::set<std::string>& used() const { return used_; }

  /// An Error about this section.
  [[noreturn]] void fail(const std::string& reason, const std::string& help) const;

 private:
  const StoredTensor& find(const std::string& name) const;

  const CheckpointReader& reader_;
  std::string section_;
  int rank_;
  bool same_ranks_;
  std::set<std::string> used_;
};

/// A part of a checkpoint.
class CheckpointPart {
 public:
  virtual ~CheckpointPart() = default;

  virtual PartContents contents() = 0;

  /// Tensors that the part has before anything is loaded.
  virtual std::vector<PartContents::Item> items() const { return {}; }

  /// A tensor of one stage of a pipeline, of those that this rank has.
  struct StageTensor {
    int stage;
    std::string name;
  };
  virtual std::vector<StageTensor> stage_tensors() const { return {}; }

  /// Parameters whose float32 weights the part updates, and whether it saves those of one.
  virtual std::vector<torch::Tensor> needs_masters_of() const { return {}; }
  virtual bool saves_master_of(const torch::Tensor& /*parameter*/) const { return false; }

  /// Checks that the section fits and reads it, but changes nothing: the function returned does.
  virtual std::function<void()> load(SectionSource& source) = 0;
};

/// Names of parameters.
using NamesOfParameters = std::map<const c10::TensorImpl*, std::string>;
NamesOfParameters names_of(const torch::nn::Module& module);
NamesOfParameters names_of(const Pipeline& pipeline);
NamesOfParameters names_of(const ShardedModel& model);

std::unique_ptr<CheckpointPart> module_part(torch::nn::Module& module);
std::unique_ptr<CheckpointPart> pipeline_part(Pipeline& pipeline);
std::unique_ptr<CheckpointPart> sharded_part(ShardedModel& model);
std::unique_ptr<CheckpointPart> optimizer_part(const std::string& section,
                                               torch::optim::Optimizer& optimizer,
                                               NamesOfParameters names);
std::unique_ptr<CheckpointPart> scaler_part(GradScaler& scaler);
std::unique_ptr<CheckpointPart> masters_part(const MasterWeights& masters,
                                             const torch::nn::Module& module);
std::unique_ptr<CheckpointPart> masters_part(const MasterWeights& masters,
                                             const ShardedModel& model);
std::unique_ptr<CheckpointPart> scheduler_part(LrScheduler& scheduler);
std::unique_ptr<CheckpointPart> scheduler_part(torch::optim::LRScheduler& scheduler);
std::unique_ptr<CheckpointPart> average_part(WeightAverage& average);
std::unique_ptr<CheckpointPart> sampler_part(DistributedSampler& sampler);
std::unique_ptr<CheckpointPart> tensor_part(const std::string& section, torch::Tensor& tensor);
std::unique_ptr<CheckpointPart> value_part(int64_t& value);
std::unique_ptr<CheckpointPart> value_part(double& value);
std::unique_ptr<CheckpointPart> value_part(std::string& value);
std::unique_ptr<CheckpointPart> value_part(nlohmann::json& value);
std::unique_ptr<CheckpointPart> value_part(std::function<nlohmann::json()> save,
                                           std::function<void(const nlohmann::json&)> load);

/// The random numbers of the calling thread, of devices and of pipelines. The part refers to it.
struct RandomStreams {
  std::vector<Devices> devices;
  std::vector<Pipeline*> pipelines;
  std::vector<c10::Device> gpus;  ///< of this rank: their generators are saved by place
};
std::unique_ptr<CheckpointPart> random_part(const RandomStreams& streams, int rank);

/// Of the names of a rank's generators those of its GPUs, in the order of the GPUs: rank2.cuda:0 is
/// the first one's. Checkpoints of earlier versions have its index in the process in place of 0.
std::vector<std::string> gpu_generators(const std::vector<std::string>& names);

}  // namespace lockstep
