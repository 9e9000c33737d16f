#include "cli/verify/traced_run.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <span>

#include "base/safetensors.hpp"
#include "lockstep/error.hpp"

namespace lockstep::cli {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr const char* kMetadata = "lockstep_verify";

double from_bfloat16(uint16_t bits) {
  const uint32_t wide = uint32_t{bits} << 16U;
  float value = 0;
  std::memcpy(&value, &wide, sizeof(value));
  return value;
}

double from_float16(uint16_t bits) {
  const int exponent = bits >> 10U & 0x1fU;
  const int fraction = bits & 0x3ffU;
  const double sign = (bits & 0x8000U) != 0 ? -1 : 1;
  if (exponent == 31) return fraction == 0 ? sign * INFINITY : NAN;
  if (exponent == 0) return sign * std::ldexp(fraction, -24);
  return sign * std::ldexp(1024 + fraction, exponent - 25);
}

template <class Number, class Convert>
std::vector<double> converted(std::span<const std::byte> bytes, Convert&& convert) {
  std::vector<double> values(bytes.size() / sizeof(Number));
  for (size_t i = 0; i < values.size(); ++i) {
    Number number;
    std::memcpy(&number, bytes.data() + i * sizeof(Number), sizeof(Number));
    values[i] = convert(number);
  }
  return values;
}

// A slice as StepRecorder writes it; the whole tensor where it wrote none.
Slice slice_from(const json& slices, const std::string& key, const Shape& shape) {
  const auto found = slices.find(key);
  if (found == slices.end()) return whole_slice(shape);
  Slice slice{found->at("whole").get<Shape>(), found->at("local").get<Shape>(), {}};
  for (const auto& block : found->at("blocks")) {
    slice.blocks.push_back(
        {block.at(0).get<Shape>(), block.at(1).get<Shape>(), block.at(2).get<Shape>()});
  }
  return slice;
}

void read_file(const fs::path& path, TracedStep& step) {
  const SafetensorsReader reader(path.string());
  const auto text = reader.metadata().find(kMetadata);
  if (text == reader.metadata().end()) {
    throw Error(Code::kFileFormat, fmt::format("{} is no recorded step", path.string()),
                "let `lockstep verify` use a folder of its own");
  }
  json facts = json::parse(text->second);
  const int rank = facts.at("rank").get<int>();
  for (const auto& info : reader.tensors()) {
    TracedPiece piece{rank, info.dtype, slice_from(facts.at("slices"), info.name, info.shape), {}};
    piece.bytes.resize(static_cast<size_t>(info.bytes()));
    reader.read(info, piece.bytes);
    step.pieces[info.name].push_back(std::move(piece));
  }
  if (facts.contains("factor")) {
    step.updates[rank].push_back(std::move(facts));
  } else {
    step.facts[rank] = std::move(facts);
  }
}

}  // namespace

double factor_of(const json& update) {
  const json& factor = update.at("factor");
  return factor.is_number() ? factor.get<double>() : 1;
}

std::vector<double> TracedPiece::values() const {
  const auto same = [](auto number) { return static_cast<double>(number); };
  switch (dtype) {
    case Dtype::kF64:
      return converted<double>(bytes, same);
    case Dtype::kF32:
      return converted<float>(bytes, same);
    case Dtype::kBF16:
      return converted<uint16_t>(bytes, from_bfloat16);
    case Dtype::kF16:
      return converted<uint16_t>(bytes, from_float16);
    case Dtype::kI64:
      return converted<int64_t>(bytes, same);
    case Dtype::kI32:
      return converted<int32_t>(bytes, same);
    case Dtype::kI16:
      return converted<int16_t>(bytes, same);
    default:
      return converted<uint8_t>(bytes, same);
  }
}

std::set<std::string> TracedStep::words(const char* list) const {
  std::set<std::string> all;
  for (const auto& [rank, own] : facts) all.merge(own.at(list).get<std::set<std::string>>());
  return all;
}

double TracedStep::factor(int rank, const std::string& parameter) const {
  const auto found = updates.find(rank);
  if (found == updates.end()) return 1;
  for (const json& update : found->second) {
    if (update.at("rates").contains(parameter)) return factor_of(update);
  }
  return 1;
}

std::map<std::string, double> TracedStep::rates() const {
  std::map<std::string, double> rates;
  for (const auto& [rank, own] : updates) {
    for (const json& update : own) {
      for (const auto& [name, rate] : update.at("rates").items()) {
        if (rate.is_number()) rates.emplace(name, rate.get<double>());
      }
    }
  }
  return rates;
}

