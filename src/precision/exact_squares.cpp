#include "precision/exact_squares.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <mutex>
#include <vector>

#include "device/parallel_ranges.hpp"

namespace lockstep {
namespace {

// A double is a whole number of 53 bits times two to the power of `exponent - 1`, in units of the
// smallest one. Infinity and NaN have the last exponent.
constexpr int kExponents = 2048;
constexpr int kFractionBits = 52;
constexpr int kSmallestUnit = -1074;  // as a power of two

constexpr int kWordBits = 32;
// The highest bit of a sum of 2^60 squares, and what the carries of a rank need.
constexpr int kWords = (kExponents + kFractionBits + 60) / kWordBits + 2;
// After these come the number of infinite squares and of those that are not a number.
constexpr int kAllWords = kWords + 2;

__extension__ typedef unsigned __int128 Wide;

// The sum of those squares that have the same exponent, for each exponent.
struct Sums {
  std::vector<Wide> of_exponent = std::vector<Wide>(kExponents);
  int64_t infinite = 0;
  int64_t undefined = 0;

  template <class Element>
  void add(const Element* elements, int64_t count) {
    constexpr uint64_t kHidden = uint64_t{1} << kFractionBits;
    for (int64_t i = 0; i < count; ++i) {
      const auto element = static_cast<double>(elements[i]);
      const auto bits = std::bit_cast<uint64_t>(element * element);
      const uint64_t exponent = bits >> kFractionBits & (kExponents - 1);
      const uint64_t fraction = bits & (kHidden - 1);
      of_exponent[exponent] += exponent == 0 ? fraction : fraction | kHidden;
      if (exponent == kExponents - 1) ++(fraction == 0 ? infinite : undefined);
    }
  }

  void add(const Sums& other) {
    for (size_t i = 0; i < of_exponent.size(); ++i) of_exponent[i] += other.of_exponent[i];
    infinite += other.infinite;
    undefined += other.undefined;
  }
};

// Makes every word but the last one smaller than 2^32.
void carry(int64_t* words) {
  for (int i = 0; i + 1 < kWords; ++i) {
    words[i + 1] += words[i] >> kWordBits;
    words[i] &= std::numeric_limits<uint32_t>::max();
  }
}

// `value` is in units of the smallest double times two to the power of `shift`.
void add_at(int64_t* words, Wide value, int shift) {
  int64_t* word = words + shift / kWordBits;
  for (; value != 0; value >>= kWordBits, ++word) {
    const uint64_t moved = static_cast<uint64_t>(static_cast<uint32_t>(value))
                           << (shift % kWordBits);
    word[0] += static_cast<uint32_t>(moved);
    word[1] += static_cast<int64_t>(moved >> kWordBits);
  }
}

void write_words(const Sums& sums, int64_t* words) {
  for (int exponent = 0; exponent < kExponents - 1; ++exponent) {
    const Wide value = sums.of_exponent[static_cast<size_t>(exponent)];
    if (value != 0) add_at(words, value, std::max(exponent, 1) - 1);
  }
  carry(words);
  words[kWords] = sums.infinite;
  words[kWords + 1] = sums.undefined;
}

// Whole numbers: neither the threads nor their order change the sum.
void add_elements(const torch::Tensor& flat, Sums& sums) {
  constexpr int64_t kGrain = int64_t{1} << 16;  // elements
  std::mutex mutex;
  parallel_ranges(flat.numel(), kGrain, [&](int64_t begin, int64_t end) {
    Sums own;
    if (flat.scalar_type() == torch::kDouble) {
      own.add(static_cast<const double*>(flat.data_ptr()) + begin, end - begin);
    } else {
      own.add(static_cast<const float*>(flat.data_ptr()) + begin, end - begin);
    }
    const std::lock_guard lock(mutex);
    sums.add(own);
  });
}

}  // namespace

torch::Tensor exact_squares(std::span<const torch::Tensor> gradients, torch::Device home) {
  Sums sums;
  for (const auto& gradient : gradients) {
    if (!gradient.defined() || gradient.numel() == 0) continue;
    const bool is_double = gradient.scalar_type() == torch::kDouble;
    const torch::Tensor on_host =
        gradient.detach().to(torch::kCPU, is_double ? torch::kDouble : torch::kFloat);
    const bool dense = on_host.is_non_overlapping_and_dense();
    add_elements(dense ? on_host : on_host.contiguous(), sums);
  }
  const torch::Tensor words = torch::zeros({kAllWords}, torch::kInt64);
  write_words(sums, words.data_ptr<int64_t>());
  return words.to(home);
}

torch::Tensor value_of_squares(const torch::Tensor& words) {
  const torch::Tensor on_host = words.detach().to(torch::kCPU).clone();
  auto* word = on_host.data_ptr<int64_t>();
  const auto options = torch::TensorOptions(torch::kDouble).device(words.device());
  if (word[kWords + 1] > 0) return torch::full({}, std::nan(""), options);
  if (word[kWords] > 0) return torch::full({}, INFINITY, options);
  carry(word);
  double value = 0;  // the lower words first, so that little is lost
  for (int i = 0; i < kWords; ++i) {
    value += std::ldexp(static_cast<double>(word[i]), i * kWordBits + kSmallestUnit);
  }
  return torch::full({}, value, options);
}

}  // namespace lockstep
