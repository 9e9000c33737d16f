#include "course/hybrid.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/torch.h>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <numeric>
#include <optional>

#include "lockstep/autocast.hpp"
#include "lockstep/error.hpp"
#include "lockstep/pipeline.hpp"
#include "lockstep/rank_environment.hpp"
#include "lockstep/split.hpp"
#include "lockstep/units.hpp"

namespace course {
namespace {

using lockstep::Code;
using lockstep::Error;
using lockstep::Schedule;

// Reads "3,2": whole numbers from `least` on, one for each stage.
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
              fmt::format("{} {} has {} number{}, but the stages are {}", flag, text,
                          numbers.size(), numbers.size() == 1 ? "" : "s", stages),
              "give a number for each stage, or change --stages");
}

// --place as device numbers of a rank, from 0 without a gap: an unused device would only take
// cores.
std::vector<int> parse_devices(const Options& options) {
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

Schedule make_placed_schedule(const Options& options) {
  const Schedule schedule = lockstep::make_schedule(
      options.schedule, static_cast<int>(options.stages), static_cast<int>(options.micro_batches),
      static_cast<int>(options.chunks));
  if (options.place == "split" || options.place == "ranks") return schedule;
  const auto devices = options.place == "same"
                           ? std::vector<int>(static_cast<size_t>(options.stages), 0)
                           : parse_devices(options);
  return lockstep::on_ranks(schedule, devices);
}

// --cut for a model of so many layers; none if it is to be measured.
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
      fmt::format("--cut {} has {} layer{}, but the model has {}", options.cut, sum,
                  sum == 1 ? "" : "s", layers),
      fmt::format("give numbers that add up to {}, such as {}", layers, fmt::join(equal, ",")));
}

// With --virtual-shards every micro-batch is one of them.
int64_t parts_of_data_rank(const Options& options, int data) {
  if (options.virtual_shards % data == 0) return options.virtual_shards / data;
  throw Error(Code::kSplit,
              fmt::format("--virtual-shards {} cannot be divided over {} data ranks",
                          options.virtual_shards, data),
              "give a multiple of every number of data ranks that you will use");
}

void require_micro_batch_rows(const Options& options, int pipelines) {
  const int64_t fewest = options.batch / pipelines;
  if (fewest >= options.micro_batches) return;
  throw Error(Code::kSplit,
              pipelines == 1 ? fmt::format("--micro-batches {} cannot be made from --batch {}",
                                           options.micro_batches, options.batch)
                             : fmt::format("--micro-batches {} cannot be made from {} rows, which "
                                           "--batch {} leaves to one of {} data ranks",
                                           options.micro_batches, fewest, options.batch, pipelines),
              fmt::format("give --batch {} or more, or fewer micro-batches",
                          options.micro_batches * pipelines));
}

// Layers per stage, as --cut says. Times are measured with `rows` and are the same on all ranks of
// `world`. Collective.
std::vector<int64_t> choose_cut(const Options& options, const torch::nn::Sequential& layers,
                                const torch::Tensor& rows, const lockstep::Communicator& world) {
  const auto count = static_cast<int64_t>(layers->size());
  if (const auto cut = planned_cut(options, count)) return *cut;
  auto cost = lockstep::measure_layers(layers, rows);
  world.broadcast(torch::from_blob(cost.data(), {count}, torch::kDouble), 0,
                  {.label = "time of each layer"});
  return lockstep::cut_by_cost(cost, options.stages);
}

// Sends one row through the layers, without gradients, to see their shapes.
std::vector<LayerShape> probe_layers(const Layers& model, torch::Tensor x) {
  const torch::NoGradGuard no_grad;
  std::vector<LayerShape> shapes;
  auto layers = model.layers();
  for (auto& layer : *layers) {
    const auto before = model.tensor_traffic();
    const auto out = layer.forward<torch::Tensor>(x);
    const auto after = model.tensor_traffic();
    shapes.push_back({.input_bytes = static_cast<int64_t>(x.nbytes()),
                      .output_bytes = static_cast<int64_t>(out.nbytes()),
                      .tensor_calls = after.calls - before.calls,
                      .tensor_bytes = after.sent_bytes - before.sent_bytes});
    x = out;
  }
  return shapes;
}

std::string home_of(int stage, const lockstep::Device& device) {
  return fmt::format("stage {} on {}", stage, device.name());
}

