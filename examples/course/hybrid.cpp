#include "course/hybrid.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/torch.h>

#include <algorithm>
#include <charconv>
#include <numeric>
#include <optional>

#include "course/layers.hpp"
#include "lockstep/error.hpp"
#include "lockstep/rank_environment.hpp"
#include "lockstep/stages.hpp"

namespace course {
namespace {

using lockstep::Code;
using lockstep::Error;
using lockstep::Schedule;

// "3,2": whole numbers from `least` on, one for each stage.
std::vector<int64_t> parse_list(const char* flag, const std::string& text, const char* words,
                                int64_t least, int64_t stages) {
  std::vector<int64_t> numbers;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t comma = std::min(text.find(',', begin), text.size());
    int64_t number = 0;
    const auto [end, error] = std::from_chars(text.data() + begin, text.data() + comma, number);
    if (error != std::errc() || end != text.data() + comma || number < least) {
      throw Error(Code::kUsage,
                  fmt::format("{} {}: \"{}\" is not a number from {} on", flag, text,
                              text.substr(begin, comma - begin), least),
                  fmt::format("use {}, or a number for each stage", words));
    }
    numbers.push_back(number);
    begin = comma + 1;
  }
  if (static_cast<int64_t>(numbers.size()) == stages) return numbers;
  throw Error(Code::kUsage,
              fmt::format("{} {} has {} numbers, but there are {} stages", flag, text,
                          numbers.size(), stages),
              "give a number for each stage, or change --stages");
}

// Devices of a rank, numbered from 0 without a gap: an unused one would only take cores.
std::vector<int> parse_places(const Options& options) {
  const auto numbers =
      parse_list("--place", options.place, "same, split, ranks", 0, options.stages);
  const int64_t most = *std::max_element(numbers.begin(), numbers.end());
  for (int64_t device = 0; device <= most; ++device) {
    if (std::find(numbers.begin(), numbers.end(), device) != numbers.end()) continue;
    throw Error(Code::kUsage,
                fmt::format("--place {} uses device {} but not {}", options.place, most, device),
                "number the devices from 0 without a gap");
  }
  return {numbers.begin(), numbers.end()};
}

Schedule place_schedule(const Options& options) {
  const Schedule schedule = lockstep::make_schedule(
      options.schedule, static_cast<int>(options.stages), static_cast<int>(options.micro_batches),
      static_cast<int>(options.chunks));
  if (options.place == "split" || options.place == "ranks") return schedule;
  const auto places = options.place == "same"
                          ? std::vector<int>(static_cast<size_t>(options.stages), 0)
                          : parse_places(options);
  return lockstep::on_places(schedule, places);
}

// --cut for a model of so many layers; none where it is to be measured.
std::optional<std::vector<int64_t>> planned_cut(const Options& options, int64_t layers) {
  if (options.stages > layers) {
    throw Error(Code::kUsage,
                fmt::format("--stages {} is more than the {} layer{} of this model", options.stages,
                            layers, layers == 1 ? "" : "s"),
                fmt::format("give --stages {}{}, or a larger --depth", layers,
                            layers == 1 ? "" : " or fewer"));
  }
  if (options.cut == "time") return std::nullopt;
  const auto equal = lockstep::cut_by_count(layers, options.stages);
  if (options.cut == "count") return equal;
  const auto cut = parse_list("--cut", options.cut, "count, time", 1, options.stages);
  const int64_t sum = std::accumulate(cut.begin(), cut.end(), int64_t{0});
  if (sum == layers) return cut;
  throw Error(
      Code::kUsage,
      fmt::format("--cut {} has {} layers, but the model has {}", options.cut, sum, layers),
      fmt::format("give numbers that add up to {}, such as {}", layers, fmt::join(equal, ",")));
}

void require_rows(const Options& options, int pipelines) {
  const int64_t fewest = options.batch / pipelines;
  if (fewest >= options.micro_batches) return;
  throw Error(Code::kSplit,
              pipelines == 1 ? fmt::format("--micro-batches {} cannot be made from --batch {}",
                                           options.micro_batches, options.batch)
                             : fmt::format("--micro-batches {} cannot be made from {} rows, which "
                                           "--batch {} leaves to one of {} ranks with own rows",
                                           options.micro_batches, fewest, options.batch, pipelines),
              fmt::format("give --batch {} or more, or fewer micro-batches",
                          options.micro_batches * pipelines));
}

}  // namespace

std::vector<lockstep::MeshAxis> HybridPlan::axes() const {
  return {{"dp", data}, {"pp", pipeline}, {"tp", tensor}};
}

HybridPlan plan_hybrid(const Options& options, int ranks) {
  HybridPlan plan{
      .schedule = place_schedule(options), .over_ranks = options.place == "ranks", .data = ranks};
  if (options.recompute) {
    plan.recompute.resize(static_cast<size_t>(options.stages));
    std::iota(plan.recompute.begin(), plan.recompute.end(), 0);
  }
  if (plan.over_ranks) {
    plan.pipeline = plan.schedule.places();
    plan.tensor = static_cast<int>(options.tensor_parallel);
    const int needed = plan.pipeline * plan.tensor;
    if (ranks % needed != 0) {
      const std::string tensor =
          plan.tensor == 1 ? "" : fmt::format(" x --tensor-parallel {}", plan.tensor);
      throw Error(
          Code::kWorld,
          fmt::format("{} rank{} cannot be divided into pipelines of {} place{}{}", ranks,
                      ranks == 1 ? "" : "s", plan.pipeline, plan.pipeline == 1 ? "" : "s", tensor),
          fmt::format("start {0} ranks or a multiple: lockstep run -n {0} …", needed));
    }
    plan.data = ranks / needed;
  }
  require_rows(options, plan.data);
  require_tensor_parallel_sizes(options, plan.tensor);
  planned_cut(options, count_layers(options, plan.tensor));  // refuses what does not fit
  return plan;
}

HybridPlan plan_hybrid(const Options& options) {
  return plan_hybrid(options, lockstep::RankEnvironment::from_env().world_size);
}

std::vector<int64_t> choose_cut(const Options& options, const torch::nn::Sequential& layers,
                                const torch::Tensor& rows, const lockstep::Communicator& world) {
  const auto count = static_cast<int64_t>(layers->size());
  if (const auto cut = planned_cut(options, count)) return *cut;
  auto cost = lockstep::measure_layers(layers, rows);
  world.broadcast(torch::from_blob(cost.data(), {count}, torch::kDouble), 0,
                  {.label = "time of each layer"});
  return lockstep::cut_by_cost(cost, options.stages);
}

}  // namespace course
