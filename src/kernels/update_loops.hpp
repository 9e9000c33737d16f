// The update loops, compiled once per set of instructions. update_plain.cpp, update_avx2.cpp and
// update_avx512.cpp include this after they set their target and define root_of(). Everything is in
// an unnamed namespace and calls nothing of the standard library, so that the linker cannot take a
// function that was compiled for one target for another.
//
// Every vector is updated by the same instructions, and a short one at the end is padded. Products
// are never fused with sums, and every set of instructions rounds roots and quotients correctly, so
// that the bits of a result depend only on the values of its element. Fusing would save nothing,
// because the loops are bound by memory.

#include <cstdint>

#include "kernels/update_kernels.hpp"

namespace lockstep {
namespace {

#define LOCKSTEP_INLINE [[gnu::always_inline]] inline

constexpr int kVectorBytes = 64;

template <class T>
struct VectorOf {
  using Type [[gnu::vector_size(kVectorBytes)]] = T;
};
template <class T>
using Vector = typename VectorOf<T>::Type;

template <class T>
constexpr int64_t kLanes = kVectorBytes / sizeof(T);

// The typed arrays of a piece.
template <class T>
struct Arrays {
  explicit Arrays(const UpdatePiece& piece)
      : weight(static_cast<T*>(piece.weight)),
        gradient(static_cast<T*>(piece.gradient)),
        momentum(static_cast<T*>(piece.momentum)),
        variance(static_cast<T*>(piece.variance)) {}
  T* weight;
  T* gradient;
  T* momentum;
  T* variance;
};

template <class T>
LOCKSTEP_INLINE void load(Vector<T>& to, const T* from) {
  __builtin_memcpy(&to, from, sizeof to);
}

template <class T>
LOCKSTEP_INLINE void store(T* to, const Vector<T>& from) {
  __builtin_memcpy(to, &from, sizeof from);
}

enum class Momentum { kNone, kPlain, kNesterov };

template <class T, Momentum kMomentum, bool kDecay, bool kStore>
struct SgdUpdate {
  explicit SgdUpdate(const SgdRates& rates)
      : factor(static_cast<T>(rates.gradient_factor)),
        lr(static_cast<T>(rates.lr)),
        weight_decay(static_cast<T>(rates.weight_decay)),
        keep(static_cast<T>(rates.keep)),
        take(static_cast<T>(rates.take)),
        nesterov_factor(static_cast<T>(rates.nesterov_factor)) {}

  LOCKSTEP_INLINE void operator()(const Arrays<T>& arrays, int64_t i) const {
    Vector<T> weight;
    Vector<T> direction;
    load(weight, arrays.weight + i);
    load(direction, arrays.gradient + i);
    direction = direction * factor;
    if constexpr (kStore) store(arrays.gradient + i, direction);
    if constexpr (kDecay) direction = direction + weight_decay * weight;
    if constexpr (kMomentum != Momentum::kNone) {
      Vector<T> momentum;
      load(momentum, arrays.momentum + i);
      momentum = keep * momentum + take * direction;
      store(arrays.momentum + i, momentum);
      if constexpr (kMomentum == Momentum::kNesterov) {
        direction = direction + nesterov_factor * momentum;
      } else {
        direction = momentum;
      }
    }
    weight = weight - lr * direction;
    store(arrays.weight + i, weight);
  }

  T factor, lr, weight_decay, keep, take, nesterov_factor;
};

template <class T, bool kGradientDecay, bool kStore>
struct AdamUpdate {
  explicit AdamUpdate(const AdamRates& rates)
      : factor(static_cast<T>(rates.gradient_factor)),
        gradient_decay(static_cast<T>(rates.gradient_decay)),
        decay(static_cast<T>(rates.decay)),
        beta1(static_cast<T>(rates.beta1)),
        beta2(static_cast<T>(rates.beta2)),
        take1(static_cast<T>(1 - rates.beta1)),
        take2(static_cast<T>(1 - rates.beta2)),
        step_size(static_cast<T>(rates.step_size)),
        root_factor(static_cast<T>(rates.root_factor)),
        eps(static_cast<T>(rates.eps)) {}

