#pragma once

#include <cmath>
#include <string>
#include <vector>

#include "cli/lab/lab_tables.hpp"
#include "cli/lab/lab_text.hpp"

namespace lockstep::cli::practical6 {

/// The number of devices to look at closely: the most ranks that each have hardware of their own,
/// or the most of all if no several ranks do.
int64_t focus_of(const LabRuns& runs);

/// What tables and answers look at: both methods on the same devices.
struct AnswerContext {
  const LabRuns& runs;
  const RunSet& single;
  const RunSet& dp;
  const RunSet& ddp;
  int ranks;
  Comparison comparison;  ///< how much faster DDP is
  Communication communication;
  std::vector<DeviceRecord> dp_devices;
  std::vector<DeviceRecord> ddp_devices;
  const RunRecord& record;  ///< DDP, first repetition
  std::string warning;      ///< why times cannot be judged; empty: they can

  explicit AnswerContext(const LabRuns& of)
      : runs(of),
        single(of.of("single")),
        dp(of.of("dp", focus_of(of))),
        ddp(of.of("ddp", focus_of(of))),
        ranks(ddp.devices),
        comparison(compare(dp, ddp)),
        communication(communication_of(ddp)),
        dp_devices(merged_devices(dp)),
        ddp_devices(merged_devices(ddp)),
        record(ddp.first()),
        warning(times_warning(disturbance_of(of, {"single", "dp", "ddp"}),
                              {comparison, compare(of.of("dp"), dp), compare(of.of("ddp"), ddp)})) {
  }

  bool one_rank() const { return ranks < 2; }
  bool shared() const { return sharing(ddp) > 1; }
  std::string others() const { return ranks == 2 ? "the other" : "the others on average"; }
  bool judged() const { return warning.empty(); }
  bool same_speed() const { return std::abs(comparison.speedup.mean - 1) <= comparison.margin(); }
};

/// Buckets of the last step whose communication backward hid wholly.
int64_t finished_in_backward(const RunRecord& run);

/// Every question of the practical. An answer says what this run cannot show.
std::vector<Answer> answer_questions(const AnswerContext& context);

}  // namespace lockstep::cli::practical6
