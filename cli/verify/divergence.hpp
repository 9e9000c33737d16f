#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cli/verify/traced_run.hpp"

namespace lockstep::cli {

/// What is wrong, and the likely cause. docs/verify.md says what each cause looks like.
struct Divergence {
  int64_t step = 0;
  std::string where;       ///< a parameter, or "" if the whole step is wrong
  std::vector<int> ranks;  ///< that are wrong; none: all of them alike
  std::string cause;       ///< a word of docs/verify.md: "not-averaged"
  std::string text;        ///< a sentence with figures
};

/// "layers.0" of "layers.0.weight".
std::string module_of(const std::string& parameter);

/// "1", "0, 2" or "all", for a column of ranks.
std::string ranks_text(const std::vector<int>& ranks);

/// Checks what must hold inside one step of one run, whatever another run computes:
///
/// - the rows of all ranks are those of the reference, each once
/// - all ranks begin with the same weights, and end with the same
/// - gradients are averaged once, and the average is the mean of the ranks' own gradients, within a
///   bound for each element that follows from the number of ranks and the precision
/// - ranks and micro-batches count in the mean as they have rows
/// - all ranks skip a step or none does, and multiply gradients by the same factor
/// - a rounded weight is its master, rounded
/// - buffers agree when a synchronised forward begins; dropout masks differ between ranks
///
/// `before`: the step before; `reference`: the same step of one rank. Either may be null.
std::optional<Divergence> broken_invariant(const TracedStep& step, const TracedStep* before,
                                           const TracedStep* reference);

/// How many rows the ranks of a step had together; 0: nobody recorded any.
size_t rows_of(const TracedStep& step);

/// How many ranks had rows of their own: ranks that hold parts of one model count once.
size_t ranks_with_rows(const TracedStep& step);

/// Where no row of a step is the reference's, but slices of dimension 1 are, those are its rows:
/// the model reads [time, batch, ...].
void find_batch_dimension(TracedStep& step, TracedStep& reference);

/// Whether each process trained the whole model on all rows, and had nobody to exchange gradients
/// with: the program knows nothing of ranks.
bool trains_alone(const TracedStep& step, const TracedStep& reference);

}  // namespace lockstep::cli
