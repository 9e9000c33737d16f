#pragma once

#include <torch/optim/optimizer.h>
#include <torch/types.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "device/parallel_ranges.hpp"
#include "kernels/update_kernels.hpp"
#include "lockstep/optim.hpp"

namespace lockstep {

using ParamGroups = std::vector<torch::optim::OptimizerParamGroup>;

/// A parameter that has a gradient.
struct StepItem {
  torch::Tensor parameter;
  torch::Tensor weight;    ///< what is updated: the parameter's master, or the parameter itself
  torch::Tensor gradient;  ///< in the weight's memory order, in place or copied; on the CPU also of
                           ///< the weight's dtype
  bool is_copy = false;
  size_t group = 0;

  bool has_master() const { return !weight.is_same(parameter); }
};

/// Throws unless a fused optimizer with this name ("AdamW") can update all parameters.
void check_parameters(const ParamGroups& groups, const std::optional<MasterWeights>& masters,
                      std::string_view optimizer);

/// Refuses a negative max_norm.
void check_extras(const StepExtras& extras);

/// What one step updates: the parameters that have gradients. All are checked before any changes.
class StepItems {
 public:
  StepItems(const ParamGroups& groups, const std::optional<MasterWeights>& masters,
            std::string_view optimizer);

  bool empty() const { return items_.empty(); }
  size_t size() const { return items_.size(); }
  const StepItem& operator[](size_t item) const { return items_[item]; }
  auto begin() const { return items_.begin(); }
  auto end() const { return items_.end(); }

  bool on_cuda() const { return items_[0].weight.is_cuda(); }

  /// Returns `scaled` with the sum of squares of the whole model's gradients, if extras ask for a
  /// norm and the sum is unknown. Collective over the ranks that hold parts of the model, including
  /// those without gradients.
  ScaledGradients with_squares(const ScaledGradients& scaled, const ParamGroups& groups,
                               const StepExtras& extras) const;

  /// On the CPU: rounds the masters to their parameters.
  void round_masters() const;

  /// After the update: tells autograd of the change, and drops the gradients or writes changed
  /// copies of them back.
  void finish(bool gradients_changed, const StepExtras& extras) const;

 private:
  std::optional<MasterWeights> masters_;
  std::vector<StepItem> items_;
};

/// Tells `lockstep verify`, if it runs the program, of an update.
class RecordedUpdate {
 public:
  RecordedUpdate(const torch::optim::Optimizer& optimizer,
                 const std::optional<MasterWeights>& masters);

  /// The update was made; `norm` is what it returned.
  void end(const ScaledGradients& gradients, const StepExtras& extras,
           const torch::Tensor& norm) const;

 private:
  const torch::optim::Optimizer& optimizer_;
  const std::optional<MasterWeights>& masters_;
};

// The rest is for updates on the CPU.

/// Whether a scaler found an overflow, so that nothing may change.
bool skips_on_cpu(const StepItems& items, const ScaledGradients& gradients);

/// Returns the norm of the unscaled gradients; undefined where extras ask for none.
torch::Tensor gradient_norm(const ScaledGradients& scaled, const StepExtras& extras);

/// The same on a rank that has no gradient: others may have the rest of the model. Undefined where
/// the step is skipped.
torch::Tensor norm_without_gradients(const ScaledGradients& scaled, const StepExtras& extras);

/// Returns what gradients are multiplied by, for their scale and for max_norm.
double gradient_factor(const ScaledGradients& scaled, const StepExtras& extras,
                       const torch::Tensor& norm);

/// Where the elements of an item and of its state are in memory.
UpdatePiece piece_of(const StepItem& item, const torch::Tensor& momentum,
                     const torch::Tensor& variance);
Dtype dtype_of(const StepItem& item);

/// Runs `update(index of a piece, part of it)` over all elements of all pieces, divided evenly over
/// this thread's cores: one large piece balances as well as many small ones. Pieces are cut at
/// multiples of a block, so that parts stay aligned.
template <class Update>
void for_each_part(std::span<const UpdatePiece> pieces, std::span<const Dtype> dtypes,
                   Update&& update) {
  constexpr int64_t kBlock = 64;             // elements
  constexpr int64_t kGrainBlocks = 512;      // less is not worth waking another thread
  std::vector<int64_t> ends(pieces.size());  // [piece] in blocks, over all pieces
  int64_t blocks = 0;
  for (size_t i = 0; i < pieces.size(); ++i) {
    blocks += (pieces[i].count + kBlock - 1) / kBlock;
    ends[i] = blocks;
  }
  parallel_ranges(blocks, kGrainBlocks, [&](int64_t begin, int64_t end) {
    auto i = static_cast<size_t>(std::upper_bound(ends.begin(), ends.end(), begin) - ends.begin());
    for (; begin < end; ++i) {
      const UpdatePiece& piece = pieces[i];
      const int64_t first_block = i == 0 ? 0 : ends[i - 1];
      const int64_t from = (begin - first_block) * kBlock;
      const int64_t to = std::min(piece.count, (end - first_block) * kBlock);
      const auto at = [&](void* array) -> void* {
        return array == nullptr ? nullptr
                                : static_cast<char*>(array) + from * dtype_bytes(dtypes[i]);
      };
      update(i, UpdatePiece{at(piece.weight), at(piece.gradient), at(piece.momentum),
                            at(piece.variance), to - from});
      begin = ends[i];
    }
  });
}

}  // namespace lockstep
