#include "cli/lab/lab_trained.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <set>
#include <utility>

#include "cli/lab/lab_text.hpp"

namespace lockstep::cli {
namespace {

// The value of a flag as the record has it; "" if it has none.
std::string option_of(const RunRecord& run, const std::string& name) {
  const auto found = run.options.find(name);
  return found == run.options.end() ? "" : found->second;
}

std::string precision_text(const RunRecord& run) {
  if (!run.model) return "";
  return run.model->dtype +
         (run.amp == "off" ? "" : fmt::format(", matrix products in {} (autocast)", run.amp));
}

std::string batch_text(const RunRecord& run) {
  const std::string rows = counted(run.effective_batch / run.accum_steps, "row");
  if (run.accum_steps == 1) return rows + " per step";
  return fmt::format("{} micro-steps of {} per step", run.accum_steps, rows);
}

std::string steps_text(const RunSet& set_up, const std::string& runs) {
  const RunRecord& run = set_up.first();
  return fmt::format("{} per run: {} to warm up, {} measured; {}", run.warmup_steps + run.step_ms.n,
                     run.warmup_steps, run.step_ms.n,
                     runs.empty() ? counted(set_up.runs.size(), "run") : runs);
}

std::string optimizer_text(const RunRecord& run) {
  const std::string name = option_of(run, "optimizer");
  return name.empty() ? "" : fmt::format("{}, learning rate {}", name, option_of(run, "lr"));
}

std::string data_text(const RunRecord& run) {
  if (option_of(run, "seed").empty()) return "";
  const std::string file = option_of(run, "data");
  return file.empty() ? "batches generated from the seed" : file;
}

// "cpu:0 (core 0), cpu:1 (core 1)"; "cpu:0, cpu:1, cpu:2 (all cores, shared by 3)".
std::string trained_on(const RunRecord& run) {
  std::vector<std::string> names;
  std::vector<std::string> with_hardware;
  std::set<std::string> hardware;
  std::vector<DeviceRecord> devices = run.devices;  // a pipeline's are by rank and stage
  std::sort(devices.begin(), devices.end(), [](const DeviceRecord& a, const DeviceRecord& b) {
    return std::pair(a.name.size(), a.name) < std::pair(b.name.size(), b.name);
  });
  for (const auto& device : devices) {
    names.push_back(device.name);
    with_hardware.push_back(fmt::format("{} ({})", device.name, device.hardware()));
    hardware.insert(device.hardware());
  }
  if (hardware.size() != 1) return fmt::format("{}", fmt::join(with_hardware, ", "));
  return fmt::format("{} ({})", fmt::join(names, ", "), *hardware.begin());
}

std::string command_text(const LabRuns& runs, const RunRecord& run, const TrainedBox& box) {
  std::string command =
      fmt::format("lockstep lab {}{}", box.lab, runs.options.quick ? " --quick" : "");
  const std::string devices = box.devices.empty() ? option_of(run, "devices") : box.devices;
  if (!devices.empty()) command += " --devices " + devices;
  for (const auto& name : box.pinned) {
    const std::string value = option_of(run, name);
    if (!value.empty()) command += fmt::format(" --{} {}", name, value);
  }
  std::map<std::string, std::string> own = runs.options.own;
  for (const auto& [flag, value] : box.own) own[flag] = value;
  for (const auto& [flag, value] : own) command += fmt::format(" {} {}", flag, value);
  return command;
}

}  // namespace

LabFacts what_was_trained(const LabRuns& runs, const RunSet& set_up, const TrainedBox& box) {
  const RunRecord& run = set_up.first();
  LabFacts facts;
  const auto add = [&](const std::string& name, std::string value) {
    if (value.empty()) return;
    const auto more = box.more.find(name);
    if (more != box.more.end()) value += fmt::format(" ({})", more->second);
    facts.emplace_back(name, std::move(value));
  };
  if (run.model) {
    add("model", run.model->description);
    add("weights", format_count(run.model->parameters));
  }
  add("precision", precision_text(run));
  add("batch", batch_text(run));
  add("steps", steps_text(set_up, box.runs));
  add("optimizer", optimizer_text(run));
  add("seed", option_of(run, "seed"));
  add("data", data_text(run));
  add("devices", trained_on(run));
  add("command", command_text(runs, run, box));
  return facts;
}

}  // namespace lockstep::cli
