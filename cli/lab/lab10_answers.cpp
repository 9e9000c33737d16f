// The questions of practical 10, answered from its records.

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "cli/lab/lab10.hpp"
#include "lockstep/units.hpp"

namespace lockstep::cli::practical10 {
namespace {

constexpr const char* kNoTrace = "This run recorded no actions, so it cannot show it.";

// "2, 4 and 8": what `text_of` says of each.
template <class Text>
std::string listed_for(const std::vector<RunSet>& all, const Text& text_of) {
  std::vector<std::string> words;
  for (const auto& set_up : all) words.push_back(text_of(set_up));
  return listed(words);
}

std::string sizes_of(const std::vector<RunSet>& all) {
  return listed_for(all, [](const RunSet& set_up) { return std::to_string(set_up.size); });
}

// "rank 0 uses cpu:0 (stage 0) and cpu:2 (stage 1)".
std::string rank_text(const PipelineRecord& pipeline, int rank) {
  std::vector<std::string> devices;
  for (const auto& stage : pipeline.stages) {
    if (stage.rank == rank) {
      devices.push_back(fmt::format("{} (stage {})", stage.device, stage.stage));
    }
  }
  return fmt::format("rank {} uses {}", rank, listed(devices));
}

std::string answer_processes(const AnswerContext& context) {
  const RunRecord& run = context.base.first();
  const PipelineRecord& pipeline = pipeline_of(context.base);
  if (pipeline.stages.empty()) {
    return fmt::format(
        "There were {}. This run recorded no stages, so it cannot show where they lie.",
        counted(run.world_size, "process"));
  }
  std::vector<std::string> ranks;
  for (int rank = 0; rank < ranks_of(pipeline); ++rank) ranks.push_back(rank_text(pipeline, rank));
  return fmt::format(
             "{}, one for each rank: {}. Ranks divide the batch (data parallel) and the "
             "stages of a rank divide the model (model parallel), so {} logical devices work on "
             "one step.",
             counted(run.world_size, "process"), fmt::join(ranks, "; "), devices_used(pipeline)) +
         sharing_sentence(context.base);
}

std::string answer_count(const AnswerContext& context) {
  const PipelineRecord& pipeline = pipeline_of(context.base);
  const ActionCounts counts = counts_of(pipeline, 0);
  if (pipeline.rows.empty()) return "This run recorded no micro-batches, so it cannot show it.";
  std::string text = fmt::format(
      "{} on each rank: of the batch's {} rows rank 0 takes {}, and cuts them into micro-batches "
      "of {}.",
      pipeline.micro_batches, rows_of(context.base),
      std::accumulate(pipeline.rows.begin(), pipeline.rows.end(), int64_t{0}),
      rows_text(pipeline.rows));
  if (counts.forwards == 0) return text + " " + kNoTrace;
  return text + fmt::format(
                    " Each goes forward and backward through every stage: {} forward and {} "
                    "backward actions of rank 0 in a step.",
                    counts.forwards, counts.backwards);
}

std::string answer_when(const AnswerContext& context) {
  std::vector<Synchronisation> syncs;
  for (const auto& sync : synchronisations_of(pipeline_of(context.base))) {
    if (sync.rank == 0) syncs.push_back(sync);
  }
  if (syncs.empty()) return "The trace of this run has no synchronisation, so it cannot show it.";
  int64_t trained = 0;
  int64_t all = 0;
  for (const auto& stage : pipeline_of(context.base).stages) {
    if (stage.rank != 0) continue;
    ++all;
    if (stage.parameters > 0) ++trained;
  }
  std::vector<std::string> stages;
  int64_t early = 0;
  double hidden = 0;
  for (const auto& sync : syncs) {
    stages.push_back(fmt::format("stage {} from {} to {}, its last backward having ended at {}",
                                 sync.stage, format_ms(sync.begin_ms), format_ms(sync.end_ms),
                                 format_ms(sync.last_backward_ms)));
    if (sync.begin_ms < sync.last_backward_ms) ++early;
    hidden += sync.hidden_ms;
  }
  const bool once = static_cast<int64_t>(syncs.size()) == trained;
  std::string text = fmt::format(
      "{}, on rank 0: {}.",
      once ? fmt::format("Once per step for each stage{}", trained < all ? " with weights" : "")
           : fmt::format("{} in a step for {} with weights",
                         counted(syncs.size(), "synchronisation"), counted(trained, "stage")),
      fmt::join(stages, "; "));
  if (hidden > 0) {
    text +=
        fmt::format(" {} of it was hidden: an earlier stage was still in its backward meanwhile.",
                    format_ms(hidden));
  }
  text += early > 0 ? fmt::format(" {} began before the stage's last backward had ended.",
                                  counted(early, "synchronisation"))
                    : fmt::format(" Until then gradients only add up over the {} micro-batches.",
                                  pipeline_of(context.base).micro_batches);
  return text;
}

// How long one micro-batch took in the first stage, after a space; nothing if it was not
// recorded.
std::string micro_batch_time(const std::vector<RunSet>& all, bool judged) {
  std::vector<std::string> rows;
  std::vector<std::string> times;
  for (const auto& set_up : all) {
    const PipelineRecord& pipeline = pipeline_of(set_up);
    if (pipeline.rows.empty() || pipeline.stages.empty()) return "";
    rows.push_back(std::to_string(pipeline.rows.front()));
    times.push_back(format_ms(pipeline.stages.front().forward_ms));
  }
  return fmt::format(" A micro-batch of {} rows took {} forward in the first stage{}.",
                     listed(rows), listed(times),
                     judged ? ": it reads the same weights however few its rows are" : "");
}

std::string answer_micro_batches(const AnswerContext& context) {
  const auto& all = context.micro_batches;
  const auto actions_of = [&all](int64_t ActionCounts::*which) {
    return listed_for(all, [which](const RunSet& set_up) {
      return std::to_string(counts_of(pipeline_of(set_up), 0).*which);
    });
  };
  if (counts_of(pipeline_of(context.base), 0).forwards == 0) return kNoTrace;
  const auto bubbles = [&all](double PipelineRecord::*bubble) {
    return listed_for(
        all, [bubble](const RunSet& set_up) { return format_percent(mean_of(set_up, bubble)); });
  };
  std::string text = fmt::format(
      "With {} micro-batches rank 0 prints {} forward and {} backward lines in a step: one of "
      "each per micro-batch and stage. In theory more micro-batches make the bubble smaller, "
      "(stages - 1) / (micro-batches + stages - 1) of the time; it was predicted as {} and "
      "measured as {}{}.",
      sizes_of(all), actions_of(&ActionCounts::forwards), actions_of(&ActionCounts::backwards),
      bubbles(&PipelineRecord::predicted_bubble), bubbles(&PipelineRecord::bubble),
      sharing(context.base) > 1 ? ", on devices that share hardware" : "");
  text +=
      fmt::format(" A step took {}, and gpipe's stages held up to {} micro-batches at once.",
                  listed_for(all, step_with_deviation), listed_for(all, [](const RunSet& set_up) {
                    return std::to_string(most_held(pipeline_of(set_up)));
                  }));
  text += micro_batch_time(all, context.judged());
  const double first = mean_of(all.front(), &PipelineRecord::bubble);
  const double last = mean_of(all.back(), &PipelineRecord::bubble);
  if (context.judged() && all.size() > 1 && last >= first) {
    text += " Here the measured bubble did not shrink.";
  }
  return text;
}

std::string answer_batches(const AnswerContext& context) {
  const auto& all = context.batches;
  const auto base_order = order_of(pipeline_of(context.base));
  if (base_order.empty()) return kNoTrace;
  if (all.size() < 2) return "This run had batches of one size only, so it cannot show it.";
  std::vector<std::string> others;
  for (const auto& set_up : all) {
    if (order_of(pipeline_of(set_up)) != base_order) others.push_back(std::to_string(set_up.size));
  }
  const ActionCounts counts = counts_of(pipeline_of(context.base));
  std::string text =
      others.empty()
          ? fmt::format(
                "No: with {} rows every device of every rank ran the same {} actions in the same "
                "order.",
                sizes_of(all), counts.forwards + counts.backwards)
          : fmt::format("In this run it did: with {} rows the actions ran in another order.",
                        listed(others));
  const auto of_each = [&all](const auto& text_of) { return listed_for(all, text_of); };
  text += fmt::format(
      " Micro-batches had {} rows, the message between stages was {}, and a step took {}.",
      of_each([](const RunSet& runs) {
        const auto& rows = pipeline_of(runs).rows;
        return std::to_string(rows.empty() ? 0 : rows.front());
      }),
      of_each([](const RunSet& runs) { return format_bytes(message_bytes(pipeline_of(runs))); }),
      of_each(step_with_deviation));
  const int64_t first = all.front().first().all_reduces.bytes;
  const bool alike = std::all_of(all.begin(), all.end(), [first](const RunSet& set_up) {
    return set_up.first().all_reduces.bytes == first;
  });
  text += alike ? fmt::format(
                      " The synchronisation stays at {} per step: gradients are as large as the "
                      "weights, whatever the batch.",
                      format_bytes(first))
                : fmt::format(" All-reduces moved {} per step.", of_each([](const RunSet& runs) {
                                return format_bytes(runs.first().all_reduces.bytes);
                              }));
  return text;
}

std::string answer_one_process(const AnswerContext& context) {
  const PipelineRecord& pipeline = pipeline_of(context.one_process);
  const RunRecord& run = context.one_process.first();
  if (pipeline.actions.empty()) return kNoTrace;
  const ActionCounts others = counts_of(pipeline, 1);
  std::string text = others.forwards == 0
                         ? fmt::format(
                               "Rank 1 does not exist, so no line begins with [Rank 1]: rank 0 "
                               "takes all {} rows on {}, and its trace has {} forward and {} "
                               "backward actions.",
                               rows_of(context.one_process), listed(devices_of(pipeline, 0)),
                               counts_of(pipeline).forwards, counts_of(pipeline).backwards)
                         : fmt::format("Against expectation the trace has {} of rank 1.",
                                       counted(others.forwards, "forward action"));
  const int64_t syncs = counts_of(pipeline).synchronisations;
  const AllReduces& calls = context.base.first().all_reduces;
  if (syncs == 0 && run.all_reduces.count == 0) {
    return text +
           fmt::format(
               " There is no synchronisation, since nobody else has gradients to average "
               "with: the trace has no such line, and there were no all-reduces. With {} there "
               "were {:g} per step, {} in all. The stages still work as a pipeline.",
               counted(context.base.first().world_size, "process"), calls.count,
               format_bytes(calls.bytes));
  }
  return text + fmt::format(
                    " Against expectation there was still a synchronisation: {} in the trace, "
                    "{:g} all-reduces per step.",
                    syncs, run.all_reduces.count);
}

std::string answer_same_device(const AnswerContext& context) {
  const PipelineRecord& same = pipeline_of(context.same_device);
  const PipelineRecord& base = pipeline_of(context.base);
  if (same.actions.empty()) return kNoTrace;
  std::vector<std::string> ranks;
  bool one_each = true;
  for (int rank = 0; rank < ranks_of(same); ++rank) {
    const auto devices = devices_of(same, rank);
    one_each = one_each && devices.size() == 1;
    ranks.push_back(fmt::format("those of rank {} name {} instead of {}", rank, listed(devices),
                                listed(devices_of(base, rank))));
  }
  const ActionCounts counts = counts_of(same);
  std::string text = fmt::format(
      "The lines name other devices: {}. {} are used in all, instead of {}{}. There are as many "
      "forward and backward lines as before, {} and {}.",
      fmt::join(ranks, ", "), counted(devices_used(same), "device"), devices_used(base),
      one_each ? ": no rank uses several" : "; against expectation a rank still uses several",
      counts.forwards, counts.backwards);
  const double overlap = overlap_of(same);
  const double before = overlap_of(base);
  text += overlap > 0 ? fmt::format(" Still {} of rank 0's computing time overlapped",
                                    format_share(overlap))
                      : " No two actions of rank 0 ran at the same time";
  const std::string overlapped =
      overlap > 0
          ? "against " + format_share(before)
          : fmt::format("whereas {} of its computing time overlapped", format_share(before));
  text += fmt::format(", {} with a device for each stage; a step took {} instead of {}.",
                      before > 0 ? overlapped : "nor did they",
                      step_with_deviation(context.same_device), step_with_deviation(context.base));
  return text;
}

// Bubbles, and spans as a fraction, this close together agree.
constexpr double kAgree = 0.10;

// Communication that took this many times what its bytes cost was mostly waiting.
constexpr double kWaited = 2;

// "60.0 ms with gpipe and 55.0 ms with 1f1b", without sequential.
template <class Text>
std::string of_pipelined(const AnswerContext& context, const Text& text_of) {
  const auto all = schedules_of(context);
  std::string text;
  for (size_t i = 1; i < all.size(); ++i) {
    const char* before = i == 1 ? "" : i + 1 < all.size() ? ", " : " and ";
    text += before + text_of(all[i].name, *all[i].set_up);
  }
  return text;
}

std::string answer_gain(const AnswerContext& context) {
  const std::string figures =
      fmt::format("A step of {} micro-batches took {} with one stage after the other, {}",
                  pipeline_of(context.gpipe).micro_batches, step_with_deviation(context.sequential),
                  of_pipelined(context, [](const std::string& name, const RunSet& set_up) {
                    return step_with_deviation(set_up) + " with " + name;
                  }));
  if (!context.judged()) return "That cannot be judged from this run. " + figures + ".";
  std::string text = fmt::format(
      "{}. {}.", figures,
      of_pipelined(context, [&context](const std::string& name, const RunSet& set_up) {
        return name + " was " + format_against(compare(context.sequential, set_up), "sequential");
      }));
  const double sequential = mean_of(context.sequential, &PipelineRecord::predicted_span_ms);
  const double pipelined = mean_of(context.gpipe, &PipelineRecord::predicted_span_ms);
  if (pipelined > 0 && sequential > pipelined) {
    text += fmt::format(
        " The stages' own times allow gpipe {:.2f} times: while one stage works on a micro-batch, "
        "the next works on the one before.",
        sequential / pipelined);
  }
  return text + sharing_sentence(context.gpipe);
}

// "With gpipe the bubble was predicted as 11 % and measured as 13 %, the span as 80.0 ms and 84.0
// ms."
std::string prediction_of(const std::string& name, const RunSet& set_up) {
  return fmt::format(
      "With {} the bubble was predicted as {} and measured as {}, the span as {} and {}.", name,
      format_percent(mean_of(set_up, &PipelineRecord::predicted_bubble)),
      format_percent(mean_of(set_up, &PipelineRecord::bubble)),
      format_ms(mean_of(set_up, &PipelineRecord::predicted_span_ms)),
      format_ms(mean_of(set_up, &PipelineRecord::span_ms)));
}

bool agrees(const RunSet& set_up) {
  const double bubble = mean_of(set_up, &PipelineRecord::bubble);
  const double span = mean_of(set_up, &PipelineRecord::span_ms);
  const double predicted = mean_of(set_up, &PipelineRecord::predicted_span_ms);
  return span > 0 && std::abs(predicted / span - 1) <= kAgree &&
         std::abs(mean_of(set_up, &PipelineRecord::predicted_bubble) - bubble) <= kAgree;
}

std::string answer_bubble(const AnswerContext& context) {
  if (!(mean_of(context.gpipe, &PipelineRecord::span_ms) > 0)) {
    return "This run recorded no spans, so it cannot show it.";
  }
  bool all = true;
  std::string spans;
  for (const auto& row : schedules_of(context)) {
    if (row.set_up == &context.sequential) continue;
    all = all && agrees(*row.set_up);
    spans += " " + prediction_of(row.name, *row.set_up);
  }
  if (!context.judged()) return "That cannot be judged from this run." + spans;
  return (all ? "Yes, bubbles within 10 percentage points and spans within 10 %." : "Not here.") +
         spans +
         " The prediction plays the schedule with the mean time of each stage; it knows neither "
         "what handing over costs nor how much single actions vary." +
         sharing_sentence(context.gpipe);
}

std::string answer_memory(const AnswerContext& context) {
  const int64_t gpipe_held = most_held(pipeline_of(context.gpipe));
  const int64_t held = most_held(pipeline_of(context.one_f_one_b));
  const auto before = merged_devices(context.gpipe);
  const auto after = merged_devices(context.one_f_one_b);
  std::vector<std::string> devices;
  int64_t lower = 0;
  for (size_t i = 0; i < std::min(before.size(), after.size()); ++i) {
    const double change = relative_change(before[i].peak_bytes, after[i].peak_bytes);
    if (after[i].peak_bytes < before[i].peak_bytes) ++lower;
    devices.push_back(fmt::format("{} against {} on {} ({})", format_bytes(after[i].peak_bytes),
                                  format_bytes(before[i].peak_bytes), after[i].name,
                                  format_change(change)));
  }
  return fmt::format(
      "{} A backward that comes early frees its activations early: stages held at most {} with "
      "1f1b and {} with gpipe, and the peak was {}.{}",
      lower > 0 && held < gpipe_held ? "Memory." : "Nothing that this run can show.",
      counted(held, "micro-batch"), gpipe_held, fmt::join(devices, "; "),
      context.judged()
          ? fmt::format(" The bubble was {} with 1f1b and {} with gpipe.",
                        format_percent(mean_of(context.one_f_one_b, &PipelineRecord::bubble)),
                        format_percent(mean_of(context.gpipe, &PipelineRecord::bubble)))
          : "");
}

// What ran first: zero-bubble against 1f1b, whose schedule it fills up.
std::string answer_others(const AnswerContext& context) {
  const Comparison ran = compare(context.one_f_one_b, context.zero_bubble);
  std::string text = fmt::format(
      "Zero-bubble fills waits with weight gradients, which no other stage needs: a step took {} "
      "with a bubble of {}, against {} and {} with 1f1b{}.",
      step_with_deviation(context.zero_bubble),
      format_percent(mean_of(context.zero_bubble, &PipelineRecord::bubble)),
      step_with_deviation(context.one_f_one_b),
      format_percent(mean_of(context.one_f_one_b, &PipelineRecord::bubble)),
      context.judged() ? fmt::format(": zero-bubble was {}", format_against(ran, "1f1b")) : "");
  if (!context.judged()) return text;
  const auto all = simulate_schedules(context.gpipe);
  if (all.empty()) return text + " No times of stages were recorded, so nothing can be simulated.";
  std::vector<std::string> spans;
  double one_f_one_b = 0;
  bool interleaved = false;
  for (const auto& [schedule, simulation] : all) {
    spans.push_back(fmt::format("{} {} with a bubble of {:.0f} %", schedule.name,
                                format_ms(simulation.makespan), simulation.bubble * 100));
    if (schedule.name == "1f1b") one_f_one_b = simulation.makespan;
    interleaved = interleaved || schedule.name == "interleaved";
  }
  const double gained = 1 - all.back().simulation.makespan / one_f_one_b;
  return text +
         fmt::format(
             " Simulated with the stage times of gpipe's runs: {}; there zero-bubble {}.{}",
             fmt::join(spans, ", "),
             gained > 0 ? fmt::format("is {} shorter than 1f1b", format_share(gained))
                        : "gains nothing against 1f1b",
             interleaved
                 ? " Interleaved passes smaller stages on sooner, at the cost of more messages."
                 : "");
}

std::string axis_text(const AxisRecord& axis) {
  return fmt::format(
      "the {} axis of {} sent {} in {:g} calls (predicted {}) and took {} (predicted {})",
      axis.name, axis.size, format_bytes(axis.bytes), axis.calls,
      format_bytes(axis.predicted_bytes), format_ms(axis.ms), format_ms(axis.predicted_ms));
}

std::string answer_axes(const AnswerContext& context) {
  std::vector<std::string> axes;
  bool waited = false;
  for (const auto& axis : pipeline_of(context.base).axes) {
    if (axis.size < 2) continue;
    axes.push_back(axis_text(axis));
    waited = waited || (context.judged() && axis.ms > kWaited * axis.predicted_ms);
  }
  if (axes.empty()) return "This run recorded no communication, so it cannot show it.";
  return fmt::format(
      "Per step and rank of the base, {}. Data-parallel ranks average gradients, which are as "
      "large as the weights; stages pass on activations and their gradients, which grow with the "
      "rows.{}",
      fmt::join(axes, "; "),
      waited ? " The measured time contains the wait for the other side, which an idle link does "
               "not predict."
             : "");
}

std::string answer_losses(const AnswerContext& context) {
  std::vector<const RunSet*> parts;
  for (const auto& row : parts_of(context)) {
    if (rows_of(*row.set_up) == rows_of(context.single)) parts.push_back(row.set_up);
  }
  const auto distance = [](double apart) {
    if (apart < 0) return std::string("cannot be compared");
    if (apart == 0) return std::string("are equal exactly");
    return fmt::format("are {} apart{}", at_most(apart),
                       apart < kSameNorm ? ", which is rounding" : ", which is more than rounding");
  };
  const double parted = largest_deviation(context.single, parts);
  const double scheduled = largest_deviation(
      context.sequential, {&context.gpipe, &context.one_f_one_b, &context.zero_bubble});
  const bool same = parted >= 0 && parted < kSameNorm && scheduled >= 0 && scheduled < kSameNorm;
  return fmt::format(
      "{} The losses of {} set-ups with {} rows and those of one device {}; those of gpipe, 1f1b "
      "and zero-bubble and those of sequential {}. Micro-batches are weighted by their rows and "
      "ranks are averaged, so a step has the gradient of the whole batch.",
      same ? "No." : "Not as it should be in this run.", parts.size(), rows_of(context.single),
      distance(parted), distance(scheduled));
}

}  // namespace

std::vector<Answer> answer_questions(const AnswerContext& context) {
  const std::string counts = sizes_of(context.micro_batches);
  const std::string batches = sizes_of(context.batches);
  return {
      {"10.1 base", "How many processes are there, and which devices does each rank use?",
       answer_processes(context)},
      {"10.1 base", "How many micro-batches are there?", answer_count(context)},
      {"10.1 base", "When does synchronisation happen?", answer_when(context)},
      {"10.2 micro-batches",
       fmt::format("MICRO_BATCHES {}: what changes in the output; how many forward and backward "
                   "steps now?",
                   counts),
       answer_micro_batches(context)},
      {"10.3 batch size",
       fmt::format("Batch {}: does the execution pattern change; what stays the same?", batches),
       answer_batches(context)},
      {"10.4 one process", "What happens to rank 1; is there still a synchronisation?",
       answer_one_process(context)},
      {"10.5 one device", "What changes in the output; are several devices still used?",
       answer_same_device(context)},
      {"pipelining", "What does pipelining gain over one stage after the other?",
       answer_gain(context)},
      {"pipelining", "Do predicted and measured bubble agree?", answer_bubble(context)},
      {"pipelining", "What does 1f1b save against gpipe?", answer_memory(context)},
      {"pipelining", "What do other schedules gain?", answer_others(context)},
      {"pipelining", "What does each axis communicate, and what does it cost?",
       answer_axes(context)},
      {"pipelining", "Does hybrid parallelism change the numbers trained?", answer_losses(context)},
  };
}

}  // namespace lockstep::cli::practical10
