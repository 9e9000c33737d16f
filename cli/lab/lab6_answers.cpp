// The questions of practical 6, answered from its records.

#include "cli/lab/lab6.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include "lockstep/units.hpp"

namespace lockstep::cli::practical6 {
namespace {

const std::string kOneRank = "This run had one rank, so it cannot show it; try --ranks 1,2.";

std::string answer_processes(const AnswerContext& context) {
  std::vector<std::string> ranks;
  for (size_t rank = 0; rank < context.ddp_devices.size(); ++rank) {
    const DeviceRecord& device = context.ddp_devices[rank];
    ranks.push_back(fmt::format("rank {} on {} ({})", rank, device.name, device.hardware()));
  }
  std::vector<std::string> counts;
  for (const auto& set_up : context.runs.all("ddp")) {
    counts.push_back(std::to_string(set_up.first().world_size));
  }
  return fmt::format(
      "{}, one for each device: {}. DataParallel drove the same {} from {}. In all, the lab ran "
      "DDP with {} processes.",
      context.record.world_size, listed(ranks), counted(context.dp.devices, "device"),
      counted(context.dp.first().world_size, "process"), listed(counts));
}

std::string answer_automatic(const AnswerContext& context) {
  return fmt::format(
      "No: unlike DataParallel, DDP never touches the input. The program divides each batch of {} "
      "rows by hand, by rank and world size ({} here), or leaves it to a "
      "DistributedSampler; forgetting it would train every rank on the same rows.",
      context.record.effective_batch, rows_text(context.record.split));
}

std::string answer_distribution(const AnswerContext& context) {
  const auto& split = context.record.split;
  return fmt::format(
      "Rank r takes the r-th contiguous block of each batch of {} rows: {}{}. Rows go from the "
      "loader straight to their rank, whereas DataParallel first puts all {} on device 0.{}",
      context.record.effective_batch, rows_text(split),
      all_equal(split) ? ""
                       : "; the first ranks take one row more, and the mean is weighted by rows",
      context.record.effective_batch,
      loss_parity(context.single.first(), context.record,
                  "those of one device with the whole batch"));
}

std::string answer_when(const AnswerContext& context) {
  const AllReduces& calls = context.record.all_reduces;
  if (context.one_rank() || context.record.buckets.empty()) {
    return "Inside loss.backward(), bucket by bucket, as soon as all gradients of a bucket are "
           "there. " +
           kOneRank;
  }
  const auto& buckets = context.record.buckets;
  const double backward_ms = context.record.backward_ms;
  const Communication& time = context.communication;
  const bool one = calls.count == 1;
  std::string text = fmt::format(
      "Inside loss.backward(): {} of {}{} per step, {} as soon as {} bucket is full. In the step "
      "shown, the first was launched {} after backward began, and backward ended at {}; {} of {} "
      "had finished by then.",
      one ? "one all-reduce" : fmt::format("{:g} all-reduces", calls.count),
      format_bytes(calls.bytes), one ? "" : " in all", one ? "launched" : "each launched",
      one ? "the" : "its", format_ms(buckets.front().launched_ms), format_ms(backward_ms),
      finished_in_backward(context.record), counted(buckets.size(), "bucket"));
  if (!context.judged()) return text;
  text += fmt::format(
      " Communication took {} per step, of which {} ({}) was hidden behind backward and {} "
      "exposed.",
      format_ms(time.total_ms), format_ms(time.hidden_ms), format_percent(time.hidden_share()),
      format_ms(time.exposed_ms));
  if (on_cores(context.ddp)) {
    text +=
        " On the CPU the ranks' own cores also move the bytes, so little but waiting can be "
        "hidden.";
  }
  return text;
}

std::string answer_why_needed(const AnswerContext& context) {
  const std::string reason = fmt::format(
      "Each rank sees only its own part of the batch ({}), so its gradient differs from the "
      "others'; averaging gives every rank the gradient of the whole batch, and equal updates "
      "keep the {} copies of the model equal without ever sending weights.",
      rows_text(context.record.split), context.ranks);
  return reason + (context.one_rank() ? " " + kOneRank : "");
}

std::string answer_balanced(const AnswerContext& context) {
  if (context.one_rank()) return kOneRank;
  const Imbalance dp = imbalance_of(context.dp_devices);
  const Imbalance ddp = imbalance_of(context.ddp_devices);
  const bool memory = std::abs(ddp.memory - 1) < std::abs(dp.memory - 1);
  const bool busy = ddp.busy_gap() <= dp.busy_gap() || ddp.busy_gap() <= kEquallyBusy;
  const auto share = [](const Imbalance& of) { return percent_range(of.least_busy, of.most_busy); };
  std::string text = fmt::format(
      "{} Device 0's peak was {:.2f} times that of {} under DataParallel and {:.2f} times under "
      "DDP. The devices computed for {} of the time under DataParallel and for {} under DDP.",
      memory && busy   ? "Yes."
      : memory || busy ? "In part."
                       : "Not in this run.",
      dp.memory, context.others(), ddp.memory, share(dp), share(ddp));
  if (memory && busy) text += " Every rank does the same work on its own share of the rows.";
  if (context.shared() && !on_cores(context.ddp)) {
    text += " On a shared GPU, waiting for it counts as computing.";
  }
  return text;
}

std::string answer_device0(const AnswerContext& context) {
  if (context.one_rank()) return kOneRank;
  const auto extra = [&context](const std::vector<DeviceRecord>& devices) {
    return against_text(extra_on_first(devices, &DeviceRecord::peak_bytes)) + " " +
           context.others();
  };
  const bool even = imbalance_of(context.ddp_devices).memory <= kMoreMemory;
  return fmt::format(
      "{} At its peak it held {} under DataParallel and {} under DDP; it moved {} per step under "
      "DataParallel and {} under DDP.{} All ranks wait for the slowest one in the all-reduce, so "
      "that one limits the step, whichever it is.",
      even ? "No." : "It still holds more in this run.", extra(context.dp_devices),
      extra(context.ddp_devices), format_bytes(traffic(context.dp_devices.front())),
      format_bytes(traffic(context.ddp_devices.front())),
      even ? " Nothing is gathered on it: each rank computes its own loss and applies its own "
             "update."
           : "");
}

std::string answer_faster(const AnswerContext& context) {
  const double speedup = context.comparison.speedup.mean;
  const std::string figures = fmt::format(
      "On {} a step took {} with DDP and {} with DataParallel", counted(context.ranks, "device"),
      step_with_deviation(context.ddp), step_with_deviation(context.dp));
  if (!context.judged()) {
    return fmt::format("That cannot be judged from this run. {}, a ratio of {}.{}", figures,
                       format_speedup(context.comparison),
                       context.one_rank() ? " " + kOneRank : "");
  }
  std::string text;
  if (context.same_speed()) {
    text = fmt::format("Neither is measurably faster. {}.", figures);
  } else if (speedup > 1) {
    text = fmt::format("DDP. {}: {} times as fast.", figures, format_speedup(context.comparison));
  } else {
    text = fmt::format("DataParallel. {}: DDP is {:.2f} times slower.", figures, 1 / speedup);
  }
  if (context.one_rank()) text += " " + kOneRank;
  return text + sharing_sentence(context.ddp);
}

// "1.92 times on 2 devices and 1.10 times on 4 that share hardware".
std::string growth(const std::vector<RunSet>& sets) {
  std::vector<std::string> parts;
  for (size_t i = 1; i < sets.size(); ++i) {
    parts.push_back(fmt::format("{:.2f} times on {}{}", compare(sets.front(), sets[i]).speedup.mean,
                                sets[i].devices,
                                sharing(sets[i]) > 1 ? " that share hardware" : ""));
  }
  return listed(parts);
}

std::string answer_scales(const AnswerContext& context) {
  if (context.one_rank()) return kOneRank;
  const Comparison dp = compare(context.runs.of("dp"), context.dp);
  const Comparison ddp = compare(context.runs.of("ddp"), context.ddp);
  const std::string figures = fmt::format(
      "Against itself on one device DDP reached {} times on {} ({} of proportional) and "
      "DataParallel {} times ({}).",
      format_speedup(ddp), context.ranks, format_percent(ddp.efficiency), format_speedup(dp),
      format_percent(dp.efficiency));
  if (!context.judged()) return "That cannot be judged from this run. " + figures;
  if (context.shared()) {
    return "This run cannot show it, because the devices share hardware. " + figures;
  }
  const double gap = ddp.speedup.mean - dp.speedup.mean;
  const bool equal = std::abs(gap) <= std::max(ddp.margin(), dp.margin());
  std::string text = equal     ? "In this run neither does measurably. "
                     : gap > 0 ? "DDP. "
                               : "In this run DataParallel. ";
  text += figures;
  if (context.runs.all("ddp").size() > 2) {
    text += fmt::format(" On all numbers of devices, DDP reached {}; DataParallel {}.",
                        growth(context.runs.all("ddp")), growth(context.runs.all("dp")));
  }
  const RunSet& largest = context.runs.some("ddp").back();
  if (sharing(largest) > 1) {
    text += fmt::format(
        " The {} ranks of the largest run shared this machine's cores, so they show correctness, "
        "not speed.",
        largest.devices);
  }
  return text;
}

std::string answer_why(const AnswerContext& context) {
  if (context.one_rank()) return kOneRank;
  const std::string text = fmt::format(
      "DataParallel copies the whole model out and gathers outputs and gradients on device 0 in "
      "every step ({} through it, growing with the devices), and one process issues all work. DDP "
      "keeps a model per process and moves only gradients, {} per rank and step whatever the "
      "number of ranks.",
      format_bytes(traffic(context.dp_devices.front())),
      format_bytes(context.record.all_reduces.bytes));
  if (!context.judged()) return text;
  return text + fmt::format(
                    " Of its communication, {} per step ({:.1f} % of the step) was not hidden "
                    "behind backward.",
                    format_ms(context.communication.exposed_ms), 100 * exposed_share(context.ddp));
}

}  // namespace

std::vector<Answer> answer_questions(const AnswerContext& context) {
  return {
      {"processes", "How many processes are there, and which rank uses which device?",
       answer_processes(context)},
      {"data", "Is the data split automatically?", answer_automatic(context)},
      {"data", "How is the batch distributed?", answer_distribution(context)},
      {"communication", "When does communication happen?", answer_when(context)},
      {"communication", "Why is it needed?", answer_why_needed(context)},
      {"balance", "Are the devices more balanced than in practical 5?", answer_balanced(context)},
      {"balance", "Is device 0 still the bottleneck?", answer_device0(context)},
      {"DP against DDP", "Which of the two is faster?", answer_faster(context)},
      {"DP against DDP", "Which scales better?", answer_scales(context)},
      {"DP against DDP", "Why?", answer_why(context)},
  };
}

}  // namespace lockstep::cli::practical6
