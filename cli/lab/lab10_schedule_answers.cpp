#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include "cli/lab/lab10_answers.hpp"
#include "cli/lab/lab10_measures.hpp"
#include "cli/lab/lab10_tables.hpp"
#include "cli/lab/lab_measures.hpp"
#include "cli/lab/lab_text.hpp"
#include "lockstep/units.hpp"

namespace lockstep::cli {
namespace {

// Bubbles, and spans as a fraction, this close together agree.
constexpr double kAgree = 0.10;

// Communication that took this many times what its bytes cost was mostly waiting.
constexpr double kWaited = 2;

std::string sharing_text(const RunSet& set_up) {
  return sharing(set_up) > 1 ? " " + shared_remark(set_up) : "";
}

// "60.0 ms with gpipe and 55.0 ms with 1f1b", without sequential.
template <class Text>
std::string of_pipelined(const Lab10Results& results, const Text& text_of) {
  const auto all = schedules_of(results);
  std::string text;
  for (size_t i = 1; i < all.size(); ++i) {
    const char* before = i == 1 ? "" : i + 1 < all.size() ? ", " : " and ";
    text += before + text_of(all[i].first, *all[i].second);
  }
  return text;
}

std::string answer_gain(const Lab10Results& results) {
  std::string text = fmt::format(
      "A step of {} micro-batches took {} with one stage after the other, {}: {}.",
      pipeline_of(results.gpipe).micro_batches, format_ms(pooled_step_ms(results.sequential).mean),
      of_pipelined(results,
                   [](const std::string& name, const RunSet& set_up) {
                     return format_ms(pooled_step_ms(set_up).mean) + " with " + name;
                   }),
      of_pipelined(results, [&results](const std::string& name, const RunSet& set_up) {
        return name + " was " + format_against(compare(results.sequential, set_up), "sequential");
      }));
  const double sequential = mean_of(results.sequential, &PipelineRecord::predicted_span_ms);
  const double pipelined = mean_of(results.gpipe, &PipelineRecord::predicted_span_ms);
  if (sequential > 0 && pipelined > 0) {
    text += fmt::format(
        " The stages' own times allow gpipe {:.2f} times: while one stage works on a micro-batch, "
        "the next works on the one before.",
        sequential / pipelined);
  }
  return text + sharing_text(results.gpipe) +
         noise_remark(results.others_busy_cores, noisiest_of(results));
}

// "gpipe: bubble predicted as 11 %, measured as 13 %; span 80.0 ms and 84.0 ms".
std::string prediction_of(const std::string& name, const RunSet& set_up) {
  return fmt::format("{}: bubble predicted as {:.0f} %, measured as {:.0f} %; span {} and {}", name,
                     mean_of(set_up, &PipelineRecord::predicted_bubble) * 100,
                     mean_of(set_up, &PipelineRecord::bubble) * 100,
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

std::string answer_bubble(const Lab10Results& results) {
  if (!(mean_of(results.gpipe, &PipelineRecord::span_ms) > 0)) {
    return "This run recorded no spans, so it cannot show it.";
  }
  bool all = true;
  std::string spans;
  for (const auto& [name, set_up] : schedules_of(results)) {
    if (set_up == &results.sequential) continue;
    all = all && agrees(*set_up);
    spans += prediction_of("With " + name, *set_up) + ". ";
  }
  std::string text = fmt::format(
      "{} {}", all ? "Yes, within 10 points and 10 % of the span." : "Not here.", spans);
  text += all ? "The prediction plays the schedule with the mean time of each stage, so what is "
                "left is the handing over and the spread of those times."
              : "The prediction plays the schedule with the mean time of each stage and knows "
                "neither waits between devices nor slow single actions.";
  return text + sharing_text(results.gpipe);
}

std::string answer_memory(const Lab10Results& results) {
  const int64_t gpipe_held = most_held(pipeline_of(results.gpipe));
  const int64_t held = most_held(pipeline_of(results.one_f_one_b));
  const auto before = merged_devices(results.gpipe);
  const auto after = merged_devices(results.one_f_one_b);
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
      "{} A backward that comes early frees its activations early: stages held at most {} "
      "micro-batches with 1f1b and {} with gpipe, and the peak was {}. The bubbles were {:.0f} % "
      "and {:.0f} %.",
      lower > 0 && held < gpipe_held ? "Memory." : "Nothing that this run can show.", held,
      gpipe_held, fmt::join(devices, "; "),
      mean_of(results.one_f_one_b, &PipelineRecord::bubble) * 100,
      mean_of(results.gpipe, &PipelineRecord::bubble) * 100);
}

// What ran first: zero-bubble against 1f1b, whose schedule it fills up.
std::string answer_others(const Lab10Results& results) {
  const Comparison ran = compare(results.one_f_one_b, results.zero_bubble);
  std::string text = fmt::format(
      "Zero-bubble fills waits with weight gradients, which no other stage needs: a step took {} "
      "with a bubble of {:.0f} %, with 1f1b {} and {:.0f} %, so it was {}.",
      format_ms(pooled_step_ms(results.zero_bubble).mean),
      mean_of(results.zero_bubble, &PipelineRecord::bubble) * 100,
      format_ms(pooled_step_ms(results.one_f_one_b).mean),
      mean_of(results.one_f_one_b, &PipelineRecord::bubble) * 100, format_against(ran, "1f1b"));
  const auto all = simulate_schedules(results.gpipe);
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
             interleaved ? " Interleaved passes smaller stages on sooner, for more messages." : "");
}

std::string axis_text(const AxisRecord& axis) {
  return fmt::format(
      "the {} axis ({} wide) sent {} in {:g} calls, predicted {}, and took {}, "
      "predicted {}",
      axis.name, axis.size, format_bytes(axis.bytes), axis.calls,
      format_bytes(axis.predicted_bytes), format_ms(axis.ms), format_ms(axis.predicted_ms));
}

std::string answer_axes(const Lab10Results& results) {
  std::vector<std::string> axes;
  bool waited = false;
  for (const auto& axis : pipeline_of(results.base).axes) {
    if (axis.size < 2) continue;
    axes.push_back(axis_text(axis));
    waited = waited || axis.ms > kWaited * axis.predicted_ms;
  }
  if (axes.empty()) return "This run recorded no communication, so it cannot show it.";
  return fmt::format(
      "Per step and rank of the base, {}. Data-parallel ranks average gradients, as large as the "
      "weights; stages pass on activations and their gradients, as large as the rows.{}",
      fmt::join(axes, "; "),
      waited ? " The measured time contains the wait for the other side, which an idle link does "
               "not predict."
             : "");
}

std::string answer_losses(const Lab10Results& results) {
  std::vector<const RunSet*> parts;
  for (const auto& [name, set_up] : parts_of(results)) {
    if (rows_of(*set_up) == rows_of(results.single)) parts.push_back(set_up);
  }
  const auto verdict = [](double apart) {
    if (apart < 0) return std::string("cannot be compared");
    if (apart == 0) return std::string("are equal exactly");
    return fmt::format("are {} apart{}", at_most(apart),
                       apart < kSameNorm ? ", which is rounding" : ", which is more than rounding");
  };
  const double parted = largest_deviation(results.single, parts);
  const double scheduled = largest_deviation(
      results.sequential, {&results.gpipe, &results.one_f_one_b, &results.zero_bubble});
  const bool same = parted >= 0 && parted < kSameNorm && scheduled >= 0 && scheduled < kSameNorm;
  return fmt::format(
      "{} The losses of {} set-ups with {} rows and those of one device {}; those of gpipe, 1f1b "
      "and zero-bubble and those of sequential {}. Micro-batches count by their rows and ranks are "
      "averaged, so a step has "
      "the gradient of the whole batch.",
      same ? "No." : "Not as it should be in this run.", parts.size(), rows_of(results.single),
      verdict(parted), verdict(scheduled));
}

}  // namespace

std::vector<Answer> answer_lab10_schedules(const Lab10Results& results) {
  return {
      {"pipelining", "What does pipelining gain over one stage after the other?",
       answer_gain(results)},
      {"pipelining", "Do predicted and measured bubble agree?", answer_bubble(results)},
      {"pipelining", "What does 1f1b save against gpipe?", answer_memory(results)},
      {"pipelining", "What do other schedules gain?", answer_others(results)},
      {"pipelining", "What does each axis communicate, and what does it cost?",
       answer_axes(results)},
      {"pipelining", "Does hybrid parallelism change the numbers trained?", answer_losses(results)},
  };
}

}  // namespace lockstep::cli
