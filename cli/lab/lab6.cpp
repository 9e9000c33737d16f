// Practical 6: DataParallel (DP) against DistributedDataParallel (DDP) on the same devices.

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include "cli/lab/lab_charts.hpp"
#include "cli/lab/lab_plan.hpp"
#include "cli/lab/lab_tables.hpp"
#include "cli/lab/lab_text.hpp"
#include "cli/lab/lab_trained.hpp"
#include "lockstep/error.hpp"
#include "lockstep/units.hpp"

namespace lockstep::cli::practical6 {
namespace {

// ---- Plan: "single"; "dp" and "ddp", both by the same numbers of devices.

const std::vector<int> kCourseRanks = {1, 2, 4};

// Ascending, with 1 among them: every speed-up is against one rank.
std::vector<int> with_one(std::vector<int> ranks) {
  if (ranks.front() != 1) ranks.insert(ranks.begin(), 1);
  return ranks;
}

struct Scale {
  std::vector<SlotPlan> slots;  // of all devices
  std::vector<int> ranks;
};

// A rank needs a device of its own. Without --devices the GPUs are used if there are enough of
// them, otherwise the cores, which may be shared.
Scale choose_scale(const LabOptions& options, const Hardware& hardware) {
  const bool asked = !options.list("--ranks").empty();
  const auto ranks = with_one(options.ascending("--ranks", kCourseRanks));
  if (!options.devices.empty()) {
    Scale scale{plan_devices(options.devices, hardware), ranks};
    const int devices = static_cast<int>(scale.slots.size());
    if (!asked) scale.ranks = scaling_points(devices);
    if (scale.ranks.back() > devices) {
      throw Error(Code::kUsage,
                  fmt::format("{} ranks need a device each, but --devices {} names {}",
                              scale.ranks.back(), options.devices, devices),
                  "name more devices, fewer --ranks, or leave --devices out");
    }
    return scale;
  }
  if (!asked && hardware.gpus > 1) {
    return {plan_devices("cuda", hardware), scaling_points(hardware.gpus)};
  }
  // Ranks that shared a GPU would show no scaling.
  const int most = ranks.back();
  const std::string spec =
      hardware.gpus >= most ? default_devices(hardware, most) : fmt::format("cpu:{}", most);
  return {plan_devices(spec, hardware), ranks};
}

LabPlan plan(const LabOptions& options, const Hardware& hardware) {
  const auto [slots, ranks] = choose_scale(options, hardware);
  const LabConfig config{hardware, slots, choose_sizes(options, slots[0].kind)};
  require_row_for_each_rank(config.sizes.batch, ranks.back(), "--ranks");
  const std::string bucket_mib = options.text("--bucket-mib");
  std::vector<Experiment> timed = {timed_experiment(Method::kSingle, config, 1)};
  for (const int count : ranks) {
    timed.push_back(timed_experiment(Method::kDataParallel, config, count));
    timed.push_back(timed_experiment(Method::kDistributed, config, count));
    if (!bucket_mib.empty()) append(timed.back(), {"--bucket-mib", bucket_mib});
  }
  LabPlan plan{.repetitions = options.repetitions(), .experiments = {}};
  add_in_turns(plan, timed);
  return plan;
}

// The number of devices to look at closely: the most ranks that each have hardware of their own,
// or the most of all if no several ranks do.
int64_t focus_of(const LabRuns& runs) {
  int64_t best = runs.some("ddp").back().size;
  for (const auto& set_up : runs.all("ddp")) {
    if (set_up.devices > 1 && sharing(set_up) == 1) best = set_up.size;
  }
  return best;
}

// What tables and answers look at: both methods on the same devices.
struct AnswerContext {
  const LabRuns& runs;
  const RunSet& single;
  const RunSet& dp;
  const RunSet& ddp;
  int ranks;
  Comparison comparison;  // how much faster DDP is
  Communication communication;
  std::vector<DeviceRecord> dp_devices;
  std::vector<DeviceRecord> ddp_devices;
  const RunRecord& record;  // DDP, first repetition
  std::string warning;      // why times cannot be judged; empty: they can

  explicit AnswerContext(const LabRuns& of)
      : runs(of),
        single(of.of("single")),
        dp(of.of("dp", focus_of(of))),
        ddp(of.of("ddp", focus_of(of))),
        ranks(ddp.devices),
        comparison(compare(dp, ddp)),
        communication(communication_of(ddp)),
        dp_devices(merged_devices(dp)),
        ddp_devices(merged_devices(ddp)),
        record(ddp.first()),
        warning(times_warning(disturbance_of(of, {"single", "dp", "ddp"}),
                              {comparison, compare(of.of("dp"), dp), compare(of.of("ddp"), ddp)})) {
  }

