#pragma once

#include <map>
#include <string>
#include <vector>

#include "cli/lab/lab.hpp"

namespace lockstep::cli {

/// What a report says of a lab's training in addition to what the records say.
struct TrainedBox {
  std::string lab;           ///< the word after `lockstep lab`
  std::string devices = {};  ///< --devices of the lab; empty: that of the set-up

  /// Sizes that repeat the lab exactly, whatever its defaults: flags without dashes.
  std::vector<std::string> pinned = {"steps", "batch", "dim", "hidden", "depth"};

  /// Flags of this lab that are repeated with these values, as in LabOptions::own.
  std::map<std::string, std::string> own = {};

  /// How often what ran; empty: how many runs the set-up has.
  std::string runs = {};

  /// More about a fact, set after its value in parentheses: {"batch", "10.3: also 32 and 128"}.
  std::map<std::string, std::string> more = {};
};

/// What was trained, from the record of this set-up's first run: model, weights, precision, batch,
/// steps, optimizer, seed, data, devices and the command that repeats this lab. A fact that the
/// record does not have is left out.
LabFacts what_was_trained(const LabRuns& runs, const RunSet& set_up, const TrainedBox& box);

}  // namespace lockstep::cli
