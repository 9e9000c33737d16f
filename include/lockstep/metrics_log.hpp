#pragma once

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

namespace lockstep {

/// Which rank writes a MetricsLog, and where it resumes.
struct MetricsLogOptions {
  int rank = 0;             ///< world.rank(). Only rank 0 writes; the calls of others do nothing.
  bool every_rank = false;  ///< each rank writes, to the folders rank0, rank1, …

  /// The run resumes after this step, as Checkpoint::resume() returns it: later lines of an earlier
  /// run are removed. Without it, steps must be later than those that the folder has.
  std::optional<int64_t> resumed_after = {};
};

/// Writes loss and metrics to a folder: `metrics.csv` with the lines step,time,name,value, and an
/// event file that TensorBoard shows (tensorboard --logdir FOLDER).
///
///     lockstep::MetricsLog log("runs/a", {.rank = world.rank(), .resumed_after = start});
///     log.write(step, {{"loss/train", loss.item<double>()}, {"lr", scheduler.rate()}});
///
/// Each write() is complete in the files when it returns, also if the process is killed next; what
/// a power loss tore is removed when the folder is opened again.
class MetricsLog {
 public:
  /// Makes the folder if there is none. An Error names it if it cannot be written to.
  explicit MetricsLog(const std::string& folder, const MetricsLogOptions& options = {});
  ~MetricsLog();
  MetricsLog(const MetricsLog&) = delete;
  MetricsLog& operator=(const MetricsLog&) = delete;

  using Metric = std::pair<std::string_view, double>;

  /// Steps ascend; one step may be written in several calls, with other names.
  void write(int64_t step, std::initializer_list<Metric> metrics);
  void write(int64_t step, std::string_view name, double value) { write(step, {{name, value}}); }

 private:
  struct State;
  std::unique_ptr<State> state_;  // null on ranks that do not write
};

}  // namespace lockstep
