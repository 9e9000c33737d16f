// Practical 10: data, model and pipeline parallelism together.

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>

#include "cli/lab/lab10.hpp"
#include "cli/lab/lab_charts.hpp"
#include "cli/lab/lab_plan.hpp"
#include "cli/lab/lab_trained.hpp"
#include "lockstep/error.hpp"

namespace lockstep::cli::practical10 {
namespace {

// ---- Plan: "single" is one process with one stage and the whole batch, whose losses the parts
// must equal. Parts 10.1 to 10.5 are "base", "micro_batches" by their number, "batch" by its rows,
// "one_process" and "same_device". Schedules that run against each other are named as they are.

constexpr int kRanks = 2;
constexpr int64_t kBaseMicroBatches = 4;
const std::vector<int> kCourseMicroBatches = {2, 4, 8};
const std::vector<int> kCourseBatches = {32, 64, 128};
constexpr const char* kSchedules[] = {"sequential", "gpipe", "1f1b", "zero-bubble"};

// One way to train.
struct HybridVariant {
  std::vector<RunKey> keys;
  std::string name;   // of its record
  std::string title;  // for people
  int ranks = kRanks;
  int stages = 2;
  int64_t micro_batches = kBaseMicroBatches;
  int64_t rows = 64;  // of a step, over all ranks
  std::string schedule = "gpipe";
  bool same_device = false;
  double weight = 2;
};

// Two matrix products in each stage, so that stages take equally long. `batch` is that of the
// parts; the schedules get so many rows that each micro-batch keeps a device busy.
struct HybridSizes {
  Sizes parts;
  Sizes schedules;
};

HybridSizes choose_hybrid_sizes(const LabOptions& options, DeviceKind kind, int64_t stages,
                                int64_t most_micro_batches) {
  const int64_t depth = 2 * stages - 2;
  Sizes standard = options.quick ? Sizes{8, 64, 768, 768, depth} : Sizes{20, 64, 1024, 1024, depth};
  int64_t micro_rows = 64;
  if (kind == DeviceKind::kCuda) {
    standard = {options.quick ? 10 : 30, 64, 2048, 4096, depth};
    micro_rows = 512;
  }
  HybridSizes sizes{choose_sizes(options, standard), choose_sizes(options, standard)};
  sizes.schedules.batch = options.batch.value_or(micro_rows) * most_micro_batches;
  return sizes;
}

// The --devices text for so many logical devices on the hardware that --devices names, spread
// evenly over the GPUs.
std::string divide_hardware(const std::vector<SlotPlan>& named, int devices) {
  if (named[0].kind == DeviceKind::kCpu) return fmt::format("cpu:{}", devices);
  std::vector<int> gpus;
  for (const auto& slot : named) {
    if (std::find(gpus.begin(), gpus.end(), slot.gpu) == gpus.end()) gpus.push_back(slot.gpu);
  }
  return spread_over_gpus(gpus, devices);
}

void require_rows(const HybridVariant& variant) {
  if (variant.rows >= variant.ranks * variant.micro_batches) return;
  const char* flag = variant.keys.front().what == "batch" ? "--batches" : "--batch";
  throw Error(Code::kSplit,
              fmt::format("{} {} cannot be divided over {} ranks and {} micro-batches: each needs "
                          "a row",
                          flag, variant.rows, variant.ranks, variant.micro_batches),
              fmt::format("give a larger {}, or fewer --micro-batches", flag));
}

// The programs would refuse it too, but only when the first of them runs.
void require_layers(int64_t stages, int64_t depth) {
  const int64_t layers = 2 * depth + 3;  // of the mlp, with a ReLU between two linear ones
  if (stages <= layers) return;
  throw Error(
      Code::kUsage,
      fmt::format("--stages {} is more than the {} layers of --depth {}", stages, layers, depth),
      fmt::format("give --depth {} or more, or leave it out", (stages - 2) / 2));
}

Experiment hybrid_experiment(const HybridVariant& variant, Sizes sizes,
                             const std::vector<SlotPlan>& named) {
  sizes.batch = variant.rows;
  Experiment experiment;
  experiment.keys = variant.keys;
  experiment.name = variant.name;
  experiment.title = variant.title;
  experiment.devices = variant.ranks * variant.stages;
  experiment.program = "practical10_hybrid";
  experiment.ranks = variant.ranks;
  experiment.arguments = program_arguments(sizes, divide_hardware(named, experiment.devices));
  append(experiment, {"--micro-batches", std::to_string(variant.micro_batches), "--stages",
                      std::to_string(variant.stages), "--schedule", variant.schedule});
  if (variant.same_device) append(experiment, {"--place", "same"});
  experiment.weight = variant.weight;
  return experiment;
}

// The parts in the order of the course. `like` has the sizes of the base, which is also one of the
// runs of 10.2 and of 10.3.
std::vector<HybridVariant> part_variants(const HybridVariant& like,
                                         const std::vector<int>& micro_batches,
                                         const std::vector<int>& batches) {
  std::vector<HybridVariant> variants;
  const auto add = [&](std::vector<RunKey> keys, std::string name, std::string title) -> auto& {
    variants.push_back(like);
    variants.back().keys = std::move(keys);
    variants.back().name = std::move(name);
    variants.back().title = std::move(title);
    return variants.back();
  };
  HybridVariant& single = add({{"single"}}, "single", "one device, the batch whole");
  single.ranks = single.stages = 1;
  single.micro_batches = 1;
  add({{"base"}, {"micro_batches", like.micro_batches}, {"batch", like.rows}}, "base",
      fmt::format("10.1: {} processes × {} stages, {} micro-batches", like.ranks, like.stages,
                  like.micro_batches));
  for (const int count : micro_batches) {
    if (count == like.micro_batches) continue;
    add({{"micro_batches", count}}, fmt::format("micro-batches-{}", count),
        fmt::format("10.2: {} micro-batches", count))
        .micro_batches = count;
  }
  for (const int rows : batches) {
    if (rows == like.rows) continue;
    add({{"batch", rows}}, fmt::format("batch-{}", rows),
        fmt::format("10.3: a batch of {} rows", rows))
        .rows = rows;
  }
  add({{"one_process"}}, "one-process", "10.4: one process").ranks = 1;
  add({{"same_device"}}, "same-device", "10.5: all stages on one device").same_device = true;
  return variants;
}

LabPlan plan(const LabOptions& options, const Hardware& hardware) {
  const auto named = plan_devices(options.devices, hardware);
  const auto micro_batches = options.ascending("--micro-batches", kCourseMicroBatches);
  const auto batches = options.ascending("--batches", kCourseBatches);
  const int stages = static_cast<int>(options.count("--stages").value_or(2));
  const auto sizes = choose_hybrid_sizes(options, named[0].kind, stages, micro_batches.back());
  require_layers(stages, sizes.parts.depth);

  const bool usual = std::find(micro_batches.begin(), micro_batches.end(), kBaseMicroBatches) !=
                     micro_batches.end();
  const HybridVariant base{.keys = {},
                           .name = {},
                           .title = {},
                           .stages = stages,
                           .micro_batches = usual ? kBaseMicroBatches : micro_batches.front(),
                           .rows = sizes.parts.batch};
  LabPlan plan{.repetitions = options.repetitions(), .experiments = {}};
  for (const auto& variant : part_variants(base, micro_batches, batches)) {
    require_rows(variant);
    plan.experiments.push_back(hybrid_experiment(variant, sizes.parts, named));
  }
  std::vector<Experiment> scheduled;
  for (const char* schedule : kSchedules) {
    const HybridVariant variant{.keys = {{schedule}},
                                .name = schedule,
                                .title = fmt::format("{}, {} stages, {} micro-batches", schedule,
                                                     stages, micro_batches.back()),
                                .ranks = 1,
                                .stages = stages,
                                .micro_batches = micro_batches.back(),
                                .rows = sizes.schedules.batch,
                                .schedule = schedule,
                                .weight = 3};
    scheduled.push_back(hybrid_experiment(variant, sizes.schedules, named));
  }
  add_in_turns(plan, scheduled);
  return plan;
}

// ---- Charts

std::string sharing_caption(const RunSet& set_up) {
  return sharing(set_up) > 1 ? " The devices share hardware." : "";
}

Figure timeline_figure(const std::string& title, const RunSet& set_up) {
  const PipelineRecord& pipeline = pipeline_of(set_up);
  Timeline chart;
  chart.title = title;
  chart.rows = action_rows(pipeline, pipeline.predicted, "predicted ", false);
  if (!chart.rows.empty()) chart.rows.emplace_back();  // a gap
  for (auto& row : action_rows(pipeline, pipeline.actions, "measured ", ranks_of(pipeline) > 1)) {
    chart.rows.push_back(std::move(row));
  }
  chart.legend = action_legend(chart.rows);
  return {
      std::move(chart),
      fmt::format("The last step of the first run: predicted from the mean times of the stages "
                  "({}, bubble {:.0f} %) and measured (mean of all steps {}, bubble {:.0f} %).{}",
                  format_ms(pipeline.predicted_span_ms), pipeline.predicted_bubble * 100,
                  format_ms(pipeline.span_ms), pipeline.bubble * 100, sharing_caption(set_up))};
}

Figure bubble_figure(const AnswerContext& context) {
  LineChart chart;
  chart.title = "Bubble over micro-batches";
  chart.x_label = "micro-batches";
  chart.unit = Unit::kPercent;
  chart.log_x = true;
  LineSeries predicted{.name = "predicted"};
  LineSeries measured{.name = "measured"};
  LineSeries ideal{.name = "equal stages", .reference = true};
  const auto stages = static_cast<int64_t>(devices_of(pipeline_of(context.base), 0).size());
  for (const auto& set_up : context.micro_batches) {
    for (auto* series : {&predicted, &measured, &ideal}) {
      series->x.push_back(static_cast<double>(set_up.size));
    }
    predicted.y.push_back(mean_of(set_up, &PipelineRecord::predicted_bubble) * 100);
    measured.y.push_back(mean_of(set_up, &PipelineRecord::bubble) * 100);
    ideal.y.push_back(ideal_bubble(std::max<int64_t>(1, stages), set_up.size) * 100);
  }
  chart.series = {predicted, measured, ideal};
  return {
      std::move(chart),
      fmt::format("Share of the devices' time in which they wait, with {} ranks of {} stages.{}",
                  context.base.first().world_size, stages, sharing_caption(context.base))};
}

Figure time_figure(const AnswerContext& context) {
  BarChart chart{
      .title = "Time of a step by schedule",
      .unit = Unit::kMilliseconds,
      .categories = {},
      .series = {{.name = "span, predicted"}, {.name = "span, measured"}, {.name = "whole step"}}};
  for (const auto& row : schedules_of(context)) {
    chart.categories.push_back(row.name);
    chart.series[0].values.push_back(mean_of(*row.set_up, &PipelineRecord::predicted_span_ms));
    chart.series[1].values.push_back(mean_of(*row.set_up, &PipelineRecord::span_ms));
    chart.series[2].values.push_back(pooled_step_ms(*row.set_up).mean);
  }
  return {std::move(chart),
          fmt::format("{} stages in one process, {} micro-batches; the whole step includes the "
                      "update.{}",
                      context.gpipe.devices, pipeline_of(context.gpipe).micro_batches,
                      sharing_caption(context.gpipe))};
}

std::vector<Figure> figures(const AnswerContext& context) {
  return {
      timeline_figure("The base: predicted and measured", context.base),
      timeline_figure("gpipe in one process: predicted and measured", context.gpipe),
      timeline_figure("1f1b in one process: predicted and measured", context.one_f_one_b),
      timeline_figure("zero-bubble in one process: predicted and measured", context.zero_bubble),
      bubble_figure(context),
      time_figure(context)};
}

// The simulated schedules as grids.
std::vector<std::string> drawings(const AnswerContext& context) {
  const auto names = devices_of(pipeline_of(context.gpipe), 0);
  std::vector<std::string> all;
  for (const auto& [schedule, simulation] : simulate_schedules(context.gpipe)) {
    GridOptions options;
    options.width = static_cast<int>(std::min(size_t{120}, terminal_width(STDOUT_FILENO)));
    if (static_cast<int>(names.size()) == schedule.ranks()) options.rank_names = names;
    all.push_back(fmt::format("{}, simulated with the stage times of gpipe's runs, in ms\n{}",
                              schedule.name, format_grid(schedule, simulation, options)));
  }
  return all;
}

LabFacts trained(const AnswerContext& context) {
  TrainedBox box{.lab = "10", .pinned = {"steps", "dim", "hidden", "depth", "stages"}};
  // --batch would also change the rows of the schedules, so it is repeated only if it was given.
  if (context.runs.options.batch) box.pinned.insert(box.pinned.begin() + 1, "batch");
  std::vector<std::string> others;
  for (const auto& set_up : context.batches) {
    if (set_up.size != rows_of(context.base)) others.push_back(std::to_string(set_up.size));
  }
  box.more["batch"] =
      fmt::format("10.3: {}; schedules: {}", others.empty() ? "no other" : "also " + listed(others),
                  rows_of(context.gpipe));
  box.runs = fmt::format("{} of each part, {} of each schedule",
                         counted(context.base.runs.size(), "run"), context.gpipe.runs.size());
  return what_was_trained(context.runs, context.base, box);
}

LabReport report(const LabRuns& runs) {
  const AnswerContext context{runs};
  return {.title = "Practical 10: hybrid parallelism",
          .stamp = context.base.first(),
          .trained = trained(context),
          .warning = context.warning(),
          .tables = tables_of(context),
          .figures = figures(context),
          .answers = answer_questions(context),
          .drawings = drawings(context)};
}

}  // namespace

std::vector<SetRow> parts_of(const AnswerContext& context) {
  std::vector<SetRow> parts = {{"10.1 base", &context.base}};
  const auto add = [&](const std::string& name, const RunSet& set_up) {
    parts.push_back({name, &set_up, &context.base});
  };
  const int64_t base_count = pipeline_of(context.base).micro_batches;
  for (const auto& set_up : context.micro_batches) {
    if (set_up.size != base_count) add(fmt::format("10.2 micro {}", set_up.size), set_up);
  }
  for (const auto& set_up : context.batches) {
    if (set_up.size != rows_of(context.base))
      add(fmt::format("10.3 batch {}", set_up.size), set_up);
  }
  add("10.4 1 process", context.one_process);
  add("10.5 1 device", context.same_device);
  return parts;
}

std::vector<SetRow> schedules_of(const AnswerContext& context) {
  return {{"sequential", &context.sequential},
          {"gpipe", &context.gpipe, &context.sequential},
          {"1f1b", &context.one_f_one_b, &context.sequential},
          {"zero-bubble", &context.zero_bubble, &context.sequential}};
}

std::string AnswerContext::warning() const {
  return times_warning(disturbance_of(runs, {"sequential", "gpipe", "1f1b", "zero-bubble"}),
                       {noisiest_of(*this)});
}

Comparison noisiest_of(const AnswerContext& context) {
  Comparison noisiest = compare(context.sequential, context.gpipe);
  for (const RunSet* set_up : {&context.one_f_one_b, &context.zero_bubble}) {
    const Comparison other = compare(context.sequential, *set_up);
    if (other.noise > noisiest.noise) noisiest = other;
  }
  return noisiest;
}

Lab lab() {
  using Kind = LabFlag::Kind;
  return {.name = "10",
          .folder = "reports/lab10",
          .flags = {{.name = "--micro-batches",
                     .kind = Kind::kList,
                     .help = "MICRO_BATCHES, one run each (default: 2,4,8)"},
                    {.name = "--batches",
                     .kind = Kind::kList,
                     .help = "BATCH_SIZE, one run each (default: 32,64,128)",
                     .last = 1'000'000},
                    {.name = "--stages",
                     .kind = Kind::kCount,
                     .help = "stages of the model (default: 2)",
                     .first = 2,
                     .last = 64}},
          .examples = {{"", "data, model and pipeline parallel"},
                       {"--stages 3 --micro-batches 3,6", "other stages and MICRO_BATCHES"}},
          .plan = plan,
          .report = report};
}

}  // namespace lockstep::cli::practical10
