// The questions of practical 5, answered from its records.

#include "cli/lab/lab5.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "lockstep/units.hpp"

namespace lockstep::cli::practical5 {
namespace {

const std::string kOneDevice =
    "This run had one device, so it cannot show it; try --devices cpu:2, or cuda:0*2 on one GPU.";

// The part of a step that would have to stay on one device to explain the speed-up (Amdahl's law).
double serial_fraction(double speedup, int devices) {
  return std::clamp((devices / speedup - 1) / (devices - 1), 0.0, 1.0);
}

std::string answer_faster(const AnswerContext& context) {
  if (context.one_device()) {
    return fmt::format("A step took {} with DataParallel and {} without. {}",
                       step_with_deviation(context.full), step_with_deviation(context.single),
                       kOneDevice);
  }
  const std::string figures =
      fmt::format("A step took {} on {} devices and {} on one", step_with_deviation(context.full),
                  context.devices, step_with_deviation(context.single));
  const std::string speedup = format_speedup(context.comparison);
  if (!context.judged()) {
    return fmt::format("That cannot be judged from this run. {}, a speed-up of {}.", figures,
                       speedup);
  }
  std::string text;
  if (context.same_speed()) {
    text = fmt::format("Not measurably. {}: a speed-up of {}.", figures, speedup);
  } else if (context.speedup() > 1) {
    text = fmt::format(
        "Yes. {}: {} times as fast, because each device computes only its share of the rows, at "
        "the same time as the others.",
        figures, speedup);
  } else {
    text = fmt::format("No. {}: {:.2f} times slower.", figures, 1 / context.speedup());
    if (!context.shared()) {
      text +=
          " What DataParallel adds to a step, copying the model out and gathering outputs and "
          "gradients, cost more than dividing the rows saved.";
    }
  }
  return text + sharing_sentence(context.full);
}

// The speed-ups on all numbers of devices, after a space.
std::string growth(const AnswerContext& context) {
  const auto& sets = context.runs.all("dp");
  if (sets.size() < 2) return "";
  std::vector<std::string> counts;
  std::vector<std::string> speedups;
  for (const auto& set_up : sets) {
    counts.push_back(std::to_string(set_up.devices));
    speedups.push_back(fmt::format("{:.2f}", compare(context.single, set_up).speedup.mean));
  }
  return fmt::format(" With {} devices DataParallel ran {} times as fast as the single device.",
                     listed(counts), listed(speedups));
}

std::string answer_proportional(const AnswerContext& context) {
  if (context.one_device()) return kOneDevice;
  const std::string speedup = format_speedup(context.comparison);
  if (!context.judged()) {
    return fmt::format(
        "That cannot be judged from this run: the speed-up was {} on {} devices, where {} would be "
        "proportional.",
        speedup, context.devices, context.devices);
  }
  if (context.shared()) {
    return "This run cannot show it, because the devices share hardware: the speed can only grow "
           "in proportion where the hardware grows with the devices." +
           growth(context);
  }
  const double efficiency = context.comparison.efficiency;
  std::string text;
  if (context.same_speed() || context.speedup() <= 1) {
    text = fmt::format("No: {} devices gave no speed-up at all ({}).", context.devices, speedup);
  } else if (efficiency > 1.05) {
    text = fmt::format("More than that: {} times on {} devices. This run does not show why.",
                       speedup, context.devices);
  } else if (efficiency >= kProportional) {
    text = fmt::format("Nearly: {} times on {} devices is {} of proportional.", speedup,
                       context.devices, format_percent(efficiency));
  } else {
    text = fmt::format(
        "No: {} times on {} devices is {} of proportional, as if {} of the step ran on one device "
        "only (the loss, the sum of the gradients and the optimizer do).",
        speedup, context.devices, format_percent(efficiency),
        format_percent(serial_fraction(context.speedup(), context.devices)));
  }
  return text + growth(context);
}

std::string answer_memory(const AnswerContext& context) {
  const int64_t single = context.alone[0].peak_bytes;
  const std::string alone = fmt::format("The single device peaked at {}.", format_bytes(single));
  if (context.one_device()) {
    return fmt::format("{} DataParallel on one device peaked at {}. {}", alone,
                       format_bytes(context.all[0].peak_bytes), kOneDevice);
  }
  int64_t sum = 0;
  for (const auto& device : context.all) sum += device.peak_bytes;
  return fmt::format(
      "{} Under DataParallel device 0 peaked at {} and {} at {}{}: together {}, which is {:.2f} "
      "times the single device's peak. Every device holds a whole copy of the model, "
      "but only the activations of its own rows; device 0 also holds the batch, the gathered "
      "output, the summed gradients and the optimizer's state.",
      alone, format_bytes(context.all[0].peak_bytes),
      context.devices == 2 ? "the other" : "the others",
      format_bytes(others_mean(context.all, &DeviceRecord::peak_bytes)),
      context.devices == 2 ? "" : " on average", format_bytes(sum),
      static_cast<double>(sum) / static_cast<double>(std::max<int64_t>(1, single)));
}

std::string answer_user_split(const AnswerContext& context) {
  return fmt::format(
      "No. The program hands DataParallel one batch of {0} rows and gets one output of {0} rows "
      "back; the record shows that DataParallel gave its devices {1}.",
      context.record.effective_batch, rows_text(context.record.split));
}

std::string answer_rule(const AnswerContext& context) {
  std::vector<std::string> seen;
  std::vector<std::string> broken;
  for (const auto& split : splits_of(context)) {
    seen.push_back(fmt::format("{} rows over {} devices gave {}", split.rows, split.devices,
                               rows_text(split.measured)));
    if (split.measured != split.rule) broken.push_back(seen.back());
  }
  const std::string rule =
      "It divides the batch along dimension 0, in contiguous pieces, by torch.chunk's rule: every "
      "device gets ⌈rows / devices⌉ rows until the rows run out.";
  if (!broken.empty()) {
    return fmt::format("{} But this run broke the rule: {}.", rule, fmt::join(broken, "; "));
  }
  return seen.empty() ? rule : fmt::format("{} Measured: {}.", rule, fmt::join(seen, "; "));
}

std::string answer_even(const AnswerContext& context) {
  std::vector<std::string> equal;
  std::vector<std::string> uneven;
  std::vector<std::string> idle;
  for (const auto& split : splits_of(context)) {
    const std::string text = fmt::format("{} over {}", split.rows, split.devices);
    if (split.some_idle()) {
      idle.push_back(fmt::format("{} (only {} used)", text, split.measured.size()));
    } else if (split.rows % split.devices == 0) {
      equal.push_back(text);
    } else {
      uneven.push_back(fmt::format("{} ({})", text, rows_text(split.measured)));
    }
  }
  std::string text =
      "It is equal when the number of devices divides the number of rows. Otherwise it is uneven, "
      "because a row cannot be cut: the last device gets what is left.";
  if (!equal.empty()) text += fmt::format(" Here equal: {}.", fmt::join(equal, ", "));
  if (!uneven.empty()) text += fmt::format(" Uneven: {}.", fmt::join(uneven, ", "));
  if (!idle.empty()) text += fmt::format(" Rows ran out early: {}.", fmt::join(idle, ", "));
  return text;
}

// What device 0 has more than the others.
struct Extra {
  int64_t peak;      // negative: it has less
  int64_t traffic;   // of device 0
  int64_t others;    // traffic of each of the others, on average
  bool more_memory;  // noticeably

