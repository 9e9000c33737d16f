#pragma once

#include <cstdint>
#include <vector>

#include "cli/lab/accumulation.hpp"

namespace lockstep::cli::practical7 {

/// The set-ups of practical 7 that tables, charts and answers look at.
struct AnswerContext : AccumulationContext {
  Comparison faster_with_many;  ///< per row, than fp32 alone

  explicit AnswerContext(const LabRuns& of)
      : AccumulationContext(of), faster_with_many(compare_rows(fp32, accumulated)) {}

  bool bf16() const { return precision == "bf16"; }
  int64_t overflow_at() const { return runs.of("overflow").size; }
  double saved_by_many() const {
    return -relative_change(peak_of(one_batch), peak_of(accumulated));
  }
  double saved_by_amp() const { return -relative_change(peak_of(fp32), peak_of(amp)); }
};

/// Every question of the practical. An answer says what this run cannot show.
std::vector<Answer> answer_questions(const AnswerContext& context);

}  // namespace lockstep::cli::practical7
