#include "cli/lab/lab5_answers.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include "cli/lab/lab_text.hpp"
#include "lockstep/split.hpp"
#include "lockstep/units.hpp"

namespace lockstep::cli {
namespace {

constexpr double kMoreMemory = 1.05;  // device 0 has more when it has 5 % more

// What most answers look at: the single device and the full DataParallel run.
struct Scene {
  const Lab5Results& results;
  int devices;
  int shared_by;
  Comparison comparison;
  double single_ms;
  double parallel_ms;
  std::vector<DeviceRecord> alone;  // the single run's device
  std::vector<DeviceRecord> all;    // the full run's devices
  const RunRecord& record;          // the full run, first repetition

  explicit Scene(const Lab5Results& of)
      : results(of),
        devices(of.full().devices),
        shared_by(sharing(of.full())),
        comparison(compare(of.single, of.full())),
        single_ms(pooled_step_ms(of.single).mean),
        parallel_ms(pooled_step_ms(of.full()).mean),
        alone(merged_devices(of.single)),
        all(merged_devices(of.full())),
        record(of.full().runs.front()) {}

  double speedup() const { return comparison.speedup.mean; }
  bool one_device() const { return devices < 2; }
  bool shared() const { return shared_by > 1; }
  std::string noise() const { return noise_remark(results.others_busy_cores, comparison); }

