#pragma once

#include <cmath>
#include <string>
#include <vector>

#include "cli/lab/lab_tables.hpp"
#include "cli/lab/lab_text.hpp"

namespace lockstep::cli::practical5 {

/// What tables and answers look at: the single device, and DataParallel on all devices.
struct AnswerContext {
  const LabRuns& runs;
  const RunSet& single;
  const RunSet& full;
  int devices;
  Comparison comparison;
  std::vector<DeviceRecord> alone;  ///< the single run's device
  std::vector<DeviceRecord> all;    ///< the full run's devices
  const RunRecord& record;          ///< the full run, first repetition
  std::string warning;              ///< why times cannot be judged; empty: they can

  explicit AnswerContext(const LabRuns& of)
      : runs(of),
        single(of.of("single")),
        full(of.some("dp").back()),
        devices(full.devices),
        comparison(compare(single, full)),
        alone(merged_devices(single)),
        all(merged_devices(full)),
        record(full.first()),
        warning(times_warning(disturbance_of(of, {"single", "dp"}), {comparison})) {}

  double speedup() const { return comparison.speedup.mean; }
  bool one_device() const { return devices < 2; }
  bool shared() const { return sharing(full) > 1; }
  bool judged() const { return warning.empty(); }
  bool same_speed() const { return std::abs(speedup() - 1) <= comparison.margin(); }

  std::string others() const { return devices == 2 ? "the other" : "the others on average"; }
};

/// What a split run shows: the rows that each device got, and those that torch.chunk's rule gives.
struct Split {
  int64_t rows;
  int devices;
  std::vector<int64_t> measured;
  std::vector<int64_t> rule;

  bool some_idle() const { return measured.size() < static_cast<size_t>(devices); }
};

std::vector<Split> splits_of(const AnswerContext& context);

/// Every question of the practical. An answer says what this run cannot show.
std::vector<Answer> answer_questions(const AnswerContext& context);

}  // namespace lockstep::cli::practical5
