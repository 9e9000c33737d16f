#pragma once

#include <algorithm>
#include <string>

#include "lab_support.hpp"
#include "lockstep/schedule.hpp"

namespace lockstep::test {

/// How one made-up run of practical 10 differs from the others.
struct MadeHybrid {
  int ranks = 2;
  int stages = 2;
  int micro_batches = 4;
  int64_t rows = 64;
  std::string schedule = "gpipe";
  bool same_device = false;
  int shared_by = 1;
  double update_ms = 2;    ///< step time beyond the span
  double slow = 1;         ///< measured span over the predicted one
  int64_t peak = 8 << 20;  ///< of each device
};

/// A record as practical10_hybrid writes it: a stage takes 1 ms forward and 2 ms backward for a
/// micro-batch, and exactly as long as simulated.
inline RunRecord made_hybrid(const MadeHybrid& made) {
  Schedule schedule = make_schedule(made.schedule, made.stages, made.micro_batches);
  if (made.same_device) {
    schedule = on_ranks(schedule, std::vector<int>(static_cast<size_t>(made.stages), 0));
  }
  const Simulation simulation =
      simulate(schedule, std::vector<StageTimes>(static_cast<size_t>(made.stages), {1, 1, 1}));
  RunRecord record = made_run({.rows = made.rows, .ranks = made.ranks});
  record.devices.clear();
  record.split.assign(static_cast<size_t>(made.ranks), made.rows / made.ranks);
  const bool split = made.schedule == "zero-bubble";
  PipelineRecord pipeline;
  pipeline.schedule = made.schedule;
  pipeline.micro_batches = made.micro_batches;
  pipeline.rows.assign(static_cast<size_t>(made.micro_batches),
                       made.rows / made.ranks / made.micro_batches);
  const auto device_of = [&made](int rank, int stage) {
    return "cpu:" + std::to_string(made.same_device ? rank : rank + stage * made.ranks);
  };
  for (int rank = 0; rank < made.ranks; ++rank) {
    for (int stage = 0; stage < made.stages; ++stage) {
      pipeline.stages.push_back(
          {.rank = rank,
           .stage = stage,
           .device = device_of(rank, stage),
           .layers = 4,
           .parameters = 1000,
           .forward_ms = 1,
           .backward_ms = split ? 1.0 : 2.0,
           .weight_ms = split ? 1.0 : 0.0,
           .peak_micro_batches = simulation.peak_micro_batches[static_cast<size_t>(stage)],
           .message_bytes = stage + 1 < made.stages ? pipeline.rows.front() * 1024 : 0});
      if (stage == 0 || !made.same_device) {
        record.devices.push_back(
            {.name = device_of(rank, stage),
             .physical = made.shared_by > 1 ? "all cores, shared" : "core " + std::to_string(stage),
             .shared_by = made.shared_by,
             .peak_bytes = made.peak});
      }
    }
    for (const auto& pipeline_rank : simulation.timeline) {
      for (const auto& [action, begin, end] : pipeline_rank) {
        ActionRecord one{.kind = std::string(1, letter(action.kind)),
                         .rank = rank,
                         .stage = action.stage,
                         .micro_batch = action.micro_batch,
                         .device = device_of(rank, action.stage),
                         .begin_ms = begin,
                         .end_ms = end};
        if (rank == 0) pipeline.predicted.push_back(one);
        one.begin_ms = 0.5 + begin * made.slow;
        one.end_ms = 0.5 + end * made.slow;
        pipeline.actions.push_back(one);
      }
    }
  }
  if (made.ranks > 1) {
    std::vector<ActionRecord> syncs;
    for (const auto& stage : pipeline.stages) {
      double last = 0;
      for (const auto& action : pipeline.actions) {
        if (action.stage == stage.stage) last = std::max(last, action.end_ms);
      }
      syncs.push_back({.kind = "S",
                       .rank = stage.rank,
                       .stage = stage.stage,
                       .device = stage.device,
                       .begin_ms = last,
                       .end_ms = last + 1.5});
    }
    pipeline.actions.insert(pipeline.actions.end(), syncs.begin(), syncs.end());
  }
  pipeline.predicted_span_ms = simulation.makespan;
  pipeline.span_ms = simulation.makespan * made.slow;
  pipeline.predicted_bubble = simulation.bubble;
  pipeline.bubble = simulation.bubble;
  pipeline.axes = {{.name = "data",
                    .size = made.ranks,
                    .calls = made.ranks > 1 ? 2.0 : 0.0,
                    .predicted_bytes = made.ranks > 1 ? int64_t{8192} : 0,
                    .bytes = made.ranks > 1 ? int64_t{8192} : 0,
                    .predicted_ms = 1,
                    .ms = 1.5},
                   {.name = "pipeline",
                    .size = made.stages,
                    .calls = 8,
                    .predicted_bytes = 4096,
                    .bytes = 4096}};
  const double step_ms = pipeline.span_ms + made.update_ms;
  record.step_ms = {.mean = step_ms, .min = step_ms, .max = step_ms, .n = 6};
  record.pipeline = std::move(pipeline);
  return record;
}

inline cli::RunSet made_hybrid_set(const MadeHybrid& made, size_t repetitions = 1,
                                   int64_t size = 0) {
  return {made.ranks * made.stages, std::vector<RunRecord>(repetitions, made_hybrid(made)), size};
}

/// A whole lab 10 as an ideal run would leave it.
inline cli::LabRuns made_lab10(const MadeHybrid& like = {}) {
  const auto with = [&like](auto change) {
    MadeHybrid made = like;
    change(made);
    return made;
  };
  const auto scheduled = [&](const char* name, int64_t peak) {
    return made_hybrid_set(with([&](MadeHybrid& m) {
                             m.ranks = 1, m.micro_batches = 8, m.rows = 512, m.schedule = name;
                             m.peak = peak;
                           }),
                           2);
  };
  cli::LabRuns results;
  results.sets["single"] = {
      made_hybrid_set(with([](MadeHybrid& m) { m.ranks = 1, m.stages = 1, m.micro_batches = 1; }))};
  results.sets["base"] = {made_hybrid_set(like)};
  for (const int count : {2, 4, 8}) {
    results.sets["micro_batches"].push_back(
        made_hybrid_set(with([count](MadeHybrid& m) { m.micro_batches = count; }), 1, count));
  }
  for (const int rows : {32, 64, 128}) {
    results.sets["batch"].push_back(
        made_hybrid_set(with([rows](MadeHybrid& m) { m.rows = rows; }), 1, rows));
  }
  results.sets["one_process"] = {made_hybrid_set(with([](MadeHybrid& m) { m.ranks = 1; }))};
  results.sets["same_device"] = {
      made_hybrid_set(with([](MadeHybrid& m) { m.same_device = true; }))};
  results.sets["sequential"] = {scheduled("sequential", 6_MiB)};
  results.sets["gpipe"] = {scheduled("gpipe", 16_MiB)};
  results.sets["1f1b"] = {scheduled("1f1b", 8_MiB)};
  results.sets["zero-bubble"] = {scheduled("zero-bubble", 9_MiB)};
  return results;
}

/// Every run of a lab, to change them all.
template <class Change>
void change_runs(cli::LabRuns& results, const Change& change) {
  for (auto& [what, set_ups] : results.sets) {
    for (auto& set_up : set_ups) {
      for (auto& run : set_up.runs) change(run);
    }
  }
}

}  // namespace lockstep::test
