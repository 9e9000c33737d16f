#include "checkpoint/compare.hpp"

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <set>
#include <utility>

namespace lockstep {
namespace {

template <class T>
T element_at(const std::byte* address) {
  T value;
  std::memcpy(&value, address, sizeof(T));
  return value;
}

double half_value(uint16_t bits) {
  const int exponent = (bits >> 10) & 31;
  const int fraction = bits & 1023;
  const double sign = (bits & 0x8000) != 0 ? -1 : 1;
  if (exponent == 31) {
    return fraction != 0 ? std::numeric_limits<double>::quiet_NaN()
                         : sign * std::numeric_limits<double>::infinity();
  }
  if (exponent == 0) return sign * std::ldexp(fraction, -24);
  return sign * std::ldexp(1024 + fraction, exponent - 25);
}

double value_at(Dtype dtype, const std::byte* address) {
  switch (dtype) {
    case Dtype::kBool:
    case Dtype::kU8:
      return element_at<uint8_t>(address);
    case Dtype::kI8:
      return element_at<int8_t>(address);
    case Dtype::kI16:
      return element_at<int16_t>(address);
    case Dtype::kI32:
      return element_at<int32_t>(address);
    case Dtype::kI64:
      return static_cast<double>(element_at<int64_t>(address));
    case Dtype::kF16:
      return half_value(element_at<uint16_t>(address));
    case Dtype::kBF16:
      return std::bit_cast<float>(uint32_t{element_at<uint16_t>(address)} << 16);
    case Dtype::kF32:
      return element_at<float>(address);
    case Dtype::kF64:
      return element_at<double>(address);
  }
  return 0;
}

}  // namespace

Difference compare_elements(Dtype dtype, std::span<const std::byte> first,
                            std::span<const std::byte> second) {
  Difference found;
  const auto width = static_cast<size_t>(dtype_bytes(dtype));
  for (size_t at = 0; at + width <= first.size(); at += width) {
    if (std::memcmp(first.data() + at, second.data() + at, width) == 0) continue;
    ++found.elements;
    const double distance =
        std::abs(value_at(dtype, first.data() + at) - value_at(dtype, second.data() + at));
    if (std::isnan(found.largest)) continue;
    if (std::isnan(distance) || distance > found.largest) found.largest = distance;
  }
  return found;
}

std::vector<Difference> compare(const CheckpointReader& first, const CheckpointReader& second) {
  using Kind = Difference::Kind;
  std::set<std::pair<std::string, std::string>> names;
  for (const auto* reader : {&first, &second}) {
    for (const auto& tensor : reader->manifest().tensors)
      names.emplace(tensor.section, tensor.name);
    for (const auto& [section, value] : reader->manifest().values.items()) {
      names.emplace(section, "");
    }
  }
  std::vector<Difference> differences;
  for (const auto& [section, name] : names) {
    Difference found;
    if (name.empty()) {
      const auto& a = first.manifest().values;
      const auto& b = second.manifest().values;
      if (a.contains(section) && b.contains(section)) {
        if (a[section] == b[section]) continue;
      } else {
        // A section with tensors may have a value in one of the two only.
        found.kind = a.contains(section) ? Kind::kOnlyFirst : Kind::kOnlySecond;
      }
    } else {
      const StoredTensor* a = first.manifest().find(section, name);
      const StoredTensor* b = second.manifest().find(section, name);
      if (a == nullptr || b == nullptr) {
        found.kind = b == nullptr ? Kind::kOnlyFirst : Kind::kOnlySecond;
      } else if (a->shape() != b->shape()) {
        found.kind = Kind::kOtherShape;
      } else if (a->dtype != b->dtype) {
        found.kind = Kind::kOtherDtype;
      } else {
        found = compare_elements(a->dtype, first.read(*a), second.read(*b));
        if (found.elements == 0) continue;
      }
    }
    found.section = section;
    found.name = name;
    differences.push_back(std::move(found));
  }
  return differences;
}

}  // namespace lockstep