// The schedule's ranks by name: devices of rank 0, or ranks of the job.
std::vector<std::string> names_of_ranks(const HybridPlan& plan, const lockstep::World& world) {
  std::vector<std::string> names;
  for (int rank = 0; rank < plan.schedule.ranks(); ++rank) {
    names.push_back(plan.over_ranks ? fmt::format("rank {}", rank * plan.tensor)
                                    : world.devices()[static_cast<size_t>(rank)].name());
  }
  return names;
}

// The schedule alone: every action takes the same time.
std::string unit_grid(const HybridPlan& plan, const lockstep::World& world) {
  const std::vector<lockstep::StageTimes> times(plan.schedule.rank_of_stage.size());
  return lockstep::format_grid(plan.schedule, lockstep::simulate(plan.schedule, times),
                               {.rank_names = names_of_ranks(plan, world)});
}

std::string axes_text(const HybridPlan& plan) {
  if (!plan.over_ranks) {
    return fmt::format("data parallel over {} process{}, {} device{} in each", plan.data,
                       plan.data == 1 ? "" : "es", plan.devices_per_rank(),
                       plan.devices_per_rank() == 1 ? "" : "s");
  }
  return fmt::format("data {} x pipeline {} x tensor {}", plan.data, plan.pipeline, plan.tensor);
}

std::string no_sync_text(const HybridPlan& plan, bool last) {
  if (!last) return "gradients are still being added up";
  if (plan.data > 1) return "nothing was averaged";
  return plan.over_ranks ? "one pipeline holds all rows" : "one process holds all rows";
}

}  // namespace

std::vector<lockstep::MeshAxis> HybridPlan::axes() const {
  return {{"dp", data}, {"pp", pipeline}, {"tp", tensor}};
}

HybridPlan plan_hybrid(Options& options) {
  const int ranks = lockstep::RankEnvironment::from_env().world_size;
  const bool in_parts = options.virtual_shards > 0;
  if (in_parts) options.micro_batches = options.virtual_shards;  // those of all data ranks
  HybridPlan plan{.schedule = make_placed_schedule(options),
                  .over_ranks = options.place == "ranks",
                  .data = ranks};
  if (options.recompute) {
    plan.recompute.resize(static_cast<size_t>(options.stages));
    std::iota(plan.recompute.begin(), plan.recompute.end(), 0);
  }
  if (plan.over_ranks) {
    plan.pipeline = plan.schedule.ranks();
    plan.tensor = static_cast<int>(options.tensor_parallel);
    const int needed = plan.pipeline * plan.tensor;
    if (ranks % needed != 0) {
      const std::string tensor =
          plan.tensor == 1 ? "" : fmt::format(" x --tensor-parallel {}", plan.tensor);
      throw Error(
          Code::kWorld,
          fmt::format("{} rank{} cannot be divided into pipelines of {} rank{}{}", ranks,
                      ranks == 1 ? "" : "s", plan.pipeline, plan.pipeline == 1 ? "" : "s", tensor),
          fmt::format("start {0} ranks or a multiple: lockstep run -n {0} …", needed));
    }
    plan.data = ranks / needed;
  }
  if (in_parts) {
    options.micro_batches = parts_of_data_rank(options, plan.data);
    plan.schedule = make_placed_schedule(options);
  }
  require_micro_batch_rows(options, plan.data);
  require_tensor_parallel_sizes(options, plan.tensor);
  planned_cut(options, count_layers(options, plan.tensor));  // refuses a cut that does not fit
  return plan;
}

ModelCut cut_model(const Options& options, Layers& model, const lockstep::World& world,
                   const Precision& precision, int64_t rows) {
  const auto device = world.device().torch_device();
  const int64_t micro_batch_rows = rows / options.micro_batches;
  const auto x = torch::ones({micro_batch_rows, options.dim}, torch::TensorOptions(device));
  auto layers = model.layers();
  layers->to(device);
  ModelCut cut;
  {
    const lockstep::Autocast amp(world.device(), precision.dtype, precision.lower);
    cut.layers_per_stage = choose_cut(options, layers, x, world.comm());
    cut.layers = probe_layers(model, x.narrow(0, 0, 1));
  }
  layers->to(torch::kCPU);  // later each stage goes to its own device only
  model.separate_stages(cut.layers_per_stage);
  return cut;
}

HybridOptimizer::HybridOptimizer(lockstep::Pipeline& pipeline, lockstep::GradScaler& scaler,
                                 const Options& options)
    : pipeline_(pipeline), scaler_(scaler) {
  if (scaler.is_enabled()) {
    whole_ = make_optimizer(pipeline.parameters(), options);
    return;
  }
  of_stage_.resize(pipeline.schedule().rank_of_stage.size());
  pipeline.for_each_stage("make optimizer", [&](int stage) {
    const auto parameters = pipeline.stage(stage)->parameters();
    if (parameters.empty()) return;  // a stage of activations only
    of_stage_[static_cast<size_t>(stage)] = make_optimizer(parameters, options);
  });
}

