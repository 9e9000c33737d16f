#include "cli/lab/lab10_answers.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>

#include "cli/lab/lab10_measures.hpp"
#include "cli/lab/lab_measures.hpp"
#include "cli/lab/lab_text.hpp"
#include "lockstep/units.hpp"

namespace lockstep::cli {
namespace {

constexpr const char* kNoTrace = "This run recorded no actions, so it cannot show it.";

// "2, 4 and 8".
std::string listed(const std::vector<std::string>& words) {
  if (words.size() < 2) return fmt::format("{}", fmt::join(words, ""));
  const std::vector<std::string> first(words.begin(), words.end() - 1);
  return fmt::format("{} and {}", fmt::join(first, ", "), words.back());
}

template <class Text>
std::string listed(const std::vector<SizedRuns>& all, const Text& text_of) {
  std::vector<std::string> words;
  for (const auto& sized : all) words.push_back(text_of(sized));
  return listed(words);
}

std::string sizes_of(const std::vector<SizedRuns>& all) {
  return listed(all, [](const SizedRuns& sized) { return std::to_string(sized.size); });
}

std::string percent(double fraction) {
  return fmt::format("{:.0f} %", fraction * 100);
}

std::string step_of(const RunSet& set_up) {
  return format_ms(pooled_step_ms(set_up).mean);
}

std::string plural(int64_t count, const std::string& what) {
  return fmt::format("{} {}{}", count, what, count == 1 ? "" : "s");
}

// "rank 0 uses cpu:0 (stage 0) and cpu:2 (stage 1)".
std::string rank_text(const PipelineRecord& pipeline, int rank) {
  std::vector<std::string> places;
  for (const auto& stage : pipeline.stages) {
    if (stage.rank == rank) {
      places.push_back(fmt::format("{} (stage {})", stage.device, stage.stage));
    }
  }
  return fmt::format("rank {} uses {}", rank, listed(places));
}

std::string sharing_text(const RunSet& set_up) {
  return sharing(set_up) > 1 ? " " + shared_remark(set_up) : "";
}

std::string answer_processes(const Lab10Results& results) {
  const RunRecord& run = results.base.runs.front();
  const PipelineRecord& pipeline = pipeline_of(results.base);
  if (pipeline.stages.empty()) {
    return fmt::format("{}. This run recorded no stages, so it cannot show where they lie.",
                       plural(run.world_size, "process"));
  }
  std::vector<std::string> ranks;
  for (int rank = 0; rank < ranks_of(pipeline); ++rank) ranks.push_back(rank_text(pipeline, rank));
  return fmt::format(
             "{} processes, one for each rank: {}. Ranks divide the batch (data parallel), the "
             "stages of a rank divide the model (model parallel), so {} logical devices work on "
             "one step.",
             run.world_size, fmt::join(ranks, "; "), devices_used(pipeline)) +
         sharing_text(results.base);
}

// "8 rows each", "9 8 8 7 rows".
std::string rows_text(const std::vector<int64_t>& rows) {
  const bool even = std::all_of(rows.begin(), rows.end(),
                                [&rows](int64_t count) { return count == rows.front(); });
  return even ? fmt::format("{} rows each", rows.front())
              : fmt::format("{} rows", format_rows(rows));
}

std::string answer_count(const Lab10Results& results) {
  const PipelineRecord& pipeline = pipeline_of(results.base);
  const ActionCounts counts = counts_of(pipeline, 0);
  if (pipeline.rows.empty()) return "This run recorded no micro-batches, so it cannot show it.";
  std::string text = fmt::format(
      "{} on each rank: of the batch's {} rows rank 0 takes {}, and cuts them into micro-batches "
      "of {}.",
      pipeline.micro_batches, rows_of(results.base),
      std::accumulate(pipeline.rows.begin(), pipeline.rows.end(), int64_t{0}),
      rows_text(pipeline.rows));
  if (counts.forwards == 0) return text + " " + kNoTrace;
  return text + fmt::format(
                    " Each goes forward and backward through every stage: {} forward and {} "
                    "backward actions of rank 0 in a step.",
                    counts.forwards, counts.backwards);
}

std::string answer_when(const Lab10Results& results) {
  std::vector<Synchronisation> syncs;
  for (const auto& sync : synchronisations_of(pipeline_of(results.base))) {
    if (sync.rank == 0) syncs.push_back(sync);
  }
  if (syncs.empty()) return "The trace of this run has no synchronisation, so it cannot show it.";
  int64_t trained = 0;
  int64_t all = 0;
  for (const auto& stage : pipeline_of(results.base).stages) {
    if (stage.rank != 0) continue;
    ++all;
    if (stage.parameters > 0) ++trained;
  }
  std::vector<std::string> stages;
  int64_t early = 0;
  double hidden = 0;
  for (const auto& sync : syncs) {
    stages.push_back(fmt::format("stage {} from {} to {} after its last backward at {}", sync.stage,
                                 format_ms(sync.begin_ms), format_ms(sync.end_ms),
                                 format_ms(sync.last_backward_ms)));
    if (sync.begin_ms < sync.last_backward_ms) ++early;
    hidden += sync.hidden_ms;
  }
  const bool once = static_cast<int64_t>(syncs.size()) == trained;
  std::string text = fmt::format(
      "{}, on rank 0: {}.",
      once ? fmt::format("Once per step for each stage{}", trained < all ? " with weights" : "")
           : fmt::format("{} in a step for {} with weights",
                         plural(static_cast<int64_t>(syncs.size()), "synchronisation"),
                         plural(trained, "stage")),
      fmt::join(stages, "; "));
  text += early > 0 ? fmt::format(" {} began before the stage's last backward had ended.",
                                  plural(early, "synchronisation"))
                    : fmt::format(" Until then gradients only add up over the {} micro-batches.",
                                  pipeline_of(results.base).micro_batches);
  if (hidden > 0) {
    text += fmt::format(" {} of it lay in the drain, while an earlier stage still went backward.",
                        format_ms(hidden));
  }
  return text;
}

std::string answer_micro_batches(const Lab10Results& results) {
  const auto& all = results.micro_batches;
  const auto counted = [&all](int64_t ActionCounts::*which) {
    return listed(all, [which](const SizedRuns& sized) {
      return std::to_string(counts_of(pipeline_of(sized.runs), 0).*which);
    });
  };
  if (counts_of(pipeline_of(results.base), 0).forwards == 0) return kNoTrace;
  const auto bubbles = [&all](double PipelineRecord::*bubble) {
    return listed(
        all, [bubble](const SizedRuns& sized) { return percent(mean_of(sized.runs, bubble)); });
  };
  std::string text = fmt::format(
      "With {} micro-batches rank 0 prints {} forward and {} backward lines in a step: one of each "
      "per micro-batch and stage. More of them fill and drain the stages in smaller steps, so the "
      "bubble, in theory (stages - 1) / (micro-batches + stages - 1), was predicted as {} and "
      "measured as {}.",
      sizes_of(all), counted(&ActionCounts::forwards), counted(&ActionCounts::backwards),
      bubbles(&PipelineRecord::predicted_bubble), bubbles(&PipelineRecord::bubble));
  text += fmt::format(" A step took {}, and gpipe's stages held up to {} micro-batches at once.",
                      listed(all, [](const SizedRuns& sized) { return step_of(sized.runs); }),
                      listed(all, [](const SizedRuns& sized) {
                        return std::to_string(most_held(pipeline_of(sized.runs)));
                      }));
  const double first = mean_of(all.front().runs, &PipelineRecord::bubble);
  const double last = mean_of(all.back().runs, &PipelineRecord::bubble);
  if (all.size() > 1 && last >= first) text += " Here the measured bubble did not shrink.";
  return text + sharing_text(results.base);
}

std::string answer_batches(const Lab10Results& results) {
  const auto& all = results.batches;
  const auto base_order = order_of(pipeline_of(results.base));
  if (base_order.empty()) return kNoTrace;
  if (all.size() < 2) return "This run had batches of one size only, so it cannot show it.";
  std::vector<std::string> others;
  for (const auto& [rows, runs] : all) {
    if (order_of(pipeline_of(runs)) != base_order) others.push_back(std::to_string(rows));
  }
  const ActionCounts counts = counts_of(pipeline_of(results.base));
  std::string text =
      others.empty()
          ? fmt::format(
                "No: with {} rows every device of every rank ran the same {} actions in the same "
                "order.",
                sizes_of(all), counts.forwards + counts.backwards)
          : fmt::format("In this run it did: with {} rows the order of actions was another one.",
                        listed(others));
  const auto of_each = [&all](const auto& value) {
    return listed(all, [&value](const SizedRuns& sized) { return value(sized.runs); });
  };
  text += fmt::format(
      " Micro-batches had {} rows, the message between stages was {}, and a step took {}.",
      of_each([](const RunSet& runs) {
        const auto& rows = pipeline_of(runs).rows;
        return std::to_string(rows.empty() ? 0 : rows.front());
      }),
      of_each([](const RunSet& runs) { return format_bytes(message_bytes(pipeline_of(runs))); }),
      of_each(step_of));
  const int64_t first = all.front().runs.runs.front().all_reduces.bytes;
  const bool alike = std::all_of(all.begin(), all.end(), [first](const SizedRuns& sized) {
    return sized.runs.runs.front().all_reduces.bytes == first;
  });
  text += alike ? fmt::format(
                      " The synchronisation stays at {} per step: gradients are as large as the "
                      "weights, whatever the batch.",
                      format_bytes(first))
                : fmt::format(" All-reduces moved {} per step.", of_each([](const RunSet& runs) {
                                return format_bytes(runs.runs.front().all_reduces.bytes);
                              }));
  return text;
}

std::string answer_one_process(const Lab10Results& results) {
  const PipelineRecord& pipeline = pipeline_of(results.one_process);
  const RunRecord& run = results.one_process.runs.front();
  if (pipeline.actions.empty()) return kNoTrace;
  const ActionCounts others = counts_of(pipeline, 1);
  std::string text =
      others.forwards == 0
          ? fmt::format(
                "Rank 1 does not exist: rank 0 takes all {} rows on {}, and its trace has {} "
                "forward and {} backward actions.",
                rows_of(results.one_process), listed(devices_of(pipeline, 0)),
                counts_of(pipeline).forwards, counts_of(pipeline).backwards)
          : fmt::format("Against expectation the trace has {} forward actions of rank 1.",
                        others.forwards);
  const int64_t syncs = counts_of(pipeline).synchronisations;
  const AllReduces& calls = results.base.runs.front().all_reduces;
  if (syncs == 0 && run.all_reduces.count == 0) {
    return text + fmt::format(
                      " There is no synchronisation: no such line in the trace and 0 all-reduces, "
                      "against {:g} of together {} per step with {} processes, since nobody else "
                      "has gradients to average with. The stages still work as a pipeline.",
                      calls.count, format_bytes(calls.bytes), results.base.runs.front().world_size);
  }
  return text + fmt::format(
                    " Against expectation there was still a synchronisation: {} in the trace, "
                    "{:g} all-reduces per step.",
                    syncs, run.all_reduces.count);
}

std::string answer_same_device(const Lab10Results& results) {
  const PipelineRecord& same = pipeline_of(results.same_device);
  const PipelineRecord& base = pipeline_of(results.base);
  if (same.actions.empty()) return kNoTrace;
  std::vector<std::string> ranks;
  bool one_each = true;
  for (int rank = 0; rank < ranks_of(same); ++rank) {
    const auto devices = devices_of(same, rank);
    one_each = one_each && devices.size() == 1;
    ranks.push_back(fmt::format("rank {}'s stages lie on {} instead of {}", rank, listed(devices),
                                listed(devices_of(base, rank))));
  }
  const ActionCounts counts = counts_of(same);
  std::string text = fmt::format(
      "{} {}, {} in all instead of {}. Forward and backward lines are as many, {} and {}{}.",
      one_each ? "No, each rank uses one:" : "Against expectation several are still used:",
      fmt::join(ranks, "; "), plural(devices_used(same), "device"), devices_used(base),
      counts.forwards, counts.backwards, one_each ? ", but all of a rank name one device" : "");
  const double overlap = overlap_of(same);
  const double before = overlap_of(base);
  text += overlap > 0 ? fmt::format(" Still {} of rank 0's computing time overlapped",
                                    format_share(overlap))
                      : fmt::format(" No two actions of rank 0 ran at the same time{}",
                                    before > 0 ? ": the overlap is gone" : "");
  text += fmt::format(", {} with a device for each stage; a step took {} instead of {}.",
                      before > 0 ? "against " + format_share(before) : "nor did they",
                      step_of(results.same_device), step_of(results.base));
  return text + sharing_text(results.base);
}

}  // namespace

std::vector<Answer> answer_lab10_parts(const Lab10Results& results) {
  const std::string counts = sizes_of(results.micro_batches);
  const std::string batches = sizes_of(results.batches);
  return {
      {"10.1 base", "How many processes are there, and which devices does each rank use?",
       answer_processes(results)},
      {"10.1 base", "How many micro-batches are there?", answer_count(results)},
      {"10.1 base", "When does synchronisation happen?", answer_when(results)},
      {"10.2 micro-batches",
       fmt::format("MICRO_BATCHES {}: what changes in the output; how many forward and backward "
                   "steps now?",
                   counts),
       answer_micro_batches(results)},
      {"10.3 batch size",
       fmt::format("Batch {}: does the execution pattern change; what stays the same?", batches),
       answer_batches(results)},
      {"10.4 one process", "What happens to rank 1; is there still a synchronisation?",
       answer_one_process(results)},
      {"10.5 one device", "What changes in the output; are several devices still used?",
       answer_same_device(results)},
  };
}

std::vector<Answer> answer_lab10(const Lab10Results& results) {
  auto answers = answer_lab10_parts(results);
  for (auto& answer : answer_lab10_schedules(results)) answers.push_back(std::move(answer));
  return answers;
}

}  // namespace lockstep::cli
