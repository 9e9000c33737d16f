#pragma once

#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <utility>

namespace lockstep {

class GradScaler;

/// One of the virtual shards of a step: see docs/same_bits.md. The global batch is always cut into
/// `count` parts, whatever the number of ranks, and each rank computes `local_count` consecutive
/// parts.
struct BatchPart {
  int64_t index = 0;  ///< among all parts: the rank's number if there is one rank per part
  int64_t count = 1;
  int64_t local_index = 0;  ///< of this rank's
  int64_t local_count = 1;

  /// This part's rows (dimension 0) of the rows that this rank has in a step, as a copy. An Error
  /// (kSplit) if these rows cannot be divided evenly, since another number of ranks would divide
  /// them differently.
  torch::Tensor rows_of(const torch::Tensor& rank_rows) const;
};

/// Computes the loss of one part, with a forward through the wrapper.
using PartLoss = std::function<torch::Tensor(const BatchPart& part)>;

/// Options of one backward_parts().
struct PartStep {
  GradScaler* scaler = nullptr;  ///< scales the losses before backward
};

/// The PartLoss of `loss_of(x, y)`: the loss of a part's rows of x and y.
template <class LossOfRows>
PartLoss loss_of_rows(const torch::Tensor& x, const torch::Tensor& y, LossOfRows loss_of) {
  return [x, y, loss_of = std::move(loss_of)](const BatchPart& part) {
    return loss_of(part.rows_of(x), part.rows_of(y));
  };
}

}  // namespace lockstep
