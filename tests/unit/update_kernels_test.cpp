#include "kernels/update_kernels.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "base/machine.hpp"

namespace lockstep::test::update_kernels_test {
namespace {

struct Named {
  std::string_view name;
  const UpdateKernels* kernels;
};

// The kernels that this machine can run.
std::vector<Named> instruction_sets() {
  std::vector<Named> sets = {{"plain", &plain_update_kernels()}};
#ifdef __x86_64__
  if (best_instructions() != Instructions::kPlain) sets.push_back({"avx2", &avx2_update_kernels()});
  if (best_instructions() == Instructions::kAvx512)
    sets.push_back({"avx512", &avx512_update_kernels()});
#endif
  return sets;
}

constexpr int64_t kGuard = 16;  // elements on both sides that nobody may write

template <class T>
constexpr Dtype kDtype = sizeof(T) == sizeof(float) ? Dtype::kF32 : Dtype::kF64;

// The four arrays of a piece that starts `shift` elements after an aligned address.
template <class T>
struct Values {
  Values(int64_t count, int64_t shift, unsigned int seed) : begin(kGuard + shift), size(count) {
    std::mt19937 random(seed);
    std::uniform_real_distribution<double> uniform(-1, 1);
    for (auto& array : arrays) {
      array.resize(static_cast<size_t>(begin + count + kGuard));
      for (T& x : array) x = static_cast<T>(uniform(random));
    }
    for (T& x : arrays[3]) x = std::abs(x);  // a variance
  }

  UpdatePiece piece(bool with_momentum = true) {
    return {at(0), at(1), with_momentum ? at(2) : nullptr, at(3), size};
  }
  T* at(size_t array) { return arrays[array].data() + begin; }
  double value(size_t array, int64_t i) const {
    return static_cast<double>(arrays[array][static_cast<size_t>(begin + i)]);
  }

