#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "base/dtype.hpp"
#include "checkpoint/layout.hpp"

namespace lockstep::cli {

/// What one rank recorded of a tensor.
struct TracedPiece {
  int rank = 0;
  Dtype dtype = Dtype::kF32;
  Slice slice;
  std::vector<std::byte> bytes;

  std::vector<double> values() const;
  bool is_whole() const { return slice.blocks.empty(); }
};

/// One update as all ranks recorded it. Keys are "gradient/NAME", "weight/NAME", "rounded/NAME",
/// "state/NAME/WHAT", "buffer/NAME" and, before the average, "local/NAME".
struct TracedStep {
  int64_t step = 0;
  std::map<std::string, std::vector<TracedPiece>> pieces = {};
  std::map<int, nlohmann::json> facts = {};                 ///< [rank]
  std::map<int, std::vector<nlohmann::json>> updates = {};  ///< [rank], one for each optimizer

  /// Whether a rank's updates of this step were skipped.
  bool is_skipped(int rank) const;

  /// What the ranks together have of a tensor, each element of the first that has it; nothing if
  /// some are missing.
  std::optional<std::vector<double>> merged(const std::string& key) const;
};

/// The folder in which the ranks of a run recorded their steps: see StepRecorder.
class TracedRun {
 public:
  /// Lists the files. A folder without any is an Error that says how a program is recorded.
  explicit TracedRun(std::filesystem::path folder);

  const std::vector<int64_t>& steps() const { return steps_; }  ///< ascending
  int ranks() const { return ranks_; }
  TracedStep read(int64_t step) const;

  /// The mean over the ranks, weighted as their gradients are; steps without a loss are missing.
  std::map<int64_t, double> losses() const;

 private:
  std::filesystem::path folder_;
  std::vector<int64_t> steps_;
  int ranks_ = 0;
  std::map<int64_t, std::vector<std::filesystem::path>> files_;  // [step]
};

/// The part of a key after its kind, without the name of a state: "layers.0.weight".
std::string parameter_of(const std::string& key);

}  // namespace lockstep::cli
