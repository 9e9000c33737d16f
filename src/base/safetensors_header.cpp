#include "safetensors_header.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <limits>
#include <set>
#include <tuple>

namespace lockstep {
namespace {

constexpr int kMaxDepth = 3;  // header { entry { shape [

struct DtypeEntry {
  Dtype dtype;
  std::string_view name;
  int64_t bytes;
};

constexpr std::array<DtypeEntry, 10> kDtypes = {{{Dtype::kBool, "BOOL", 1},
                                                 {Dtype::kU8, "U8", 1},
                                                 {Dtype::kI8, "I8", 1},
                                                 {Dtype::kI16, "I16", 2},
                                                 {Dtype::kI32, "I32", 4},
                                                 {Dtype::kI64, "I64", 8},
                                                 {Dtype::kF16, "F16", 2},
                                                 {Dtype::kBF16, "BF16", 2},
                                                 {Dtype::kF32, "F32", 4},
                                                 {Dtype::kF64, "F64", 8}}};

const DtypeEntry& entry_of(Dtype dtype) {
  return kDtypes.at(static_cast<size_t>(dtype));
}

}  // namespace

int64_t dtype_bytes(Dtype dtype) {
  return entry_of(dtype).bytes;
}

std::string_view dtype_name(Dtype dtype) {
  return entry_of(dtype).name;
}

namespace safetensors_header {

std::string in_quotes(std::string_view text) {
  constexpr size_t kShown = 100;
  const std::string_view head = text.substr(0, kShown);
  return json(head).dump(-1, ' ', false, json::error_handler_t::replace) +
         (text.size() > kShown ? "…" : "");
}

std::optional<int64_t> tensor_bytes(const std::vector<int64_t>& shape, Dtype dtype) {
  // A zero anywhere makes the tensor empty, however large the other dimensions are.
  if (std::find(shape.begin(), shape.end(), 0) != shape.end()) return 0;
  int64_t bytes = dtype_bytes(dtype);
  for (const int64_t size : shape) {
    if (size > std::numeric_limits<int64_t>::max() / bytes) return std::nullopt;
    bytes *= size;
  }
  return bytes;
}

json HeaderCheck::parse(const std::string& text) const {
  if (text.empty() || text.front() != '{') fail("the header does not start with '{'");
  // The JSON parser takes a NUL byte for the end of the text and would hide what follows it.
  if (text.find('\0') != std::string::npos) fail("the header holds a NUL byte");
  // The parser keeps the last of two equal keys and nests without limit; neither is safe here.
  std::vector<std::set<std::string>> keys_of_open_objects;
  const auto guard = [&](int depth, json::parse_event_t event, json& parsed) {
    using Event = json::parse_event_t;
    const bool opens = event == Event::object_start || event == Event::array_start;
    if (opens && depth >= kMaxDepth)
      fail(fmt::format("the header nests deeper than {}", kMaxDepth));
    if (event == Event::object_start) keys_of_open_objects.emplace_back();
    if (event == Event::object_end) keys_of_open_objects.pop_back();
    if (event == Event::key) {
      const auto& key = parsed.get_ref<const std::string&>();
      if (!keys_of_open_objects.back().insert(key).second) {
        fail(fmt::format("the header has the key {} twice", in_quotes(key)));
      }
    }
    return true;
  };
  try {
    return json::parse(text, guard);
  } catch (const json::parse_error& error) {
    fail(fmt::format("the header is not valid JSON at byte {}", error.byte));
  } catch (const json::exception&) {
    fail("the header is not valid JSON: a number is out of range");
  }
}

std::map<std::string, std::string> HeaderCheck::metadata(const json& header) const {
  std::map<std::string, std::string> texts;
  const auto found = header.find(kMetadataKey);
  if (found == header.end()) return texts;
  if (!found->is_object()) fail(fmt::format("{} is not an object of texts", kMetadataKey));
  for (const auto& [key, value] : found->items()) {
    if (!value.is_string()) fail(fmt::format("{} {} is not a text", kMetadataKey, in_quotes(key)));
    texts.emplace(key, value.get<std::string>());
  }
  return texts;
}

std::vector<int64_t> HeaderCheck::whole_numbers(const std::string& name, const char* field,
                                                const json& value) const {
  if (!value.is_array()) fail(fmt::format("{} of tensor {} is not a list", field, in_quotes(name)));
  std::vector<int64_t> numbers;
  for (const auto& number : value) {
    // Negative numbers are not "unsigned" to the parser; fractions and those past 2^64 are floats.
    if (!number.is_number_unsigned() ||
        number.get<uint64_t>() > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
      fail(fmt::format("{} of tensor {} holds {}, which is not a whole number from 0 to 2^63-1",
                       field, in_quotes(name), number.is_number() ? number.dump() : "no number"));
    }
    numbers.push_back(number.get<int64_t>());
  }
  return numbers;
}

Dtype HeaderCheck::dtype(const std::string& name, const json& value) const {
  if (!value.is_string()) fail(fmt::format("dtype of tensor {} is not a text", in_quotes(name)));
  const auto& text = value.get_ref<const std::string&>();
  std::vector<std::string_view> names;
  for (const auto& known : kDtypes) {
    if (known.name == text) return known.dtype;
    names.push_back(known.name);
  }
  fail(fmt::format("tensor {} has dtype {}", in_quotes(name), in_quotes(text)),
       fmt::format("lockstep reads {}; convert the tensor first", fmt::join(names, ", ")));
}

TensorInfo HeaderCheck::tensor(const std::string& name, const json& entry) const {
  if (name.empty()) fail("a tensor has an empty name");
  if (!entry.is_object())
    fail(fmt::format("the entry of tensor {} is not an object", in_quotes(name)));
  for (const char* field : {"dtype", "shape", "data_offsets"}) {
    if (!entry.contains(field)) fail(fmt::format("tensor {} has no {}", in_quotes(name), field));
  }
  if (entry.size() != 3) {
    fail(fmt::format("tensor {} has {} fields; dtype, shape and data_offsets are all there may be",
                     in_quotes(name), entry.size()));
  }
  TensorInfo info;
  info.name = name;
  info.dtype = dtype(name, entry["dtype"]);
  info.shape = whole_numbers(name, "shape", entry["shape"]);
  if (info.shape.size() > kMaxDimensions) {
    fail(fmt::format("tensor {} has {} dimensions; {} are the most there may be", in_quotes(name),
                     info.shape.size(), kMaxDimensions));
  }
  const auto offsets = whole_numbers(name, "data_offsets", entry["data_offsets"]);
  if (offsets.size() != 2) {
    fail(fmt::format("data_offsets of tensor {} has {} numbers instead of 2", in_quotes(name),
                     offsets.size()));
  }
  info.begin = offsets[0];
  info.end = offsets[1];
  if (info.begin > info.end) {
    fail(fmt::format("tensor {} begins at {} and ends before that, at {}", in_quotes(name),
                     info.begin, info.end));
  }
  if (info.end > data_bytes_) {
    fail(fmt::format("tensor {} ends at byte {} of the data, but the file has {} bytes of data",
                     in_quotes(name), info.end, data_bytes_));
  }
  const auto needed = tensor_bytes(info.shape, info.dtype);
  if (!needed) {
    fail(fmt::format("the shape of tensor {}, [{}], has more than 2^63-1 bytes", in_quotes(name),
                     fmt::join(info.shape, ", ")));
  }
  if (*needed != info.bytes()) {
    fail(fmt::format("tensor {} of {} [{}] needs {} bytes, but its offsets {} to {} hold {}",
                     in_quotes(name), dtype_name(info.dtype), fmt::join(info.shape, ", "), *needed,
                     info.begin, info.end, info.bytes()));
  }
  return info;
}

std::vector<TensorInfo> HeaderCheck::tensors(const json& header) const {
  std::vector<TensorInfo> infos;
  for (const auto& [name, entry] : header.items()) {
    if (name != kMetadataKey) infos.push_back(tensor(name, entry));
  }
  // Empty tensors before the one that starts at the same byte.
  std::sort(infos.begin(), infos.end(), [](const auto& a, const auto& b) {
    return std::tie(a.begin, a.end, a.name) < std::tie(b.begin, b.end, b.name);
  });
  check_coverage(infos);
  return infos;
}

void HeaderCheck::check_coverage(const std::vector<TensorInfo>& tensors) const {
  int64_t covered = 0;
  std::string before = "the start of the data";
  for (const auto& info : tensors) {
    if (info.begin < covered) {
      fail(fmt::format("tensor {} begins at byte {} and overlaps {}, which ends at {}",
                       in_quotes(info.name), info.begin, before, covered));
    }
    if (info.begin > covered) {
      fail(fmt::format("a hole of {} bytes between {}, byte {}, and tensor {}, byte {}",
                       info.begin - covered, before, covered, in_quotes(info.name), info.begin));
    }
    covered = info.end;
    before = "tensor " + in_quotes(info.name);
  }
  if (covered != data_bytes_) {
    fail(fmt::format("the tensors end at byte {} of the data, but the file has {} bytes of data",
                     covered, data_bytes_));
  }
}

}  // namespace safetensors_header
}  // namespace lockstep
