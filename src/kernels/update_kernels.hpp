#pragma once

#include <cstddef>
#include <cstdint>

#include "base/dtype.hpp"

namespace lockstep {

/// The elements that a kernel updates: dense arrays of equal length that do not overlap.
struct UpdatePiece {
  void* weight = nullptr;
  void* gradient = nullptr;
  void* momentum = nullptr;  ///< SGD's buffer, Adam's first moment; SGD may have none
  void* variance = nullptr;  ///< Adam's second moment
  int64_t count = 0;
};

/// One step of SGD:
///     g = gradient * gradient_factor                 (stored if store_gradient)
///     d = g + weight_decay * weight
///     momentum = keep * momentum + take * d
///     weight -= lr * (nesterov ? d + nesterov_factor * momentum : momentum)
/// Without a momentum array, weight -= lr * d.
struct SgdRates {
  double gradient_factor = 1;
  double lr = 0;
  double weight_decay = 0;
  double keep = 0;
  double take = 1;
  double nesterov_factor = 0;
  bool nesterov = false;
  bool store_gradient = false;
};

/// One step of Adam (decay is 1) or AdamW (gradient_decay is 0):
///     g = gradient * gradient_factor                 (stored if store_gradient)
///     g = g + gradient_decay * weight
///     momentum = beta1 * momentum + (1 - beta1) * g
///     variance = beta2 * variance + (1 - beta2) * g * g
///     weight = decay * weight - step_size * momentum / (sqrt(variance) * root_factor + eps)
struct AdamRates {
  double gradient_factor = 1;
  double gradient_decay = 0;
  double decay = 1;
  double beta1 = 0;
  double beta2 = 0;
  double step_size = 0;
  double root_factor = 1;
  double eps = 0;
  bool store_gradient = false;
};

/// Elements are F32 or F64. The bits of a result depend only on the values of its element, not on
/// its index, on count, on alignment or on the instructions of this machine.
void update_sgd(Dtype dtype, const SgdRates& rates, const UpdatePiece& piece);
void update_adam(Dtype dtype, const AdamRates& rates, const UpdatePiece& piece);

/// The kernels for one set of instructions.
struct UpdateKernels {
  void (*sgd)(Dtype dtype, const SgdRates& rates, const UpdatePiece& piece);
  void (*adam)(Dtype dtype, const AdamRates& rates, const UpdatePiece& piece);
};

const UpdateKernels& plain_update_kernels();
#ifdef __x86_64__
const UpdateKernels& avx2_update_kernels();
const UpdateKernels& avx512_update_kernels();
#endif

}  // namespace lockstep