  std::vector<T> arrays[4];  // weight, gradient, momentum, variance
  int64_t begin;
  int64_t size;
};

constexpr const char* kArrayNames[] = {"weight", "gradient", "momentum", "variance"};

// `actual` must be `before` updated by `expected`, which gives the four values of element i, and
// nothing around them may have changed.
template <class T, class Expected>
void check(const Values<T>& before, const Values<T>& actual, std::string_view set,
           Expected&& expected) {
  const double tolerance = 16 * static_cast<double>(std::numeric_limits<T>::epsilon());
  for (int64_t i = -before.begin; i < before.size + kGuard; ++i) {
    double want[4];
    for (size_t a = 0; a < 4; ++a) want[a] = before.value(a, i);
    const bool inside = i >= 0 && i < before.size;
    if (inside) expected(want);
    for (size_t a = 0; a < 4; ++a) {
      ASSERT_NEAR(actual.value(a, i), want[a], inside ? tolerance * (1 + std::abs(want[a])) : 0)
          << set << ' ' << kArrayNames[a] << ' ' << i << " of " << before.size;
    }
  }
}

template <class T>
void check_adamw(const AdamRates& rates) {
  for (const Named& set : instruction_sets()) {
    for (int64_t count = 0; count <= 70; ++count) {
      const int64_t shift = count % 5;
      const Values<T> before(count, shift, static_cast<unsigned int>(count));
      Values<T> actual = before;
      set.kernels->adam(kDtype<T>, rates, actual.piece());
      check(before, actual, set.name, [&](double* x) {
        const double g = x[1] * rates.gradient_factor;
        if (rates.store_gradient) x[1] = g;
        x[2] = rates.beta1 * x[2] + (1 - rates.beta1) * g;
        x[3] = rates.beta2 * x[3] + (1 - rates.beta2) * g * g;
        x[0] = rates.decay * x[0] -
               rates.step_size * x[2] / (std::sqrt(x[3]) * rates.root_factor + rates.eps);
      });
    }
  }
}

TEST(UpdateKernels, AdamWEqualsAScalarInDouble) {
  AdamRates rates;
  rates.beta1 = 0.9;
  rates.beta2 = 0.999;
  rates.decay = 1 - 1e-3;
  rates.step_size = 0.01;
  rates.root_factor = 1.5;
  rates.eps = 1e-3;
  check_adamw<float>(rates);
  check_adamw<double>(rates);
  rates.gradient_factor = 0.37;
  check_adamw<float>(rates);
  rates.store_gradient = true;
  check_adamw<float>(rates);
  check_adamw<double>(rates);
}

template <class T>
void check_sgd(const SgdRates& rates, bool with_momentum) {
  for (const Named& set : instruction_sets()) {
    for (int64_t count = 0; count <= 70; ++count) {
      const int64_t shift = count % 7;
      const Values<T> before(count, shift, static_cast<unsigned int>(count));
      Values<T> actual = before;
      set.kernels->sgd(kDtype<T>, rates, actual.piece(with_momentum));
      check(before, actual, set.name, [&](double* x) {
        const double g = x[1] * rates.gradient_factor;
        if (rates.store_gradient) x[1] = g;
        double d = g + rates.weight_decay * x[0];
        if (with_momentum) {
          x[2] = rates.keep * x[2] + rates.take * d;
          d = rates.nesterov ? d + rates.nesterov_factor * x[2] : x[2];
        }
        x[0] -= rates.lr * d;
      });
    }
  }
}

TEST(UpdateKernels, SgdEqualsAScalarInDouble) {
  for (const bool store : {false, true}) {
    for (const double weight_decay : {0.0, 0.1}) {
      SgdRates rates;
      rates.lr = 0.3;
      rates.weight_decay = weight_decay;
      rates.gradient_factor = 0.25;
      rates.store_gradient = store;
      check_sgd<float>(rates, false);
      check_sgd<double>(rates, false);
      rates.keep = 0.9;
      rates.take = 0.75;
      check_sgd<float>(rates, true);
      check_sgd<double>(rates, true);
      rates.nesterov = true;
      rates.nesterov_factor = 0.8;
      check_sgd<float>(rates, true);
      check_sgd<double>(rates, true);
    }
  }
}

TEST(UpdateKernels, WithoutDecayAnInfiniteWeightStaysInfinite) {
  for (const Named& set : instruction_sets()) {
    Values<float> values(17, 0, 1);
    values.at(0)[3] = std::numeric_limits<float>::infinity();
    SgdRates rates;
    rates.lr = 0.1;
    set.kernels->sgd(Dtype::kF32, rates, values.piece(false));
    EXPECT_EQ(values.at(0)[3], std::numeric_limits<float>::infinity()) << set.name;
  }
}

// The bits do not depend on cuts, alignment or instructions.
template <class T>
void check_bits() {
  AdamRates adam;
  adam.gradient_factor = 1.0 / 3;
  adam.decay = 0.999;
  adam.beta1 = 0.9;
  adam.beta2 = 0.99;
  adam.step_size = 0.1;
  adam.root_factor = 1.1;
  adam.eps = 1e-8;
  adam.store_gradient = true;
  SgdRates sgd;
  sgd.gradient_factor = 1.0 / 3;
  sgd.lr = 0.1;
  sgd.weight_decay = 0.01;
  sgd.keep = 0.9;
  sgd.take = 0.9;
  const Values<T> before(1000, 0, 5);
  Values<T> whole = before;
  plain_update_kernels().adam(kDtype<T>, adam, whole.piece());
  plain_update_kernels().sgd(kDtype<T>, sgd, whole.piece());
  for (const Named& set : instruction_sets()) {
    for (const int64_t cut : {1, 13, 64, 500, 999}) {
      Values<T> parts = before;
      for (const bool second : {false, true}) {
        UpdatePiece piece = parts.piece();
        piece.count = cut;
        if (second) {
          piece = {parts.at(0) + cut, parts.at(1) + cut, parts.at(2) + cut, parts.at(3) + cut,
                   1000 - cut};
        }
        set.kernels->adam(kDtype<T>, adam, piece);
        set.kernels->sgd(kDtype<T>, sgd, piece);
      }
      for (size_t a = 0; a < 4; ++a) {
        EXPECT_EQ(std::memcmp(parts.at(a), whole.at(a), 1000 * sizeof(T)), 0)
            << set.name << ' ' << kArrayNames[a] << " cut at " << cut;
      }
    }
  }
}

TEST(UpdateKernels, BitsDoNotDependOnPlaceAlignmentOrInstructions) {
  check_bits<float>();
  check_bits<double>();
}

TEST(UpdateKernels, NanAndInfinityComeThrough) {
  AdamRates rates;
  rates.beta1 = 0.9;
  rates.beta2 = 0.999;
  rates.step_size = 0.1;
  rates.eps = 1e-8;
  for (const Named& set : instruction_sets()) {
    Values<float> values(20, 1, 9);
    values.at(1)[2] = std::numeric_limits<float>::quiet_NaN();
    values.at(1)[18] = std::numeric_limits<float>::infinity();
    set.kernels->adam(Dtype::kF32, rates, values.piece());
    for (const int64_t bad : {2, 18}) {
      EXPECT_TRUE(std::isnan(values.at(0)[bad])) << set.name << ' ' << bad;
      EXPECT_FALSE(std::isfinite(values.at(3)[bad])) << set.name << ' ' << bad;
    }
    EXPECT_TRUE(std::isfinite(values.at(0)[3]) && std::isfinite(values.at(0)[19])) << set.name;
  }
}

}  // namespace
}  // namespace lockstep::test::update_kernels_test
