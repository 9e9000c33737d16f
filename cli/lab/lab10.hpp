#pragma once

#include <string>
#include <vector>

#include "cli/lab/lab_tables.hpp"
#include "cli/lab/pipeline_trace.hpp"

namespace lockstep::cli::practical10 {

/// The set-ups of practical 10 that tables, charts and answers look at.
struct AnswerContext {
  const LabRuns& runs;
  const RunSet& single = runs.of("single");
  const RunSet& base = runs.of("base");
  const std::vector<RunSet>& micro_batches = runs.some("micro_batches");  ///< with the base
  const std::vector<RunSet>& batches = runs.some("batch");                ///< with the base
  const RunSet& one_process = runs.of("one_process");
  const RunSet& same_device = runs.of("same_device");
  // In one process, repeated in turns.
  const RunSet& sequential = runs.of("sequential");
  const RunSet& gpipe = runs.of("gpipe");
  const RunSet& one_f_one_b = runs.of("1f1b");
  const RunSet& zero_bubble = runs.of("zero-bubble");

  /// Why times cannot be judged; empty if they can.
  std::string warning() const;
  bool judged() const { return warning().empty(); }
};

/// Every set-up of parts 10.1 to 10.5, in their order.
std::vector<SetRow> parts_of(const AnswerContext& context);

/// The schedules that ran against each other, sequential first.
std::vector<SetRow> schedules_of(const AnswerContext& context);

/// The comparison with sequential in which runs varied most.
Comparison noisiest_of(const AnswerContext& context);

/// The tables of the report.
std::vector<NamedTable> tables_of(const AnswerContext& context);

/// Every question of the practical. An answer says what this run cannot show.
std::vector<Answer> answer_questions(const AnswerContext& context);

}  // namespace lockstep::cli::practical10
