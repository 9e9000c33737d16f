#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include "cli/lab/lab_command.hpp"
#include "lockstep/device_plan.hpp"
#include "lockstep/error.hpp"
#include "lockstep/units.hpp"

namespace lockstep::test {

/// A machine of cores 0 to count - 1.
inline Hardware cores(int count, int gpus = 0) {
  Hardware hardware;
  for (int core = 0; core < count; ++core) hardware.cores.push_back(core);
  hardware.gpus = gpus;
  return hardware;
}

inline bool mentions(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

/// The lab of this name, as tests ask it.
struct LabOf {
  std::string name;

  cli::LabPlan plan(const cli::LabOptions& options, const Hardware& hardware) const {
    return cli::lab_named(name).plan(options, hardware);
  }

  cli::LabReport report(const cli::LabRuns& runs) const {
    return cli::lab_named(name).report(runs);
  }

  Table table(const cli::LabRuns& runs, const std::string& table_name) const {
    for (const auto& table : report(runs).tables) {
      if (table.name == table_name) return table.table;
    }
    return Table("no such table", {{""}});
  }

  /// The text of the answer whose question has this part.
  std::string answer(const cli::LabRuns& runs, const std::string& question_part) const {
    for (const auto& answer : report(runs).answers) {
      if (mentions(answer.question, question_part)) return answer.text;
    }
    return "no such question";
  }

  /// Leaves out each kind of run in turn: the report is made without it or refused as incomplete,
  /// and at least one kind is needed.
  void expect_missing_runs_are_named(const cli::LabRuns& complete) const {
    size_t refused = 0;
    for (const auto& [what, set_ups] : complete.sets) {
      SCOPED_TRACE(what);
      cli::LabRuns incomplete = complete;
      incomplete.sets.erase(what);
      try {
        report(incomplete);
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), Code::kRecord) << error.block();
        EXPECT_TRUE(mentions(error.message(), "the lab has no run of \"" + what)) << error.block();
        EXPECT_TRUE(mentions(error.help(), "run the lab again")) << error.block();
        ++refused;
      }
    }
    EXPECT_GT(refused, 0U);
  }
};

/// A set-up of made-up runs, to change it.
inline cli::RunSet& set_up(cli::LabRuns& runs, const std::string& what, size_t index = 0) {
  return runs.sets.at(what).at(index);
}

/// Columns that the rows of a table take on a terminal, two between cells.
inline size_t width_of(const Table& table) {
  size_t width = 0;
  for (size_t column = 0; column < table.columns().size(); ++column) {
    size_t widest = display_width(table.columns()[column].header);
    for (const auto& row : table.rows()) widest = std::max(widest, display_width(row[column]));
    width += widest + (column > 0 ? 2 : 0);
  }
  return width;
}

/// The cells of the table's row that begins with this one.
inline std::vector<std::string> row_with(const Table& table, const std::string& first_cell) {
  for (const auto& row : table.rows()) {
    if (row.front() == first_cell) return row;
  }
  return {"no such row"};
}

inline std::vector<std::string> names_of(const cli::LabPlan& plan) {
  std::vector<std::string> names;
  for (const auto& experiment : plan.experiments) names.push_back(experiment.name);
  return names;
}

/// The experiment of that name; an empty one if there is none.
inline cli::Experiment experiment_named(const cli::LabPlan& plan, const std::string& name) {
  for (const auto& experiment : plan.experiments) {
    if (experiment.name == name) return experiment;
  }
  return {};
}

/// The word after this flag, "" if the flag is not given.
inline std::string value_of(const cli::Experiment& experiment, const std::string& flag) {
  const auto& words = experiment.arguments;
  for (size_t i = 0; i + 1 < words.size(); ++i) {
    if (words[i] == flag) return words[i + 1];
  }
  return "";
}

/// How one made-up run of practical 7 or homework 2 differs from the others.
struct MadeRun {
  double ms = 100;  ///< of an optimizer step
  int64_t accum_steps = 1;
  int64_t rows = 64;  ///< of a micro-step
  std::string amp = "off";
  double syncs = 1;  ///< synchronisations in an optimizer step
  double norm = 0.5;
  std::string lr = "0.5";
  int ranks = 2;
  int shared_by = 1;
};