  bool one_rank() const { return ranks < 2; }
  bool shared() const { return sharing(ddp) > 1; }
  std::string others() const { return ranks == 2 ? "the other" : "the others on average"; }
  bool judged() const { return warning.empty(); }
  bool same_speed() const { return std::abs(comparison.speedup.mean - 1) <= comparison.margin(); }
};

// Buckets of the last step whose communication backward hid wholly.
int64_t finished_in_backward(const RunRecord& run) {
  return std::count_if(run.buckets.begin(), run.buckets.end(), [&run](const BucketRecord& bucket) {
    return bucket.finished_ms <= run.backward_ms;
  });
}

// ---- Tables

// The table of the course's page, filled in with this run's figures.
Table aspects_table(const AnswerContext& context) {
  Table table(fmt::format("DataParallel against DDP on {}", plural(context.ranks, "device")),
              {{"aspect"}, {"DataParallel"}, {"DDP"}});
  const auto add = [&](const std::string& aspect, const auto& cell) {
    table.add_row({aspect, cell(context.dp), cell(context.ddp)});
  };
  add("processes", [](const RunSet& set_up) { return std::to_string(set_up.first().world_size); });
  const auto is_dp = [&context](const RunSet& set_up) { return &set_up == &context.dp; };
  add("data split",
      [&](const RunSet& set_up) { return is_dp(set_up) ? "by itself" : "by the program"; });
  add("… rows per device", [](const RunSet& set_up) { return format_rows(set_up.first().split); });
  add("device use: busy", [](const RunSet& set_up) {
    const Imbalance busy = imbalance_of(merged_devices(set_up));
    return percent_range(busy.least_busy, busy.most_busy);
  });
  add("… peak of device 0",
      [](const RunSet& set_up) { return format_bytes(merged_devices(set_up).front().peak_bytes); });
  if (!context.one_rank()) {
    add(context.ranks == 2 ? "… peak of device 1" : "… peak of the others",
        [](const RunSet& set_up) {
          return format_bytes(others_mean(merged_devices(set_up), &DeviceRecord::peak_bytes));
        });
  }
  add("scaling: step time", step_with_deviation);
  add("… speed-up", [&](const RunSet& set_up) {
    return format_speedup(compare(context.runs.of(is_dp(set_up) ? "dp" : "ddp"), set_up));
  });
  table.add_note(fmt::format(
      "Busy: share of the time in which devices computed.{} Speed-up: against the same method on "
      "one device.",
      context.ranks > 2 ? " Peak of the others: on average." : ""));
  return table;
}

Table methods_table(const AnswerContext& context) {
  std::vector<SetRow> rows = {{"single", &context.single}};
  for (const auto& ddp : context.runs.all("ddp")) {
    rows.push_back({"DP", &context.runs.of("dp", ddp.size), &context.single});
    rows.push_back({"DDP", &ddp, &context.single});
  }
  Table table = make_table<SetRow>(
      "All set-ups: DataParallel (DP) and DDP",
      {name_column("set-up"),
       {"processes", [](const SetRow& row) { return std::to_string(row.first().world_size); }},
       devices_column(),
       {"rows per device", [](const SetRow& row) { return format_rows(row.first().split); },
        Align::kLeft},
       step_column(),
       speedup_column()},
      rows);
  add_method_note(table, context.single);
  if (context.judged()) {
    table.add_note(fmt::format("On {} DDP is {}.", plural(context.ranks, "device"),
                               format_against(context.comparison, "DP")));
  }
  return table;
}

Table balance_table(const AnswerContext& context) {
  Table table =
      load_table("Balance: device by device", {{"DP", &context.dp}, {"DDP", &context.ddp}});
  table.add_note(
      "Under DP all devices belong to one process and device 0 serves the others; under DDP each "
      "belongs to a process of its own and holds weights, gradients and optimizer state alike.");
  add_busy_note(table, context.ddp);
  return table;
}

// Whether backward hid a bucket's communication.
std::string hidden_cell(const BucketRecord& bucket, double backward_ms) {
  if (bucket.finished_ms <= backward_ms) return "yes";
  return bucket.launched_ms < backward_ms ? "in part" : "no";
}

Table overlap_table(const AnswerContext& context) {
  using Bucket = BucketRecord;
  const double backward_ms = context.record.backward_ms;
  Table table = make_table<Bucket>(
      fmt::format("Overlap: the buckets of one step with {}", plural(context.ranks, "rank")),
      {{"bucket", [](const Bucket& bucket) { return std::to_string(bucket.index); }},
       {"parameters", [](const Bucket& bucket) { return std::to_string(bucket.parameters); }},
       {"size", [](const Bucket& bucket) { return format_bytes(bucket.bytes); }},
       {"launched", [](const Bucket& bucket) { return format_ms(bucket.launched_ms); }},
       {"finished", [](const Bucket& bucket) { return format_ms(bucket.finished_ms); }},
       {"after backward",
        [=](const Bucket& bucket) { return signed_ms(bucket.finished_ms - backward_ms); }},
       {"hidden", [=](const Bucket& bucket) { return hidden_cell(bucket, backward_ms); },
        Align::kLeft}},
      context.record.buckets);
  table.add_note(
      fmt::format("Times of rank 0's last step in the first run, from the start of backward, which "
                  "ended after {}. After backward: from its end to the end of the bucket. Hidden: "
                  "whether backward was still running meanwhile.",
                  format_ms(backward_ms)));
  return table;
}

Table communication_table(const AnswerContext& context) {
  // One rank has nothing to communicate.
  const auto unless_none = [](const auto& cell) {
    return [cell](const SetRow& row) -> std::string {
      return row.first().all_reduces.count > 0 ? cell(row) : "—";
    };
  };
  const auto time = [&](double Communication::*ms) {
    return unless_none(
        [ms](const SetRow& row) { return format_ms(communication_of(*row.set_up).*ms); });
  };
  std::vector<SetRow> rows;
  for (const auto& set_up : context.runs.all("ddp")) rows.push_back({"DDP", &set_up});
  Table table = make_table<SetRow>(
      "Communication per step",
      {devices_column("ranks"),
       {"all-reduces",
        [](const SetRow& row) { return fmt::format("{:g}", row.first().all_reduces.count); }},
       {"bytes", [](const SetRow& row) { return format_bytes(row.first().all_reduces.bytes); }},
       {"total", time(&Communication::total_ms)},
       {"exposed", time(&Communication::exposed_ms)},
       {"hidden/total", unless_none([](const SetRow& row) {
          return format_percent(communication_of(*row.set_up).hidden_share());
        })},
       {"exposed/step", unless_none([](const SetRow& row) {
          return fmt::format("{:.1f} %", 100 * exposed_share(*row.set_up));
        })}},
      rows);
  table.add_note(
      "Total: from launch to finish of the buckets, mean over ranks and runs, waiting for peers "
      "included. Exposed: what the training thread itself spent on it. Hidden: the rest, behind "
      "backward.");
  return table;
}

Table scaling_table(const AnswerContext& context) {
  std::vector<SetRow> rows;
  const auto add = [&rows](const char* name, const std::vector<RunSet>& sets) {
    for (const auto& set_up : sets) {
      rows.push_back({name, &set_up, &set_up == &sets.front() ? nullptr : &sets.front()});
    }
  };
  add("DP", context.runs.all("dp"));
  add("DDP", context.runs.all("ddp"));
  std::vector<SetColumn> columns = {name_column("method"), devices_column(), step_column(),
                                    range_column(), speedup_column()};
  if (context.judged()) columns.push_back(proportional_column());
  Table table =
      make_table<SetRow>("Scaling: each method against itself on one device", columns, rows);
  add_method_note(table, context.single);
  if (context.judged()) add_proportional_note(table);
  return table;
}

// ---- Charts

std::string devices_text(const RunSet& set_up) {
  return plural(set_up.devices, "device") + (sharing(set_up) > 1 ? ", shared" : "");
}

Figure step_time_figure(const AnswerContext& context) {
  const auto bars = [&context](const char* name, const char* what) {
    LineSeries series = step_series(name, context.runs.all(what));
    return BarSeries{name, std::move(series.y), std::move(series.deviations)};
  };
  BarChart chart{.title = "Step time: DP against DDP",
                 .unit = Unit::kMilliseconds,
                 .categories = {},
                 .series = {bars("DP", "dp"), bars("DDP", "ddp")}};
  for (const auto& set_up : context.runs.all("ddp")) {
    chart.categories.push_back(devices_text(set_up));
  }
  return {std::move(chart),
          fmt::format("Mean step time with its deviation; on {} DP took {} and DDP {}.",
                      devices_text(context.ddp), step_of(context.dp), step_of(context.ddp))};
}

Figure memory_figure(const AnswerContext& context) {
  return {
      peak_chart({{"DP", &context.dp}, {"DDP", &context.ddp}}),
      context.one_rank()
          ? "Most bytes live at once in the timed steps."
          : fmt::format(
                "Most bytes live at once in the timed steps. Device 0 held {} {} under DP and {} "
                "{} under DDP.",
                against_text(extra_on_first(context.dp_devices, &DeviceRecord::peak_bytes)),
                context.others(),
                against_text(extra_on_first(context.ddp_devices, &DeviceRecord::peak_bytes)),
                context.others())};
}

Figure overlap_figure(const AnswerContext& context) {
  const RunRecord& run = context.record;
  return {bucket_timeline(fmt::format("Buckets of one step with {}", plural(context.ranks, "rank")),
                          run),
          fmt::format("Rank 0's last step in the first run: backward ended after {}, and {} of {} "
                      "had finished by then.",
                      format_ms(run.backward_ms), finished_in_backward(run),
                      plural(static_cast<int64_t>(run.buckets.size()), "bucket"))};
}

std::vector<Figure> figures(const AnswerContext& context) {
  std::vector<Figure> all = {step_time_figure(context), memory_figure(context)};
  if (!context.record.buckets.empty()) all.push_back(overlap_figure(context));
  return all;
}

// ---- Answers

const std::string kOneRank = "This run had one rank, so it cannot show it; try --ranks 1,2.";

std::string answer_processes(const AnswerContext& context) {
  std::vector<std::string> ranks;
  for (size_t rank = 0; rank < context.ddp_devices.size(); ++rank) {
    const DeviceRecord& device = context.ddp_devices[rank];
    ranks.push_back(fmt::format("rank {} on {} ({})", rank, device.name, hardware_of(device)));
  }
  std::vector<std::string> counts;
  for (const auto& set_up : context.runs.all("ddp")) {
    counts.push_back(std::to_string(set_up.first().world_size));
  }
  return fmt::format(
      "{}, one for each device: {}. DataParallel drove the same {} from {}. In all, the lab ran "
      "DDP with {} processes.",
      context.record.world_size, listed(ranks), plural(context.dp.devices, "device"),
      plural(context.dp.first().world_size, "process", "processes"), listed(counts));
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
      finished_in_backward(context.record), plural(static_cast<int64_t>(buckets.size()), "bucket"));
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
      "On {} a step took {} with DDP and {} with DataParallel", plural(context.ranks, "device"),
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

LabFacts trained(const AnswerContext& context) {
  const auto& sets = context.runs.all("ddp");
  std::vector<int> ranks;
  for (const auto& set_up : sets) ranks.push_back(set_up.devices);
  return what_was_trained(
      context.runs, sets.back(),
      {.lab = "6", .own = {{"--ranks", fmt::format("{}", fmt::join(ranks, ","))}}});
}

LabReport report(const LabRuns& runs) {
  const AnswerContext context(runs);
  return {.title = "Practical 6: DistributedDataParallel",
          .stamp = context.single.first(),
          .trained = trained(context),
          .warning = context.warning,
          .tables = {{"aspects", aspects_table(context)},
                     {"methods", methods_table(context)},
                     {"balance", balance_table(context)},
                     {"overlap", overlap_table(context)},
                     {"communication", communication_table(context)},
                     {"scaling", scaling_table(context)}},
          .figures = figures(context),
          .answers = {
              {"processes", "How many processes are there, and which rank uses which device?",
               answer_processes(context)},
              {"data", "Is the data split automatically?", answer_automatic(context)},
              {"data", "How is the batch distributed?", answer_distribution(context)},
              {"communication", "When does communication happen?", answer_when(context)},
              {"communication", "Why is it needed?", answer_why_needed(context)},
              {"balance", "Are the devices more balanced than in practical 5?",
               answer_balanced(context)},
              {"balance", "Is device 0 still the bottleneck?", answer_device0(context)},
              {"DP against DDP", "Which of the two is faster?", answer_faster(context)},
              {"DP against DDP", "Which scales better?", answer_scales(context)},
              {"DP against DDP", "Why?", answer_why(context)},
          }};
}

}  // namespace

Lab lab() {
  using Kind = LabFlag::Kind;
  return {.name = "6",
          .folder = "reports/lab6",
          .flags = {{.name = "--ranks",
                     .kind = Kind::kList,
                     .help = "how many ranks, one set-up each (default: 1,2,4)"},
                    {.name = "--bucket-mib",
                     .kind = Kind::kNumber,
                     .help = "largest gradient bucket (default: 25)"}},
          .examples = {{"", "DDP with 1, 2 and 4 ranks"},
                       {"--ranks 1,2,3 --bucket-mib 1", "other ranks, smaller buckets"}},
          .plan = plan,
          .report = report};
}

}  // namespace lockstep::cli::practical6