  int64_t others_mean(int64_t DeviceRecord::*bytes) const {
    return all[0].*bytes - extra_on_first(all, bytes);
  }
};

std::string one_device_remark() {
  return "This run had one device, so it cannot show it; try --devices cpu:2, or cuda:0*2 on one "
         "GPU.";
}

// The part of a step that would have to stay on one device to explain the speed-up (Amdahl's law).
double serial_fraction(double speedup, int devices) {
  return std::clamp((devices / speedup - 1) / (devices - 1), 0.0, 1.0);
}

std::string answer_faster(const Scene& scene) {
  const std::string figures =
      fmt::format("A step took {} on {} devices against {} on one", format_ms(scene.parallel_ms),
                  scene.devices, format_ms(scene.single_ms));
  if (scene.one_device()) {
    return fmt::format("A step took {} with DataParallel and {} without. {}",
                       format_ms(scene.parallel_ms), format_ms(scene.single_ms),
                       one_device_remark());
  }
  std::string text;
  if (std::abs(scene.speedup() - 1) <= scene.comparison.margin()) {
    text = fmt::format(
        "Not measurably. {}: what dividing the rows saves, copying the model and "
        "gathering the results costs.",
        figures);
  } else if (scene.speedup() > 1) {
    text = fmt::format(
        "Yes. {}: {:.2f} times as fast, because each device computes only its share of "
        "the rows, at the same time as the others.",
        figures, scene.speedup());
  } else {
    text = fmt::format(
        "No. {}: {:.2f} times slower, because what DataParallel adds to a step (copying the model "
        "out, "
        "gathering outputs and gradients, waiting for device 0) cost more than dividing the rows "
        "saved.",
        figures, 1 / scene.speedup());
  }
  return text + (scene.shared() ? " " + shared_remark(scene.results.full()) : "") + scene.noise();
}

std::string series(const Lab5Results& results) {
  if (results.data_parallel.size() < 2) return "";
  std::vector<std::string> counts;
  std::vector<std::string> speedups;
  for (const auto& set_up : results.data_parallel) {
    counts.push_back(std::to_string(set_up.devices));
    speedups.push_back(fmt::format("{:.2f}", compare(results.single, set_up).speedup.mean));
  }
  return fmt::format(" On {} devices DataParallel ran {} times as fast as the single device.",
                     fmt::join(counts, ", "), fmt::join(speedups, ", "));
}

std::string answer_proportional(const Scene& scene) {
  if (scene.one_device()) return one_device_remark();
  if (scene.shared()) {
    return shared_remark(scene.results.full()) + series(scene.results) +
           " Proportional growth needs hardware that grows with the devices.";
  }
  const double percent = scene.comparison.efficiency * 100;
  std::string text;
  if (scene.speedup() <= 1) {
    text = fmt::format("No: {} devices gave no speed-up at all ({:.2f}).", scene.devices,
                       scene.speedup());
  } else if (scene.comparison.efficiency > 1.05) {
    text = fmt::format(
        "More than that: {:.2f} times on {} devices, which smaller pieces that fit a "
        "cache better can explain, or noise.",
        scene.speedup(), scene.devices);
  } else if (scene.comparison.efficiency >= kProportional) {
    text = fmt::format("Nearly: {:.2f} times on {} devices is {:.0f} % of proportional.",
                       scene.speedup(), scene.devices, percent);
  } else {
    text = fmt::format(
        "No: {:.2f} times on {} devices is {:.0f} % of proportional, as if {:.0f} % of "
        "the step ran on one device only (the loss, the sum of the gradients and the "
        "optimizer do).",
        scene.speedup(), scene.devices, percent,
        serial_fraction(scene.speedup(), scene.devices) * 100);
  }
  return text + series(scene.results) + scene.noise();
}

std::string answer_memory(const Scene& scene) {
  const std::string alone =
      fmt::format("The single device peaked at {}.", format_bytes(scene.alone[0].peak_bytes));
  if (scene.one_device()) {
    return fmt::format("{} DataParallel on one device peaked at {}. {}", alone,
                       format_bytes(scene.all[0].peak_bytes), one_device_remark());
  }
  int64_t sum = 0;
  for (const auto& device : scene.all) sum += device.peak_bytes;
  return fmt::format(
      "{} Under DataParallel device 0 peaked at {} and the others at {} on average; together {}, "
      "{:.2f} "
      "times the single device. Every device holds a whole copy of the model, but activations of "
      "its "
      "own rows only; device 0 also holds the batch, the gathered output, the summed gradients and "
      "the "
      "optimizer's state.",
      alone, format_bytes(scene.all[0].peak_bytes),
      format_bytes(scene.others_mean(&DeviceRecord::peak_bytes)), format_bytes(sum),
      static_cast<double>(sum) /
          static_cast<double>(std::max<int64_t>(1, scene.alone[0].peak_bytes)));
}

std::string answer_user_split(const Scene& scene) {
  return fmt::format(
      "No. The program hands DataParallel one batch of {} rows and gets one output of {} rows "
      "back; the "
      "record shows that DataParallel gave its devices {} rows.",
      scene.record.effective_batch, scene.record.effective_batch, format_rows(scene.record.split));
}

std::string answer_rule(const Scene& scene) {
  std::vector<std::string> seen;
  std::vector<std::string> broken;
  for (const auto& split : scene.results.splits) {
    const std::string text = fmt::format("{} rows over {} devices gave {}", split.rows,
                                         split.devices, format_rows(split.record.split));
    seen.push_back(text);
    if (split.record.split != chunk_rows(split.rows, split.devices)) broken.push_back(text);
  }
  const std::string rule =
      "Along dimension 0, in contiguous pieces, by torch.chunk's rule: every device gets "
      "⌈rows / devices⌉ rows until the rows run out.";
  if (!broken.empty()) {
    return fmt::format("{} But this run broke the rule: {}.", rule, fmt::join(broken, "; "));
  }
  return seen.empty() ? rule : fmt::format("{} Measured: {}.", rule, fmt::join(seen, "; "));
}

std::string answer_even(const Scene& scene) {
  std::vector<std::string> equal;
  std::vector<std::string> uneven;
  std::vector<std::string> idle;
  for (const auto& split : scene.results.splits) {
    const auto& rows = split.record.split;
    const std::string text = fmt::format("{} over {}", split.rows, split.devices);
    if (rows.size() < static_cast<size_t>(split.devices)) {
      idle.push_back(fmt::format("{} (only {} used)", text, rows.size()));
    } else if (split.rows % split.devices == 0) {
      equal.push_back(text);
    } else {
      uneven.push_back(fmt::format("{} ({})", text, format_rows(rows)));
    }
  }
  std::string text =
      "It is equal when the number of devices divides the number of rows, and uneven otherwise, "
      "because "
      "a row cannot be cut: the last device gets what is left.";
  if (!equal.empty()) text += fmt::format(" Here equal: {}.", fmt::join(equal, ", "));
  if (!uneven.empty()) text += fmt::format(" Uneven: {}.", fmt::join(uneven, ", "));
  if (!idle.empty()) text += fmt::format(" Rows ran out early: {}.", fmt::join(idle, ", "));
  return text;
}

int64_t others_traffic(const Scene& scene) {
  int64_t sum = 0;
  for (size_t i = 1; i < scene.all.size(); ++i) sum += traffic(scene.all[i]);
  return sum / static_cast<int64_t>(scene.all.size() - 1);
}

std::string answer_first_loaded(const Scene& scene) {
  if (scene.one_device()) return one_device_remark();
  const int64_t others_peak = scene.others_mean(&DeviceRecord::peak_bytes);
  const bool memory =
      static_cast<double>(scene.all[0].peak_bytes) > kMoreMemory * static_cast<double>(others_peak);
  // With two devices every byte has device 0 at one end and device 1 at the other.
  const bool moves_more = traffic(scene.all[0]) > others_traffic(scene);
  return fmt::format(
      "{} Its memory peaked at {} against {} on the others on average ({}), and it moved {} per "
      "step "
      "against {}{}, because it feeds every replica and collects from it.",
      memory || moves_more ? "Yes." : "Not in this run.", format_bytes(scene.all[0].peak_bytes),
      format_bytes(others_peak),
      scene.all[0].peak_bytes >= others_peak
          ? format_bytes(scene.all[0].peak_bytes - others_peak) + " more"
          : format_bytes(others_peak - scene.all[0].peak_bytes) + " less",
      format_bytes(traffic(scene.all[0])), format_bytes(others_traffic(scene)),
      scene.devices == 2 ? " (with two devices each byte has device 0 at one end)"
                         : " on each other one");
}

std::string answer_equal_use(const Scene& scene) {
  if (scene.one_device()) return one_device_remark();
  std::vector<std::string> busy;
  double least = scene.all[0].busy_fraction;
  double most = least;
  for (const auto& device : scene.all) {
    busy.push_back(fmt::format("{} {:.0f} %", device.name, device.busy_fraction * 100));
    least = std::min(least, device.busy_fraction);
    most = std::max(most, device.busy_fraction);
  }
  const auto& split = scene.record.split;
  const bool idle = split.size() < scene.all.size();
  const bool even_rows =
      !idle && std::adjacent_find(split.begin(), split.end(), std::not_equal_to<>()) == split.end();
  std::string text =
      fmt::format("{} Busy: {}.", most - least <= kEquallyBusy ? "In time, nearly." : "No.",
                  fmt::join(busy, ", "));
  if (idle) {
    text += fmt::format(" Only {} of {} devices got rows at all.", split.size(), scene.all.size());
  } else if (!even_rows) {
    text += fmt::format(" They had {} rows, so the last one had less to do.", format_rows(split));
  }
  text += " In memory and traffic they are not equal: device 0 does the work that is not divided.";
  if (scene.shared()) text += " On shared hardware, waiting for it counts as busy.";
  return text;
}

std::string answer_bottleneck(const Scene& scene) {
  if (scene.one_device()) return one_device_remark();
  std::string text = fmt::format(
      "At device 0: it sends {} and receives {} in every step, to replicate the model, scatter the "
      "batch "
      "and gather outputs and gradients.",
      format_bytes(scene.all[0].sent_bytes_per_step),
      format_bytes(scene.all[0].received_bytes_per_step));
  if (scene.record.comm_ms > 0) {
    text += fmt::format(" Moving data took {} of a {} step ({:.0f} %).",
                        format_ms(scene.record.comm_ms), format_ms(scene.parallel_ms),
                        100 * scene.record.comm_ms / scene.parallel_ms);
  }
  const auto [least, most] = std::minmax_element(scene.all.begin(), scene.all.end(),
                                                 [](const DeviceRecord& a, const DeviceRecord& b) {
                                                   return a.busy_fraction < b.busy_fraction;
                                                 });
  text += fmt::format(
      " The devices stood idle {:.0f} to {:.0f} % of the time, waiting for each other or for the "
      "parts of the step that are not divided.",
      100 * (1 - most->busy_fraction), 100 * (1 - least->busy_fraction));
  if (scene.shared()) text += " Here the shared hardware itself is a second bottleneck.";
  return text;
}

std::string answer_advantage(const Scene& scene) {
  const std::string speed =
      !scene.one_device() && scene.speedup() > 1 + kSameSpeed
          ? fmt::format(" It brought {:.2f} times the speed here.", scene.speedup())
          : "";
  return "It is simple: one process, one line around the module, no change to the loop, and the "
         "numbers "
         "trained stay the same." +
         loss_parity(scene.results.single.runs.front(), scene.record, "the single device's") +
         speed;
}

std::string answer_limitation(const Scene& scene) {
  if (scene.one_device()) {
    return "All that is not divided stays with device 0, in one process on one machine. " +
           one_device_remark();
  }
  return fmt::format(
      "Everything passes through device 0 of one process on one machine: it held {} more than the "
      "others "
      "at its peak and moved {} per step, and the largest model is the one that fits a single "
      "device.",
      format_bytes(std::max<int64_t>(0, extra_on_first(scene.all, &DeviceRecord::peak_bytes))),
      format_bytes(traffic(scene.all[0])));
}

std::string answer_scaling(const Scene& scene) {
  if (scene.one_device()) return one_device_remark();
  std::string text = fmt::format(
      "Each further device gets fewer rows but a whole copy of the model: device 0's traffic grows "
      "by "
      "about {} per step and device, while the computation that hides it shrinks.",
      format_bytes(traffic(scene.all[0]) / (scene.devices - 1)));
  const double serial = serial_fraction(scene.speedup(), scene.devices);
  if (!scene.shared() && scene.speedup() > 1 && serial > 0.005) {
    text += fmt::format(
        " With {:.0f} % of this step not divided, no number of devices could exceed {:.1f} "
        "times the speed of one (Amdahl's law).",
        serial * 100, 1 / serial);
  } else if (scene.shared()) {
    text += " " + shared_remark(scene.results.full());
  }
  return text;
}

}  // namespace

std::vector<Answer> answer_lab5(const Lab5Results& results) {
  const Scene scene(results);
  return {
      {"speed", "Did training become faster?", answer_faster(scene)},
      {"speed", "Is the speed-up proportional to the devices?", answer_proportional(scene)},
      {"speed", "How does memory differ?", answer_memory(scene)},
      {"splitting", "Is the batch split by the user's code?", answer_user_split(scene)},
      {"splitting", "How does DataParallel divide it?", answer_rule(scene)},
      {"splitting", "When is the split equal, when uneven, and why?", answer_even(scene)},
      {"bottleneck", "Is device 0 more loaded?", answer_first_loaded(scene)},
      {"bottleneck", "Are all devices equally used?", answer_equal_use(scene)},
      {"bottleneck", "Where could the bottleneck be?", answer_bottleneck(scene)},
      {"bottleneck", "What is the main advantage of DataParallel?", answer_advantage(scene)},
      {"bottleneck", "What is its main limitation?", answer_limitation(scene)},
      {"bottleneck", "Why might it not scale to many devices?", answer_scaling(scene)},
  };
}

}  // namespace lockstep::cli
