#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
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

  /// The words of a list of facts, such as "kinds" or "wrappers", of any rank.
  std::set<std::string> words(const char* list) const;

  /// What a rank's optimizer multiplied a parameter's gradient by.
  double factor(int rank, const std::string& parameter) const;

  /// The learning rate of each parameter.
  std::map<std::string, double> rates() const;

  /// Whether some rank holds only a part of a weight.
  bool holds_parts() const;

  /// Whether a rank's updates of this step were skipped.
  bool is_skipped(int rank) const;

  /// What the ranks together have of a tensor, each element of the first that has it; nothing if
  /// some are missing.
  std::optional<std::vector<double>> merged(const std::string& key) const;
};

/// The folder in which the ranks of a run recorded their steps: see StepRecorder.
class TracedRun {
 public:
  /// Lists the files. There may be none.
  explicit TracedRun(std::filesystem::path folder);

  const std::vector<int64_t>& steps() const { return steps_; }  ///< ascending
  int ranks() const { return ranks_; }
  TracedStep read(int64_t step) const;

  /// The mean over the ranks, weighted as their gradients are, or by rows where these count alike.
  /// Steps are missing for which not every rank recorded a loss, or whose weights are not known.
  std::map<int64_t, double> losses() const;

 private:
  std::filesystem::path folder_;
  std::vector<int64_t> steps_;
  int ranks_ = 0;
  std::map<int64_t, std::vector<std::filesystem::path>> files_;  // [step]
};

/// What an update multiplied its gradients by; 1 if it did not, or by a number that is not finite.
double factor_of(const nlohmann::json& update);

/// The part of a key after its kind, without the name of a state: "layers.0.weight".
std::string parameter_of(const std::string& key);

}  // namespace lockstep::cli
