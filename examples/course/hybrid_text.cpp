#include "course/hybrid_text.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <vector>

#include "lockstep/split.hpp"
#include "lockstep/units.hpp"

namespace course {
namespace {

using lockstep::Align;
using lockstep::PipelineRecord;
using lockstep::Table;

std::string home_of(int stage, const lockstep::Device& device) {
  return fmt::format("stage {} on {}", stage, device.name());
}

// Which of the schedule's places is which: devices of rank 0, or ranks.
std::vector<std::string> place_names(const HybridPlan& plan, const lockstep::World& world) {
  std::vector<std::string> names;
  for (int place = 0; place < plan.schedule.places(); ++place) {
    names.push_back(plan.over_ranks ? fmt::format("rank {}", place * plan.tensor)
                                    : world.devices()[static_cast<size_t>(place)].name());
  }
  return names;
}

// The same time for every action: what the schedule alone says.
std::string unit_grid(const HybridPlan& plan, const lockstep::World& world) {
  const std::vector<lockstep::StageTimes> times(plan.schedule.place_of_stage.size());
  return lockstep::format_grid(plan.schedule, lockstep::simulate(plan.schedule, times),
                               {.place_names = place_names(plan, world)});
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

void print_placement(const lockstep::Pipeline& pipeline, const HybridPlan& plan,
                     const lockstep::World& world, const Options& options) {
  if (options.quiet) return;
  std::vector<std::string> homes;
  for (const int stage : pipeline.local_stages()) {
    const auto& device = pipeline.device_of(stage);
    homes.push_back(fmt::format("{} ({})", home_of(stage, device), device.plan().physical()));
  }
  std::string text = fmt::format("Rank: {} | Local Rank: {} | Devices: {}\n", world.rank(),
                                 world.local_rank(), fmt::join(homes, ", "));
  if (world.rank() == 0) {
    const int64_t rows = options.batch / plan.data + (options.batch % plan.data > 0 ? 1 : 0);
    text += fmt::format("Processes: {} | {}\n", world.size(), axes_text(plan));
    text += fmt::format("Micro-batches: {} of {} rows\n", options.micro_batches,
                        fmt::join(lockstep::tensor_split_rows(rows, options.micro_batches), ", "));
    text += fmt::format("Schedule: {}\n{}\n", plan.schedule.name, unit_grid(plan, world));
  }
  fmt::print(options.out(), "{}", text);
  std::fflush(options.out());
}

std::string describe_call(const lockstep::Pipeline& pipeline, const HybridPlan& plan, int rank,
                          const CallNumber& number, int64_t accum_steps, int64_t since_ns) {
  struct Line {
    int64_t begin_ns;
    std::string text;
  };
  std::string head = fmt::format("step {}", number.step + 1);
  if (accum_steps > 1) head += fmt::format(", micro-step {}", number.micro_step + 1);
  head += fmt::format(" | rank {} | ", rank);
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

Table stage_table(const PipelineRecord& pipeline) {
  const bool split = std::any_of(pipeline.stages.begin(), pipeline.stages.end(),
                                 [](const auto& stage) { return stage.weight_ms > 0; });
  Table table("Stages", {{"rank", Align::kRight},
                         {"stage", Align::kRight},
                         {"device"},
                         {"layers", Align::kRight},
                         {"parameters", Align::kRight},
                         {"forward ms", Align::kRight},
                         {split ? "input + weight ms" : "backward ms", Align::kRight},
                         {"micro-batches held", Align::kRight}});
  std::vector<std::string> devices;
  for (const auto& stage : pipeline.stages) {
    table.add_row({std::to_string(stage.rank), std::to_string(stage.stage), stage.device,
                   std::to_string(stage.layers), std::to_string(stage.parameters),
                   fmt::format("{:.3f}", stage.forward_ms),
                   split ? fmt::format("{:.3f} + {:.3f}", stage.backward_ms, stage.weight_ms)
                         : fmt::format("{:.3f}", stage.backward_ms),
                   std::to_string(stage.peak_micro_batches)});
    const std::string device = fmt::format("{} of rank {}", stage.device, stage.rank);
    if (std::find(devices.begin(), devices.end(), device) == devices.end())
      devices.push_back(device);
  }
  table.add_note(fmt::format("{} device{} used", devices.size(), devices.size() == 1 ? "" : "s"));
  table.add_note(fmt::format(
      "{}, {} micro-batches: pipeline {:.3f} ms a step (predicted {:.3f}), bubble {:.1f} % "
      "(predicted {:.1f} %)",
      pipeline.schedule, pipeline.micro_batches, pipeline.span_ms, pipeline.predicted_span_ms,
      pipeline.bubble * 100, pipeline.predicted_bubble * 100));
  return table;
}

Table axis_table(const PipelineRecord& pipeline) {
  Table table("Communication per step and rank", {{"axis"},
                                                  {"size", Align::kRight},
                                                  {"calls", Align::kRight},
                                                  {"sent", Align::kRight},
                                                  {"predicted", Align::kRight},
                                                  {"ms", Align::kRight},
                                                  {"predicted ms", Align::kRight}});
  for (const auto& axis : pipeline.axes) {
    table.add_row({axis.name, std::to_string(axis.size), fmt::format("{:.3g}", axis.calls),
                   lockstep::format_bytes(axis.bytes), lockstep::format_bytes(axis.predicted_bytes),
                   fmt::format("{:.3f}", axis.ms), fmt::format("{:.3f}", axis.predicted_ms)});
  }
  table.add_note(
      "ms of the pipeline: its messages times the median wait for one, while others compute too");
  return table;
}

}  // namespace course
