#pragma once

// An update of one element, from the numbers in its slot. The formulas and their order are those of
// update_loops.hpp; products are not fused with sums here either, so that a GPU rounds as a CPU
// does.

namespace lockstep::gpu {

__device__ inline float mul(float a, float b) {
  return __fmul_rn(a, b);
}
__device__ inline double mul(double a, double b) {
  return __dmul_rn(a, b);
}
__device__ inline float add(float a, float b) {
  return __fadd_rn(a, b);
}
__device__ inline double add(double a, double b) {
  return __dadd_rn(a, b);
}
__device__ inline float sub(float a, float b) {
  return __fsub_rn(a, b);
}
__device__ inline double sub(double a, double b) {
  return __dsub_rn(a, b);
}
__device__ inline float quotient(float a, float b) {
  return __fdiv_rn(a, b);
}
__device__ inline double quotient(double a, double b) {
  return __ddiv_rn(a, b);
}
__device__ inline float root(float a) {
  return __fsqrt_rn(a);
}
__device__ inline double root(double a) {
  return __dsqrt_rn(a);
}

template <class T>
struct SgdNumbers {
  T factor, lr, weight_decay, keep, take, nesterov_factor;
  T nesterov;  // 1 or 0
};

template <class T>
struct AdamNumbers {
  T factor, gradient_decay, decay, beta1, beta2, take1, take2, step_size, root_factor, eps;
};

/// weight, gradient (left as it was multiplied), momentum and variance of one element.
template <class T>
struct Element {
  T weight, gradient, momentum, variance;
};

template <bool kWithMomentum>
struct SgdUpdate {
  static constexpr bool kMomentum = kWithMomentum;
  static constexpr bool kVariance = false;
  template <class T>
  using Numbers = SgdNumbers<T>;

  template <class T>
  __device__ static void apply(const Numbers<T>& by, Element<T>& element) {
    element.gradient = mul(element.gradient, by.factor);
    T direction = element.gradient;
    if (by.weight_decay != 0) direction = add(direction, mul(by.weight_decay, element.weight));
    if constexpr (kMomentum) {
      element.momentum = add(mul(by.keep, element.momentum), mul(by.take, direction));
      direction = by.nesterov != 0 ? add(direction, mul(by.nesterov_factor, element.momentum))
                                   : element.momentum;
    }
    element.weight = sub(element.weight, mul(by.lr, direction));
  }
};

struct AdamUpdate {
  static constexpr bool kMomentum = true;
  static constexpr bool kVariance = true;
  template <class T>
  using Numbers = AdamNumbers<T>;

  template <class T>
  __device__ static void apply(const Numbers<T>& by, Element<T>& element) {
    T gradient = mul(element.gradient, by.factor);
    element.gradient = gradient;
    if (by.gradient_decay != 0) gradient = add(gradient, mul(by.gradient_decay, element.weight));
    element.momentum = add(mul(by.beta1, element.momentum), mul(by.take1, gradient));
    element.variance = add(mul(by.beta2, element.variance), mul(mul(by.take2, gradient), gradient));
    const T divisor = add(mul(root(element.variance), by.root_factor), by.eps);
    element.weight =
        sub(mul(by.decay, element.weight), mul(by.step_size, quotient(element.momentum, divisor)));
  }
};

}  // namespace lockstep::gpu