  explicit Extra(const AnswerContext& context)
      : peak(extra_on_first(context.all, &DeviceRecord::peak_bytes)),
        traffic(cli::traffic(context.all[0])),
        others(others_traffic(context)),
        more_memory(imbalance_of(context.all).memory > kMoreMemory) {}

  bool more_traffic() const { return traffic > others; }

 private:
  static int64_t others_traffic(const AnswerContext& context) {
    int64_t sum = 0;
    for (size_t i = 1; i < context.all.size(); ++i) sum += cli::traffic(context.all[i]);
    return sum / static_cast<int64_t>(context.all.size() - 1);
  }
};

// How much devices move, as a clause about device 0.
std::string traffic_text(const AnswerContext& context, const Extra& extra) {
  if (!extra.more_traffic()) {
    return fmt::format(
        "it moved as much as {}, {} per step{}", context.others(), format_bytes(extra.traffic),
        context.devices == 2 ? ": with two devices every byte has device 0 at one end "
                               "and device 1 at the other"
                             : "");
  }
  return fmt::format(
      "it moved {} per step against {} on {}, because it feeds every replica and "
      "collects from it",
      format_bytes(extra.traffic), format_bytes(extra.others), context.others());
}

std::string answer_first_loaded(const AnswerContext& context) {
  if (context.one_device()) return kOneDevice;
  const Extra extra(context);
  return fmt::format("{} Its memory peaked at {}, {} {}. In traffic, {}.",
                     extra.more_memory && extra.more_traffic() ? "Yes."
                     : extra.more_memory                       ? "Yes, in memory."
                     : extra.more_traffic()                    ? "Yes, in traffic."
                                                               : "Not in this run.",
                     format_bytes(context.all[0].peak_bytes), against_text(extra.peak),
                     context.others(), traffic_text(context, extra));
}

std::string answer_equal_use(const AnswerContext& context) {
  if (context.one_device()) return kOneDevice;
  std::vector<std::string> busy;
  for (const auto& device : context.all) {
    busy.push_back(fmt::format("{} {}", device.name, format_percent(device.busy_fraction)));
  }
  const bool alike = imbalance_of(context.all).busy_gap() <= kEquallyBusy;
  std::string text = fmt::format("{} The devices computed for this share of the time: {}.",
                                 alike ? "In computing time, nearly." : "No.", listed(busy));
  const auto& split = context.record.split;
  if (split.size() < context.all.size()) {
    text +=
        fmt::format(" Only {} of {} devices got rows at all.", split.size(), context.all.size());
  } else if (!all_equal(split)) {
    text += fmt::format(" They had {}, so the last one had less to do.", rows_text(split));
  }
  const Extra extra(context);
  if (!extra.more_memory && !extra.more_traffic()) {
    text += " In memory and traffic they are equal too.";
  } else if (extra.more_memory && extra.more_traffic()) {
    text += fmt::format(
        " In memory and traffic they are not: device 0 held {} more at its peak, and moved {} per "
        "step against {} on {}.",
        format_bytes(extra.peak), format_bytes(extra.traffic), format_bytes(extra.others),
        context.others());
  } else if (extra.more_memory) {
    text += fmt::format(
        " In memory they are not: device 0 held {} more at its peak. In traffic they are: {} per "
        "step.",
        format_bytes(extra.peak), format_bytes(extra.traffic));
  } else {
    text += fmt::format(
        " In traffic they are not: device 0 moved {} per step against {} on {}. In memory they "
        "are.",
        format_bytes(extra.traffic), format_bytes(extra.others), context.others());
  }
  if (context.shared() && !on_cores(context.full)) {
    text += " On a shared GPU, waiting for it counts as computing.";
  }
  return text;
}

// What devices did while they did not compute, after a space. Nothing if the run cannot tell.
std::string idle_text(const AnswerContext& context) {
  if (!context.judged()) return "";
  double least_waiting = 1;
  double most_waiting = 0;
  double most_queued = 0;
  for (const auto& device : context.all) {
    if (on_cores(context.full) && !device.queued_fraction) return "";
    const double queued = device.queued_fraction.value_or(0);
    const double waiting = std::max(0.0, 1 - device.busy_fraction - queued);
    least_waiting = std::min(least_waiting, waiting);
    most_waiting = std::max(most_waiting, waiting);
    most_queued = std::max(most_queued, queued);
  }
  std::string text = fmt::format(
      " For {} of the time the devices waited for each other or for the parts of the step that are "
      "not divided.",
      percent_range(least_waiting, most_waiting));
  if (most_queued >= 0.01) {
    text +=
        fmt::format(" For up to {} they were ready but had no core.", format_percent(most_queued));
  }
  return text;
}

std::string answer_bottleneck(const AnswerContext& context) {
  if (context.one_device()) return kOneDevice;
  std::string text = fmt::format(
      "At device 0: it sends {} and receives {} in every step, to replicate the model, scatter the "
      "batch and gather outputs and gradients.",
      format_bytes(context.all[0].sent_bytes_per_step),
      format_bytes(context.all[0].received_bytes_per_step));
  const double step_ms = pooled_step_ms(context.full).mean;
  if (context.record.comm_ms > 0) {
    text +=
        fmt::format(" Moving data took {} of a {} step ({}).", format_ms(context.record.comm_ms),
                    format_ms(step_ms), format_percent(context.record.comm_ms / step_ms));
  }
  text += idle_text(context);
  if (context.shared()) text += " Here the shared hardware itself is a second bottleneck.";
  return text;
}

std::string answer_advantage(const AnswerContext& context) {
  std::string text =
      "It is simple: there is one process and one line around the module, the loop does not "
      "change, and the numbers trained stay the same." +
      loss_parity(context.single.first(), context.record, "the single device's");
  if (!context.one_device() && context.judged() && !context.same_speed() && context.speedup() > 1) {
    text += fmt::format(" It brought {} times the speed here.", format_speedup(context.comparison));
  }
  return text;
}

std::string answer_limitation(const AnswerContext& context) {
  if (context.one_device()) {
    return "All that is not divided stays with device 0, in one process on one machine. " +
           kOneDevice;
  }
  const Extra extra(context);
  return fmt::format(
      "Everything passes through device 0 of one process on one machine: at its peak it held {} "
      "{}, and it moved {} per step. The largest model is the one that fits a single device.",
      against_text(extra.peak), context.others(), format_bytes(extra.traffic));
}

std::string answer_scaling(const AnswerContext& context) {
  if (context.one_device()) return kOneDevice;
  const std::string text = fmt::format(
      "Each further device needs a whole copy of the model and sends back all its gradients: "
      "device 0's traffic grows by about {} per step and device, while each device computes on "
      "fewer rows.",
      format_bytes(traffic(context.all[0]) / (context.devices - 1)));
  if (!context.judged() || context.shared()) return text;
  const double serial = serial_fraction(context.speedup(), context.devices);
  if (context.same_speed() || context.speedup() <= 1 || serial <= 0.005) return text;
  return text + fmt::format(
                    " If {:.0f} % of this step is not divided, as the measured speed-up suggests, "
                    "no number of devices can exceed {:.1f} times the speed of one (Amdahl's law).",
                    serial * 100, 1 / serial);
}

}  // namespace

std::vector<Answer> answer_questions(const AnswerContext& context) {
  return {
      {"speed", "Did training become faster?", answer_faster(context)},
      {"speed", "Is the speed-up proportional to the devices?", answer_proportional(context)},
      {"speed", "How does memory differ?", answer_memory(context)},
      {"splitting", "Is the batch split by the user's code?", answer_user_split(context)},
      {"splitting", "How does DataParallel divide it?", answer_rule(context)},
      {"splitting", "When is the split equal, when uneven, and why?", answer_even(context)},
      {"bottleneck", "Is device 0 more loaded?", answer_first_loaded(context)},
      {"bottleneck", "Are all devices equally used?", answer_equal_use(context)},
      {"bottleneck", "Where could the bottleneck be?", answer_bottleneck(context)},
      {"bottleneck", "What is the main advantage of DataParallel?", answer_advantage(context)},
      {"bottleneck", "What is its main limitation?", answer_limitation(context)},
      {"bottleneck", "Why might it not scale to many devices?", answer_scaling(context)},
  };
}

}  // namespace lockstep::cli::practical5