void HybridOptimizer::step() {
  if (whole_) {
    scaler_.step(*whole_);
    scaler_.update();
  } else {
    pipeline_.for_each_stage("optimizer", [&](int stage) {
      const auto& optimizer = of_stage_[static_cast<size_t>(stage)];
      if (optimizer) optimizer->step();
    });
  }
  for (const int stage : pipeline_.local_stages()) {
    auto module = pipeline_.stage(stage);
    module->zero_grad(/*set_to_none=*/true);
  }
}

std::vector<torch::optim::Optimizer*> HybridOptimizer::optimizers() const {
  std::vector<torch::optim::Optimizer*> all;
  if (whole_) all.push_back(whole_.get());
  for (const auto& each : of_stage_) {
    if (each) all.push_back(each.get());
  }
  return all;
}

void print_placement(const lockstep::Pipeline& pipeline, const HybridPlan& plan,
                     const lockstep::World& world, const Options& options) {
  if (options.quiet) return;
  std::vector<std::string> homes;
  for (const int stage : pipeline.local_stages()) {
    const auto& device = pipeline.device_of(stage);
    homes.push_back(fmt::format("{} ({})", home_of(stage, device), device.plan().physical()));
  }
  print_from_all_ranks(world, options,
                       fmt::format("Rank: {} | Local Rank: {} | Devices: {}\n", world.rank(),
                                   world.local_rank(), fmt::join(homes, ", ")));
  if (world.rank() != 0) return;
  const int64_t rows = options.batch / plan.data + (options.batch % plan.data > 0 ? 1 : 0);
  fmt::print(options.out(), "Processes: {} | {}\n", world.size(), axes_text(plan));
  const auto of_each = lockstep::tensor_split_rows(rows, options.micro_batches);
  fmt::print(options.out(), "Micro-batches: {} of {}\n", options.micro_batches,
             of_each.front() == of_each.back() ? fmt::format("{} rows each", of_each.front())
                                               : fmt::format("{} rows", fmt::join(of_each, ", ")));
  fmt::print(options.out(), "Schedule: {}\n{}\n", plan.schedule.name, unit_grid(plan, world));
  std::fflush(options.out());
}

std::string describe_call(const lockstep::Pipeline& pipeline, const HybridPlan& plan, int rank,
                          const CallNumber& number, int64_t accum_steps, int64_t since_ns) {
  struct Line {
    int64_t begin_ns;
    std::string text;
  };
  std::string head = fmt::format("[Rank {}] step {}", rank, number.step + 1);
  if (accum_steps > 1) head += fmt::format(", micro-step {}", number.micro_step + 1);
  head += " | ";
  const auto times = [&](const auto& span) {
    return fmt::format("{:.2f} - {:.2f} ms", static_cast<double>(span.begin_ns - since_ns) * 1e-6,
                       static_cast<double>(span.end_ns - since_ns) * 1e-6);
  };
  std::vector<Line> lines;
  const auto add = [&](const auto& span, int stage, const std::string& what,
                       const std::string& about) {
    const std::string home = home_of(stage, pipeline.device_of(stage));
    lines.push_back({span.begin_ns,
                     fmt::format("{}{} | {} | {} | {}\n", head, home, what, about, times(span))});
  };
  const auto& trace = pipeline.last_step();
  size_t widest = 0;
  for (const auto& span : trace.actions)
    widest = std::max(widest, action_name(span.action.kind).size());
  for (const auto& span : trace.actions) {
    add(span, span.action.stage, fmt::format("{:<{}}", action_name(span.action.kind), widest),
        fmt::format("micro-batch {}", span.action.micro_batch));
  }
  for (const auto& sync : trace.syncs) {
    add(sync, sync.stage, "synchronise",
        fmt::format("{} all-reduce{}, {}", sync.all_reduces, sync.all_reduces == 1 ? "" : "s",
                    lockstep::format_bytes(sync.bytes)));
  }
  std::stable_sort(lines.begin(), lines.end(),
                   [](const Line& a, const Line& b) { return a.begin_ns < b.begin_ns; });
  std::string text;
  for (const auto& line : lines) text += line.text;
  if (trace.syncs.empty()) {
    const bool last = number.micro_step + 1 == accum_steps;
    text += fmt::format("{}no synchronisation: {}\n", head, no_sync_text(plan, last));
  }
  return text;
}

}  // namespace course