/// A record as the programs of practical 7 write it: weights of 16 MiB, activations that grow with
/// the rows of a micro-step and halve under autocast.
inline RunRecord made_run(const MadeRun& made) {
  const bool amp = made.amp != "off";
  RunRecord record;
  record.host = {{"name", "box"}};
  record.versions = {{"libtorch", "2.11.0"}};
  record.options = {{"lr", made.lr}};
  record.world_size = made.ranks;
  record.accum_steps = made.accum_steps;
  record.amp = made.amp;
  record.effective_batch = made.rows * made.accum_steps;
  record.step_ms = {.mean = made.ms, .min = made.ms, .max = made.ms, .n = 6};
  record.warmup_steps = 2;
  record.total_s = made.ms * 8 / 1000;
  record.losses = {1.0, 0.5, 0.25, 0.2};
  record.memory = {.weights = 16_MiB,
                   .gradients = 16_MiB,
                   .optimizer_state = 0,
                   .low_precision = amp ? 8_MiB : 0,
                   .activations = made.rows * (amp ? 64_KiB : 128_KiB)};
  const MemorySplit& split = *record.memory;
  const int64_t peak = split.weights + split.gradients + split.low_precision + split.activations;
  for (int rank = 0; rank < made.ranks; ++rank) {
    record.devices.push_back(
        {.name = "cpu:" + std::to_string(rank),
         .physical = made.shared_by > 1 ? "all cores, shared" : "core " + std::to_string(rank),
         .shared_by = made.shared_by,
         .peak_bytes = peak});
  }
  if (made.ranks > 1) {
    record.all_reduces = {.count = 2 * made.syncs,
                          .bytes = static_cast<int64_t>(made.syncs) * 16_MiB};
    record.comm_ms = 12 * made.syncs;
    record.exposed_comm_ms = 10 * made.syncs;
  }
  if (amp) record.scale = 65536;
  record.gradient_check = {.norm = made.norm,
                           .count = 4000000,
                           .zero_share = 0.001,
                           .fp16_lost = 0.12,
                           .fp16_lost_scaled = 0.0003,
                           .fp16_overflow_scaled = 0};
  return record;
}

/// `repetitions` equal runs of it, as the set-up of this size.
inline cli::RunSet made_set(const MadeRun& made, size_t repetitions = 2, int64_t size = 0) {
  return {made.ranks, std::vector<RunRecord>(repetitions, made_run(made)), size};
}

/// Adds what the studies of practical 7 and homework 2 leave: a small model that learns at learning
/// rate 0.9 and diverges at four times as much, and a deep one over these numbers of rows.
inline void add_studies(cli::LabRuns& runs, const MadeRun& like, const std::vector<int64_t>& rows) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const auto add = [&](const char* what, double norm, const char* lr, bool diverges) {
    MadeRun made = like;
    made.amp = "off", made.accum_steps = 4, made.norm = norm, made.lr = lr;
    cli::RunSet set = made_set(made, 1, 4);
    set.runs[0].losses = {0.6, 0.5, 0.3, 0.2, 0.15, 0.12};
    if (diverges) {
      set.runs[0].losses = {0.6, 0.5, 0.7, 900, nan, nan};
      set.runs[0].nonfinite = 2;
    }
    runs.sets[what] = {set};
  };
  add("divided", 0.1, "0.9", false);
  add("undivided", 0.4, "0.9", true);
  add("larger_rate", 0.1, "3.6", true);
  for (const int64_t count : rows) {
    MadeRun made = like;
    made.rows = count, made.amp = "off";
    runs.sets["memory_fp32"].push_back(made_set(made, 1, count));
    made.amp = like.amp == "off" ? "bf16" : like.amp;
    runs.sets["memory_amp"].push_back(made_set(made, 1, count));
  }
}

/// Whether a text can stand in a report: ends as a sentence and has no number that is none.
inline bool reads_well(const std::string& text) {
  return text.ends_with(".") && !mentions(text, "nan") && !mentions(text, "inf ") &&
         !mentions(text, "  ") && !mentions(text, "..") && !mentions(text, "of together") &&
         !mentions(text, " 1 steps") && !mentions(text, " 1 all-reduces");
}

/// A record for every experiment, with its name as program, to know it again.
inline cli::LabRuns named_runs(const cli::LabPlan& plan) {
  cli::LabRuns runs;
  for (const auto& experiment : plan.experiments) {
    RunRecord record = made_run({});
    record.program = experiment.name;
    runs.add(experiment, record);
  }
  return runs;
}

/// The program of a set-up's first run.
inline std::string first_program(const cli::RunSet& set_up) {
  return set_up.runs.at(0).program;
}

}  // namespace lockstep::test
