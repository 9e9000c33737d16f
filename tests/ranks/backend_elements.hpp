#pragma once

#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include "comm/backend.hpp"

namespace lockstep::test {

// F16 and BF16 of numbers that both hold exactly: small, and with few bits.
inline uint16_t to_half(double value) {
  if (value == 0) return 0;
  int exponent = 0;
  const double mantissa = std::frexp(std::abs(value), &exponent);  // in [0.5, 1)
  const auto bits = static_cast<uint16_t>(std::lround((mantissa * 2 - 1) * 1024));
  const auto sign = static_cast<uint16_t>(value < 0 ? 0x8000 : 0);
  return static_cast<uint16_t>(sign + ((exponent + 14) << 10) + bits);
}

inline double from_half(uint16_t half) {
  const int exponent = (half >> 10) & 31;
  const double fraction = (half & 1023) / 1024.0;
  const double value =
      exponent == 0 ? std::ldexp(fraction, -14) : std::ldexp(1 + fraction, exponent - 15);
  return (half & 0x8000) != 0 ? -value : value;
}

inline uint16_t to_bfloat(double value) {
  return static_cast<uint16_t>(std::bit_cast<uint32_t>(static_cast<float>(value)) >> 16);
}

inline double from_bfloat(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

/// The distance between 1 and the next number, 0 for integers.
inline double epsilon_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::kF64:
      return 0x1p-52;
    case Dtype::kF32:
      return 0x1p-23;
    case Dtype::kF16:
      return 0x1p-10;
    case Dtype::kBF16:
      return 0x1p-7;
    default:
      return 0;
  }
}

/// Elements of any type somewhere in memory, as numbers.
class Elements {
 public:
  Elements(void* data, int64_t count, Dtype dtype)
      : data_(static_cast<std::byte*>(data)), count_(count), dtype_(dtype) {}

  Buffer buffer() const { return {data_, count_, dtype_}; }
  ConstBuffer const_buffer() const { return {data_, count_, dtype_}; }
  int64_t count() const { return count_; }

  void set(int64_t i, double value) const {
    switch (dtype_) {
      case Dtype::kF32:
        return put(i, static_cast<float>(value));
      case Dtype::kF64:
        return put(i, value);
      case Dtype::kF16:
        return put(i, to_half(value));
      case Dtype::kBF16:
        return put(i, to_bfloat(value));
      case Dtype::kI64:
        return put(i, static_cast<int64_t>(value));
      default:
        return put(i, static_cast<uint8_t>(value));
    }
  }

  double get(int64_t i) const {
    switch (dtype_) {
      case Dtype::kF32:
        return take<float>(i);
      case Dtype::kF64:
        return take<double>(i);
      case Dtype::kF16:
        return from_half(take<uint16_t>(i));
      case Dtype::kBF16:
        return from_bfloat(take<uint16_t>(i));
      case Dtype::kI64:
        return static_cast<double>(take<int64_t>(i));
      default:
        return take<uint8_t>(i);
    }
  }

  template <class Value>
  void fill(Value&& value) const {
    for (int64_t i = 0; i < count_; ++i) set(i, value(i));
  }

  /// The first index whose element is not value(i) within `ulps` of its size, or -1.
  template <class Value>
  int64_t first_wrong(Value&& value, double ulps = 0) const {
    for (int64_t i = 0; i < count_; ++i) {
      const double expected = value(i);
      const double allowed = ulps * epsilon_of(dtype_) * std::abs(expected);
      if (!(std::abs(get(i) - expected) <= allowed)) return i;
    }
    return -1;
  }

 private:
  template <class T>
  void put(int64_t i, T value) const {
    std::memcpy(data_ + i * static_cast<int64_t>(sizeof(T)), &value, sizeof value);
  }
  template <class T>
  T take(int64_t i) const {
    T value;
    std::memcpy(&value, data_ + i * static_cast<int64_t>(sizeof(T)), sizeof value);
    return value;
  }

  std::byte* data_;
  int64_t count_;
  Dtype dtype_;
};

/// Elements with private memory of their own.
class OwnElements {
 public:
  OwnElements(int64_t count, Dtype dtype)
      : memory_(static_cast<size_t>(count * dtype_bytes(dtype)) + 1),
        elements_(memory_.data(), count, dtype) {}
  const Elements* operator->() const { return &elements_; }
  const Elements& operator*() const { return elements_; }
  const std::vector<std::byte>& bytes() const { return memory_; }

 private:
  std::vector<std::byte> memory_;  // one byte more than needed: there is an address even for none
  Elements elements_;
};

}  // namespace lockstep::test
