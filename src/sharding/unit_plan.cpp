#include "sharding/unit_plan.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/nn/modules/container/moduledict.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>

#include <algorithm>
#include <map>
#include <unordered_set>

#include "device/dtype_map.hpp"
#include "lockstep/error.hpp"
#include "lockstep/tensor_text.hpp"

namespace lockstep {
namespace {

constexpr int64_t kAlignmentBytes = 64;

int64_t rounded_up(int64_t count, int64_t step) {
  return (count + step - 1) / step * step;
}

// Consecutive parameters of one part of the module.
struct Part {
  std::string name;
  std::vector<std::pair<std::string, torch::Tensor>> parameters;
  int64_t bytes = 0;
};

bool is_list(const torch::nn::Module& module) {
  return module.as<torch::nn::SequentialImpl>() != nullptr ||
         module.as<torch::nn::ModuleListImpl>() != nullptr ||
         module.as<torch::nn::ModuleDictImpl>() != nullptr;
}

// Visits parameters with the name of the part that they belong to: the outermost list's child on
// their path, or else the module's own child; "" for the module's own parameters.
template <class Visit>
void visit_parts(const torch::nn::Module& module, const std::string& prefix,
                 const std::string& part, bool part_is_final, const Visit& visit) {
  for (const auto& item : module.named_parameters(/*recurse=*/false)) {
    if (item.value().defined()) visit(part, prefix + item.key(), item.value());
  }
  const bool list = is_list(module);
  for (const auto& child : module.named_children()) {
    const std::string path = prefix + child.key();
    const bool own = !part_is_final && (list || part.empty());
    visit_parts(*child.value(), path + ".", own ? path : part, part_is_final || list, visit);
  }
}

std::vector<Part> chosen_parts(const torch::nn::Module& module) {
  std::vector<Part> parts;
  std::unordered_set<const c10::TensorImpl*> seen;
  const auto visit = [&](const std::string& part, const std::string& name,
                         const torch::Tensor& parameter) {
    if (!seen.insert(parameter.unsafeGetTensorImpl()).second) return;
    if (parts.empty() || parts.back().name != part) parts.push_back({part, {}, 0});
    parts.back().parameters.emplace_back(name, parameter);
    parts.back().bytes += static_cast<int64_t>(parameter.nbytes());
  };
  visit_parts(module, "", "", false, visit);
  return parts;
}

std::vector<Part> merged(std::vector<Part> parts, int64_t min_bytes) {
  std::vector<Part> units;
  for (Part& part : parts) {
    if (units.empty() || units.back().bytes >= min_bytes) {
      units.push_back(std::move(part));
      continue;
    }
    units.back().bytes += part.bytes;
    for (auto& each : part.parameters) units.back().parameters.push_back(std::move(each));
  }
  // A last small one joins its neighbour.
  if (units.size() > 1 && units.back().bytes < min_bytes) {
    Part last = std::move(units.back());
    units.pop_back();
    for (auto& each : last.parameters) units.back().parameters.push_back(std::move(each));
  }
  return units;
}

std::vector<Part> named_parts(const torch::nn::Module& module,
                              const std::vector<std::string>& names) {
  std::vector<Part> units;
  for (const auto& name : names) units.push_back({name, {}, 0});
  units.push_back({"", {}, 0});
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const auto& item : module.named_parameters()) {
    if (!item.value().defined() || !seen.insert(item.value().unsafeGetTensorImpl()).second)
      continue;
    size_t unit = names.size();
    for (size_t i = 0; i < names.size(); ++i) {
      const bool inside = item.key().starts_with(names[i] + ".");
      // The longest name is the innermost module.
      if (inside && (unit == names.size() || names[i].size() > names[unit].size())) unit = i;
    }
    units[unit].parameters.emplace_back(item.key(), item.value());
  }
  for (size_t i = 0; i < names.size(); ++i) {
    if (!units[i].parameters.empty()) continue;
    throw Error(
        Code::kUsage,
        fmt::format("ShardOptions::units names {}, which has no parameters of its own", names[i]),
        "give names of submodules, such as those of named_children()");
  }
  if (units.back().parameters.empty()) units.pop_back();
  return units;
}

// Units of one part: parameters of one dtype, trained or not.
void add_units(const Part& part, size_t group, const ShardOptions& options, int rank, int ranks,
               std::vector<UnitPlan>& plans) {
  std::map<std::pair<bool, torch::ScalarType>, UnitPlan> by_kind;
  for (const auto& [name, parameter] : part.parameters) {
    const bool trained = parameter.requires_grad();
    if (!trained && (options.stage != ShardStage::kParameters || ranks == 1)) continue;
    const auto dtype = parameter.scalar_type();
    if (!dtype_of(dtype) || parameter.layout() != torch::kStrided) {
      throw Error(
          Code::kTensorMismatch,
          fmt::format("parameter {} is {}, which cannot be divided over ranks", name,
                      dtype_text(dtype)),
          "use a dense parameter of a real floating-point type, or register it as a buffer");
    }
    const int64_t align = kAlignmentBytes / static_cast<int64_t>(parameter.element_size());
    UnitPlan& unit = by_kind[{trained, dtype}];
    unit.trained = trained;
    unit.options = parameter.options().requires_grad(false);
    unit.parameters.push_back({name, parameter, unit.elements});
    unit.elements += rounded_up(parameter.numel(), align);
  }
  for (auto& [kind, unit] : by_kind) {
    const int64_t align =
        kAlignmentBytes / static_cast<int64_t>(unit.parameters[0].whole.element_size());
    unit.name = part.name.empty() ? unit.parameters[0].name : part.name;
    unit.group = group;
    unit.elements = rounded_up(std::max<int64_t>(unit.elements, 1), align * ranks);
    unit.shard_elements = unit.elements / ranks;
    const int64_t own = rank * unit.shard_elements;
    for (UnitParameter& each : unit.parameters) {
      const int64_t begin = std::max(each.offset, own);
      const int64_t end = std::min(each.offset + each.whole.numel(), own + unit.shard_elements);
      each.count = std::max<int64_t>(0, end - begin);
      each.first = each.count == 0 ? 0 : begin - each.offset;
      each.at = each.count == 0 ? 0 : begin - own;
    }
    plans.push_back(std::move(unit));
  }
}

}  // namespace

std::vector<UnitPlan> plan_units(const torch::nn::Module& module, const ShardOptions& options,
                                 int rank, int ranks) {
  const auto parts = options.units.empty() ? merged(chosen_parts(module), options.min_unit_bytes)
                                           : named_parts(module, options.units);
  std::vector<UnitPlan> plans;
  for (size_t i = 0; i < parts.size(); ++i) {
    add_units(parts[i], i, options, rank, ranks, plans);
  }
  return plans;
}

}  // namespace lockstep
