#include "lockstep/job_record.hpp"

#include <errno.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <numeric>
#include <utility>

#include "lockstep/device.hpp"
#include "lockstep/version.hpp"

namespace lockstep {
namespace {

// A step of the job ends when its last rank has ended it.
std::vector<double> slowest_steps(const std::vector<RankMeasurements>& ranks) {
  std::vector<double> slowest = ranks.front().step_ms;
  for (const auto& rank : ranks) {
    for (size_t i = 0; i < slowest.size(); ++i) {
      slowest[i] = std::max(slowest[i], rank.step_ms.at(i));
    }
  }
  return slowest;
}

// Each rank's loss is a mean over its rows, so it counts by their number; all count alike if no
// rank says how many it has.
std::vector<double> mean_losses(const std::vector<RankMeasurements>& ranks) {
  std::vector<double> weights;
  for (const auto& [record, step_ms] : ranks) {
    weights.push_back(
        static_cast<double>(std::accumulate(record.split.begin(), record.split.end(), int64_t{0})));
  }
  double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
  if (sum == 0) {
    weights.assign(ranks.size(), 1.0);
    sum = static_cast<double>(ranks.size());
  }
  std::vector<double> losses(ranks.front().record.losses.size(), 0.0);
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    for (size_t i = 0; i < losses.size(); ++i) {
      losses[i] += weights[rank] * ranks[rank].record.losses.at(i);
    }
  }
  for (double& loss : losses) loss /= sum;
  return losses;
}

RunRecord complete(const RunMeter& meter, RunRecord record) {
  if (record.program.empty()) record.program = program_invocation_short_name;
  if (record.host.empty()) record.host = describe_host();
  if (record.versions.empty()) record.versions = describe_versions();
  meter.fill(record);
  return record;
}

void write_to_path(RunRecord record) {
  record.nonfinite = std::count_if(record.losses.begin(), record.losses.end(),
                                   [](double loss) { return !std::isfinite(loss); });
  const char* path = std::getenv("LOCKSTEP_RECORD");
  if (path != nullptr && *path != '\0') write_record(record, path);
}

}  // namespace

void save_record(const RunMeter& meter, RunRecord about) {
  write_to_path(complete(meter, std::move(about)));
}

void save_record(const RunMeter& meter, const World& world, RunRecord about) {
  const RunRecord mine = complete(meter, std::move(about));
  const nlohmann::json sent = {{"record", to_json(mine)}, {"step_ms", meter.step_ms()}};
  std::vector<RankMeasurements> ranks;
  const auto text_of_mine = sent.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  for (const auto& text : world.comm().gather_text(text_of_mine, 0, {.label = "records"})) {
    const auto value = nlohmann::json::parse(text);
    ranks.push_back(
        {record_from_json(value.at("record")), value.at("step_ms").get<std::vector<double>>()});
  }
  world.comm().barrier({.label = "records"});  // no rank leaves before all records have arrived
  if (world.rank() == 0) write_to_path(job_record(ranks));
}

RunRecord job_record(const std::vector<RankMeasurements>& ranks) {
  RunRecord job = ranks.front().record;
  const auto size = static_cast<double>(ranks.size());
  job.world_size = static_cast<int>(ranks.size());
  job.devices.clear();
  job.split.clear();
  job.comm_ms = 0;
  job.exposed_comm_ms = 0;
  for (const auto& [record, step_ms] : ranks) {
    job.devices.insert(job.devices.end(), record.devices.begin(), record.devices.end());
    job.split.insert(job.split.end(), record.split.begin(), record.split.end());
    job.total_s = std::max(job.total_s, record.total_s);
    job.comm_ms += record.comm_ms / size;
    job.exposed_comm_ms += record.exposed_comm_ms / size;
    job.ranks.push_back({.host = record.host.at("name"), .step_ms = record.step_ms.mean});
  }
  const auto steps = slowest_steps(ranks);
  job.step_ms = summarize(steps);
  job.losses = mean_losses(ranks);
  const double seconds = std::accumulate(steps.begin(), steps.end(), 0.0) * 1e-3;
  job.samples_per_s =
      seconds > 0 ? static_cast<double>(job.effective_batch * job.step_ms.n) / seconds : 0;
  return job;
}

}  // namespace lockstep