bool TracedStep::holds_parts() const {
  for (const auto& [key, all] : pieces) {
    if (!key.starts_with("weight/")) continue;
    if (std::any_of(all.begin(), all.end(),
                    [](const TracedPiece& piece) { return !piece.is_whole(); })) {
      return true;
    }
  }
  return false;
}

bool TracedStep::is_skipped(int rank) const {
  const auto found = updates.find(rank);
  return found != updates.end() &&
         std::any_of(found->second.begin(), found->second.end(),
                     [](const json& update) { return update.value("skipped", false); });
}

std::optional<std::vector<double>> TracedStep::merged(const std::string& key) const {
  const auto found = pieces.find(key);
  if (found == pieces.end()) return std::nullopt;
  const auto& all = found->second;
  for (const auto& piece : all) {
    if (piece.is_whole()) return piece.values();
  }
  const auto count = element_count(all.front().slice.whole);
  std::vector<double> values(static_cast<size_t>(count.value_or(0)));
  std::vector<bool> known(values.size());
  for (const auto& piece : all) {
    const auto runs = runs_of(piece.slice);
    if (!runs) return std::nullopt;
    const auto own = piece.values();
    for (const Run& run : *runs) {
      for (int64_t i = 0; i < run.count; ++i) {
        const auto at = static_cast<size_t>(run.whole + i);
        if (known[at]) continue;
        values[at] = own[static_cast<size_t>(run.local + i)];
        known[at] = true;
      }
    }
  }
  if (std::find(known.begin(), known.end(), false) != known.end()) return std::nullopt;
  return values;
}

TracedRun::TracedRun(fs::path folder) : folder_(std::move(folder)) {
  for (const auto& entry : fs::directory_iterator(folder_)) {
    const std::string name = entry.path().filename().string();
    long long step = 0;
    int rank = 0;
    if (std::sscanf(name.c_str(), "step-%lld.rank-%d.", &step, &rank) != 2) continue;
    if (!name.ends_with(".safetensors")) continue;
    files_[step].push_back(entry.path());
    ranks_ = std::max(ranks_, rank + 1);
  }
  for (auto& [step, files] : files_) {
    std::sort(files.begin(), files.end());  // updates in the order of their optimizers
    steps_.push_back(step);
  }
}

TracedStep TracedRun::read(int64_t step) const {
  TracedStep traced{.step = step};
  for (const auto& file : files_.at(step)) read_file(file, traced);
  const auto by_rank = [](const TracedPiece& a, const TracedPiece& b) { return a.rank < b.rank; };
  for (auto& [key, pieces] : traced.pieces) {
    std::stable_sort(pieces.begin(), pieces.end(), by_rank);
  }
  return traced;
}

std::map<int64_t, double> TracedRun::losses() const {
  std::map<int64_t, std::map<int, double>> of_ranks;  // a repeated step counts once
  for (int rank = 0; rank < ranks_; ++rank) {
    std::ifstream file(folder_ / fmt::format("rank-{}.losses", rank));
    int64_t step = 0;
    for (std::string loss; file >> step >> loss;) of_ranks[step][rank] = std::stod(loss);
  }
  std::map<int64_t, double> losses;
  for (const auto& [step, by_rank] : of_ranks) {
    if (!files_.contains(step)) continue;
    std::map<int, double> weights;
    std::map<int, double> rows;
    bool weighed = false;
    for (const auto& path : files_.at(step)) {
      if (path.filename().string().find(".facts.") == std::string::npos) continue;
      const json facts = json::parse(SafetensorsReader(path.string()).metadata().at(kMetadata));
      const int rank = facts.at("rank").get<int>();
      weights[rank] = facts.at("weight").get<double>();
      weighed = weighed || facts.value("weighed", false);
      if (!facts.at("rows").empty()) rows[rank] = static_cast<double>(facts.at("rows").size());
    }
    if (by_rank.size() != weights.size() || weighed) continue;
    const bool alike = std::all_of(weights.begin(), weights.end(), [&](const auto& each) {
      return each.second == weights.begin()->second;
    });
    if (alike && rows.size() == weights.size()) weights = std::move(rows);
    double sum = 0;
    double all = 0;
    for (const auto& [rank, loss] : by_rank) {
      sum += weights[rank] * loss;
      all += weights[rank];
    }
    if (all > 0) losses[step] = sum / all;
  }
  return losses;
}

std::string parameter_of(const std::string& key) {
  std::string name = key.substr(key.find('/') + 1);
  if (key.starts_with("state/")) name.erase(name.rfind('/'));
  return name;
}

}  // namespace lockstep::cli
