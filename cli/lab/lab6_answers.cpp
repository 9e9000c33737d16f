#include "cli/lab/lab6_answers.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include "cli/lab/lab_text.hpp"
#include "lockstep/units.hpp"

namespace lockstep::cli {
namespace {

constexpr double kEvenMemory = 1.05;  // device 0 has more when it has 5 % more

// What most answers look at: both methods on the same devices.
struct Scene {
  const Lab6Results& results;
  const RunSet& dp;
  const RunSet& ddp;
  int ranks;
  Comparison comparison;  // how much faster DDP is
  Communication communication;
  std::vector<DeviceRecord> dp_devices;
  std::vector<DeviceRecord> ddp_devices;
  const RunRecord& record;  // DDP, first repetition

  explicit Scene(const Lab6Results& of)
      : results(of),
        dp(of.data_parallel[of.focus()]),
        ddp(of.distributed[of.focus()]),
        ranks(ddp.devices),
        comparison(compare(dp, ddp)),
        communication(communication_of(ddp)),
        dp_devices(merged_devices(dp)),
        ddp_devices(merged_devices(ddp)),
        record(ddp.runs.front()) {}

  bool one_rank() const { return ranks < 2; }
  bool shared() const { return sharing(ddp) > 1; }
  std::string noise(const Comparison& of) const {
    return noise_remark(results.others_busy_cores, of);
  }
};

std::string one_rank_remark() {
  return "This run had one rank, so it cannot show it; try --ranks 1,2.";
}

std::string shared_sentence(const Scene& scene) {
  return scene.shared() ? " " + shared_remark(scene.ddp) : "";
}

std::string answer_processes(const Scene& scene) {
  std::vector<std::string> places;
  for (size_t rank = 0; rank < scene.ddp_devices.size(); ++rank) {
    const DeviceRecord& device = scene.ddp_devices[rank];
    places.push_back(fmt::format("rank {} on {} ({})", rank, device.name, hardware_of(device)));
  }
  std::vector<std::string> counts;
  for (const auto& set_up : scene.results.distributed) {
    counts.push_back(std::to_string(set_up.runs.front().world_size));
  }
  return fmt::format(
      "{}, one for each device: {}. DataParallel drove the same {} device{} from {} process. In "
      "all, the lab ran DDP with {} processes.",
      scene.record.world_size, fmt::join(places, ", "), scene.dp.devices,
      scene.dp.devices > 1 ? "s" : "", scene.dp.runs.front().world_size, fmt::join(counts, ", "));
}

std::string answer_automatic(const Scene& scene) {
  return fmt::format(
      "No: unlike DataParallel, DDP never touches the input. The program divides each batch of {} "
      "rows by hand, by rank and world size ({} rows per rank here), or leaves it to a "
      "DistributedSampler; forgetting it would train every rank on the same rows.",
      scene.record.effective_batch, format_rows(scene.record.split));
}

std::string answer_distribution(const Scene& scene) {
  const auto& split = scene.record.split;
  const bool even =
      std::adjacent_find(split.begin(), split.end(), std::not_equal_to<>()) == split.end();
  return fmt::format(
      "Rank r takes the r-th contiguous block: {} rows of each batch of {}{}. Rows go from the "
      "loader straight to their rank, where DataParallel first put all {} on device 0.{}",
      format_rows(split), scene.record.effective_batch,
      even ? "" : ", the first ranks one row more, with the mean weighted by rows",
      scene.record.effective_batch,
      loss_parity(scene.results.single.runs.front(), scene.record,
                  "those of one device with the whole batch"));
}

std::string answer_when(const Scene& scene) {
  const AllReduces& calls = scene.record.all_reduces;
  if (scene.one_rank() || scene.record.buckets.empty()) {
    return "Inside loss.backward(), bucket by bucket, as soon as all gradients of a bucket are "
           "there. " +
           one_rank_remark();
  }
  const auto& buckets = scene.record.buckets;
  const double backward_ms = scene.record.backward_ms;
  const auto hidden = std::count_if(buckets.begin(), buckets.end(), [&](const BucketRecord& b) {
    return b.finished_ms <= backward_ms;
  });
  const Communication& time = scene.communication;
  std::string text = fmt::format(
      "Inside loss.backward(): {:g} all-reduces of together {} per step, each launched as soon as "
      "its bucket is full. In the step shown, the first was launched {} after backward began and "
      "backward ended at {}; {} of {} buckets had finished by then. Of {} communication per step "
      "{} ({:.0f} %) was hidden behind backward and {} exposed.",
      calls.count, format_bytes(calls.bytes), format_ms(buckets.front().launched_ms),
      format_ms(backward_ms), hidden, buckets.size(), format_ms(time.total_ms),
      format_ms(time.hidden_ms), time.hidden_share() * 100, format_ms(time.exposed_ms));
  if (scene.ddp_devices.front().physical.find("core") != std::string::npos) {
    text +=
        " On the CPU the ranks' own cores also move the bytes, so little but waiting can be "
        "hidden.";
  }
  return text;
}

std::string answer_why_needed(const Scene& scene) {
  const std::string reason = fmt::format(
      "Each rank sees only its own rows ({}), so its gradient differs from the others'; averaging "
      "gives every rank the gradient of the whole batch, and equal updates keep the {} copies of "
      "the model equal without ever sending weights.",
      format_rows(scene.record.split), scene.ranks);
  return reason + (scene.one_rank() ? " " + one_rank_remark() : "");
}

std::string busy_text(const Imbalance& imbalance) {
  return fmt::format("{:.0f} to {:.0f} %", imbalance.least_busy * 100, imbalance.most_busy * 100);
}

std::string answer_balanced(const Scene& scene) {
  if (scene.one_rank()) return one_rank_remark();
  const Imbalance dp = imbalance_of(scene.dp);
  const Imbalance ddp = imbalance_of(scene.ddp);
  const bool memory = std::abs(ddp.memory - 1) < std::abs(dp.memory - 1);
  const bool busy = ddp.busy_gap() <= dp.busy_gap() || ddp.busy_gap() <= kEquallyBusy;
  std::string text = fmt::format(
      "{} Device 0's peak was {:.2f} times the others' under DataParallel and {:.2f} times under "
      "DDP; devices were busy {} of the time under DataParallel and {} under DDP.",
      memory && busy   ? "Yes."
      : memory || busy ? "In part."
                       : "Not in this run.",
      dp.memory, ddp.memory, busy_text(dp), busy_text(ddp));
  if (memory && busy) text += " Every rank does the same work on its own share of the rows.";
  if (scene.shared()) text += " On shared hardware, waiting for it counts as busy.";
  return text;
}

std::string answer_device0(const Scene& scene) {
  if (scene.one_rank()) return one_rank_remark();
  const auto extra = [](const std::vector<DeviceRecord>& devices) {
    return signed_bytes(extra_on_first(devices, &DeviceRecord::peak_bytes));
  };
  const bool even = imbalance_of(scene.ddp).memory <= kEvenMemory;
  return fmt::format(
      "{} Against the others' mean its peak was {} under DataParallel and {} under DDP, and it "
      "moved {} per step against {}.{} What limits a step is the slowest rank, since all wait for "
      "it in the all-reduce.",
      even ? "No." : "It still holds more in this run.", extra(scene.dp_devices),
      extra(scene.ddp_devices), format_bytes(traffic(scene.dp_devices.front())),
      format_bytes(traffic(scene.ddp_devices.front())),
      even ? " Nothing is gathered on it: each rank computes its own loss and applies its own "
             "update."
           : "");
}

std::string answer_faster(const Scene& scene) {
  const double speedup = scene.comparison.speedup.mean;
  const std::string figures =
      fmt::format("On {} device{} a step took {} with DDP and {} with DataParallel", scene.ranks,
                  scene.one_rank() ? "" : "s", format_ms(pooled_step_ms(scene.ddp).mean),
                  format_ms(pooled_step_ms(scene.dp).mean));
  std::string text;
  if (std::abs(speedup - 1) <= scene.comparison.margin()) {
    text = fmt::format("Neither, measurably. {}.", figures);
  } else if (speedup > 1) {
    text = fmt::format("DDP. {}: {:.2f} times as fast.", figures, speedup);
  } else {
    text = fmt::format("DataParallel. {}: DDP is {:.2f} times slower.", figures, 1 / speedup);
  }
  if (scene.one_rank()) text += " " + one_rank_remark();
  return text + shared_sentence(scene) + scene.noise(scene.comparison);
}

std::string series(const std::vector<RunSet>& sets) {
  std::vector<std::string> parts;
  for (size_t i = 1; i < sets.size(); ++i) {
    parts.push_back(fmt::format("{:.2f} on {}", compare(sets.front(), sets[i]).speedup.mean,
                                device_count(sets[i])));
  }
  return fmt::format("{}", fmt::join(parts, "; "));
}

std::string answer_scales(const Scene& scene) {
  if (scene.one_rank()) return one_rank_remark();
  const Comparison dp = compare(scene.results.data_parallel.front(), scene.dp);
  const Comparison ddp = compare(scene.results.distributed.front(), scene.ddp);
  const double gap = ddp.speedup.mean - dp.speedup.mean;
  const bool equal = std::abs(gap) <= std::max(ddp.margin(), dp.margin());
  const std::string figures = fmt::format(
      "Against itself on one device DDP reached {:.2f} times on {} ({:.0f} % of proportional) and "
      "DataParallel {:.2f} ({:.0f} %).",
      ddp.speedup.mean, scene.ranks, ddp.efficiency * 100, dp.speedup.mean, dp.efficiency * 100);
  std::string text = equal     ? "In this run neither measurably. "
                     : gap > 0 ? "DDP. "
                               : "In this run DataParallel. ";
  text += figures;
  if (scene.results.distributed.size() > 2) {
    text += fmt::format(" All counts, DDP: {}. DataParallel: {}.",
                        series(scene.results.distributed), series(scene.results.data_parallel));
  }
  const RunSet& largest = scene.results.distributed.back();
  if (!scene.shared() && sharing(largest) > 1) {
    text += fmt::format(
        " The {} ranks of the largest run shared this machine's cores, so they show correctness, "
        "not speed.",
        largest.devices);
  }
  return text + shared_sentence(scene) + scene.noise(ddp.unsafe ? ddp : dp);
}

std::string answer_why(const Scene& scene) {
  if (scene.one_rank()) return one_rank_remark();
  const double step_ms = pooled_step_ms(scene.ddp).mean;
  return fmt::format(
      "DataParallel copies the whole model out and gathers outputs and gradients on device 0 in "
      "every step ({} through it, growing with the devices), and one process issues all work. DDP "
      "keeps a model per process and moves only gradients, {} per rank and step whatever the "
      "number of ranks; {} of that ({:.1f} % of the step) were not hidden behind backward.",
      format_bytes(traffic(scene.dp_devices.front())), format_bytes(scene.record.all_reduces.bytes),
      format_ms(scene.communication.exposed_ms),
      step_ms > 0 ? 100 * scene.communication.exposed_ms / step_ms : 0);
}

}  // namespace

std::vector<Answer> answer_lab6(const Lab6Results& results) {
  const Scene scene(results);
  return {
      {"processes", "How many processes are there, and which rank uses which device?",
       answer_processes(scene)},
      {"data", "Is the data split automatically?", answer_automatic(scene)},
      {"data", "How is the batch distributed?", answer_distribution(scene)},
      {"communication", "When does communication happen?", answer_when(scene)},
      {"communication", "Why is it needed?", answer_why_needed(scene)},
      {"balance", "Are the devices more balanced than in practical 5?", answer_balanced(scene)},
      {"balance", "Is device 0 still the bottleneck?", answer_device0(scene)},
      {"DP against DDP", "Which of the two is faster?", answer_faster(scene)},
      {"DP against DDP", "Which scales better?", answer_scales(scene)},
      {"DP against DDP", "Why?", answer_why(scene)},
  };
}

}  // namespace lockstep::cli
