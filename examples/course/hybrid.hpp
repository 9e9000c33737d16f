#pragma once

#include <torch/nn/modules/container/sequential.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "course/course.hpp"
#include "course/layers.hpp"
#include "lockstep/grad_scaler.hpp"
#include "lockstep/mesh.hpp"
#include "lockstep/pipeline.hpp"
#include "lockstep/schedule.hpp"
#include "lockstep/world.hpp"

namespace course {

/// How a job divides its work. Its ranks form a mesh of three axes, any of which may have size 1.
/// Ranks along `dp` have different rows, along `pp` different stages, along `tp` different parts of
/// each matrix.
struct HybridPlan {
  lockstep::Schedule schedule;
  bool over_ranks = false;  ///< a pipeline rank is a rank of `pp`; otherwise a device of the rank
  int data = 1;
  int pipeline = 1;
  int tensor = 1;
  std::vector<int> recompute = {};  ///< stages that compute their forward again for backward

  int devices_per_rank() const { return over_ranks ? 1 : schedule.ranks(); }
  std::vector<lockstep::MeshAxis> axes() const;
};

/// --stages, --micro-batches, --schedule, --place, --tensor-parallel and --cut for the ranks of
/// this job; --virtual-shards decides the micro-batches. What does not fit is an Error, before
/// anything is started.
HybridPlan plan_hybrid(Options& options);

/// What one row of a batch is at a layer, in bytes.
struct LayerShape {
  int64_t input_bytes = 0;
  int64_t output_bytes = 0;
  int64_t tensor_calls = 0;  ///< over the tensor axis in its forward
  int64_t tensor_bytes = 0;  ///< that this rank sends in them
};

/// A model's layers as stages.
struct ModelCut {
  std::vector<int64_t> layers_per_stage;
  std::vector<LayerShape> layers;
};

/// Cuts the model as --cut says, and measures the shapes of its layers. `rows` are those of this
/// rank's pipeline in a step. Collective.
ModelCut cut_model(const Options& options, Layers& model, const lockstep::World& world,
                   const Precision& precision, int64_t rows);

/// --optimizer for a model in stages: one for each stage, on its device, all at once. An enabled
/// scaler looks at the gradients of all stages together, so that they skip a step together: then
/// one optimizer serves all stages.
class HybridOptimizer {
 public:
  HybridOptimizer(lockstep::Pipeline& pipeline, lockstep::GradScaler& scaler,
                  const Options& options);

  /// Updates the weights, then drops the gradients.
  void step();

  /// The optimizers of this process.
  std::vector<torch::optim::Optimizer*> optimizers() const;

 private:
  lockstep::Pipeline& pipeline_;
  lockstep::GradScaler& scaler_;
  std::unique_ptr<torch::optim::Optimizer> whole_;                  // with a scaler
  std::vector<std::unique_ptr<torch::optim::Optimizer>> of_stage_;  // [stage]; null: not local
};

/// Prints "Rank: 0 | Local Rank: 0 | Devices: stage 0 on cpu:0 (core 0), …" of every rank, then the
/// number of processes, the micro-batches and the schedule as a grid, unless --quiet. Collective.
void print_placement(const lockstep::Pipeline& pipeline, const HybridPlan& plan,
                     const lockstep::World& world, const Options& options);

/// Which call of Pipeline::step this is in the training, from 0.
struct CallNumber {
  int64_t step = 0;
  int64_t micro_step = 0;
};

/// Every forward, backward and synchronisation of a call, a line each that begins with "[Rank 0]",
/// in the order in which they began. Times are milliseconds since `since_ns`.
std::string describe_call(const lockstep::Pipeline& pipeline, const HybridPlan& plan, int rank,
                          const CallNumber& number, int64_t accum_steps, int64_t since_ns);

}  // namespace course