  LOCKSTEP_INLINE void operator()(const Arrays<T>& arrays, int64_t i) const {
    Vector<T> weight;
    Vector<T> gradient;
    Vector<T> momentum;
    Vector<T> variance;
    load(weight, arrays.weight + i);
    load(gradient, arrays.gradient + i);
    load(momentum, arrays.momentum + i);
    load(variance, arrays.variance + i);
    gradient = gradient * factor;
    if constexpr (kStore) store(arrays.gradient + i, gradient);
    if constexpr (kGradientDecay) gradient = gradient + gradient_decay * weight;
    momentum = beta1 * momentum + take1 * gradient;
    variance = beta2 * variance + take2 * gradient * gradient;
    Vector<T> root = variance;
    root_of(root);
    weight = decay * weight - step_size * (momentum / (root * root_factor + eps));
    store(arrays.momentum + i, momentum);
    store(arrays.variance + i, variance);
    store(arrays.weight + i, weight);
  }

  T factor, gradient_decay, decay, beta1, beta2, take1, take2, step_size, root_factor, eps;
};

// Runs `update` on the elements after the last whole vector, padded with zeros.
template <class T, class Update>
void update_rest(const Update& update, const Arrays<T>& arrays, int64_t begin, int64_t count) {
  T padded[4][kLanes<T>] = {};
  T* const from[4] = {arrays.weight, arrays.gradient, arrays.momentum, arrays.variance};
  const size_t bytes = static_cast<size_t>(count - begin) * sizeof(T);
  for (int a = 0; a < 4; ++a) {
    if (from[a] != nullptr) __builtin_memcpy(padded[a], from[a] + begin, bytes);
  }
  update(Arrays<T>({padded[0], padded[1], padded[2], padded[3], 0}), 0);
  for (int a = 0; a < 4; ++a) {
    if (from[a] != nullptr) __builtin_memcpy(from[a] + begin, padded[a], bytes);
  }
}

template <class T, class Update>
void update_all(const Update& update, const UpdatePiece& piece) {
  const Arrays<T> arrays(piece);
  int64_t begin = 0;
  for (; begin + kLanes<T> <= piece.count; begin += kLanes<T>) update(arrays, begin);
  if (begin < piece.count) update_rest(update, arrays, begin, piece.count);
}

template <class T, Momentum kMomentum, bool kDecay>
void sgd_of(const SgdRates& rates, const UpdatePiece& piece) {
  rates.store_gradient ? update_all<T>(SgdUpdate<T, kMomentum, kDecay, true>(rates), piece)
                       : update_all<T>(SgdUpdate<T, kMomentum, kDecay, false>(rates), piece);
}

template <class T, Momentum kMomentum>
void sgd_of(const SgdRates& rates, const UpdatePiece& piece) {
  rates.weight_decay != 0 ? sgd_of<T, kMomentum, true>(rates, piece)
                          : sgd_of<T, kMomentum, false>(rates, piece);
}

template <class T>
void sgd_of(const SgdRates& rates, const UpdatePiece& piece) {
  if (piece.momentum == nullptr) {
    sgd_of<T, Momentum::kNone>(rates, piece);
  } else if (rates.nesterov) {
    sgd_of<T, Momentum::kNesterov>(rates, piece);
  } else {
    sgd_of<T, Momentum::kPlain>(rates, piece);
  }
}

template <class T, bool kGradientDecay>
void adam_of(const AdamRates& rates, const UpdatePiece& piece) {
  rates.store_gradient ? update_all<T>(AdamUpdate<T, kGradientDecay, true>(rates), piece)
                       : update_all<T>(AdamUpdate<T, kGradientDecay, false>(rates), piece);
}

template <class T>
void adam_of(const AdamRates& rates, const UpdatePiece& piece) {
  rates.gradient_decay != 0 ? adam_of<T, true>(rates, piece) : adam_of<T, false>(rates, piece);
}

void sgd(Dtype dtype, const SgdRates& rates, const UpdatePiece& piece) {
  dtype == Dtype::kF64 ? sgd_of<double>(rates, piece) : sgd_of<float>(rates, piece);
}

void adam(Dtype dtype, const AdamRates& rates, const UpdatePiece& piece) {
  dtype == Dtype::kF64 ? adam_of<double>(rates, piece) : adam_of<float>(rates, piece);
}

constexpr UpdateKernels kKernels = {sgd, adam};

}  // namespace
}  // namespace lockstep
