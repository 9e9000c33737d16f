#pragma once

#include <torch/nn/modules/container/sequential.h>

#include <cstdint>
#include <vector>

#include "course/options.hpp"
#include "lockstep/mesh.hpp"
#include "lockstep/schedule.hpp"

namespace course {

/// How a job divides its work. Its ranks form a mesh of three axes, of which any may have size 1:
/// `dp` with other rows, `pp` with other stages, `tp` with other parts of each matrix.
struct HybridPlan {
  lockstep::Schedule schedule;
  bool over_ranks = false;  ///< a place is a rank of `pp`; otherwise a device of the rank
  int data = 1;
  int pipeline = 1;
  int tensor = 1;
  std::vector<int> recompute = {};  ///< stages that compute their forward again for backward

  int devices_per_rank() const { return over_ranks ? 1 : schedule.places(); }
  std::vector<lockstep::MeshAxis> axes() const;
};

/// --stages, --micro-batches, --schedule, --place, --tensor-parallel and --cut for that many ranks.
/// What does not fit is an Error, before anything is started.
HybridPlan plan_hybrid(const Options& options, int ranks);
HybridPlan plan_hybrid(const Options& options);  ///< for the ranks of this job

/// --cut: layers per stage. By time it is measured with `rows` and the same on all ranks of
/// `world`, collectively.
std::vector<int64_t> choose_cut(const Options& options, const torch::nn::Sequential& layers,
                                const torch::Tensor& rows, const lockstep::Communicator& world);

}  // namespace course
