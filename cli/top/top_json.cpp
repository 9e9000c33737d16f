#include <cmath>
#include <nlohmann/json.hpp>

#include "cli/top/top_draw.hpp"

namespace lockstep::cli {
namespace {

using nlohmann::json;

constexpr int kSchema = 1;

json known(double value) {
  return std::isnan(value) ? json(nullptr) : json(value);
}

json loss_json(const RankStatus& status) {
  if (std::isfinite(status.loss)) return status.loss;
  if (status.step == 0) return nullptr;
  return std::isnan(status.loss) ? "nan" : (status.loss > 0 ? "inf" : "-inf");
}

json collective_json(const RankView& rank) {
  const CollectiveStatus& collective = rank.status.collective;
  if (collective.sequence == 0) return nullptr;
  return {{"sequence", collective.sequence},
          {"operation", collective.operation},
          {"bytes", collective.bytes},
          {"bucket", collective.bucket < 0 ? json(nullptr) : json(collective.bucket)},
          {"running", collective.finished_ns == 0},
          {"seconds", rank.collective_s}};
}

json error_json(const std::optional<FirstError>& error) {
  if (!error) return nullptr;
  return {{"code", code_name(error->code)},
          {"message", error->message},
          {"blamed_rank", error->blamed_rank < 0 ? json(nullptr) : json(error->blamed_rank)}};
}

json device_json(const DeviceView& device) {
  const int64_t capacity = device.status.capacity_bytes;
  return {{"name", device.status.name},
          {"physical", device.status.physical},
          {"capacity_bytes", capacity > 0 ? json(capacity) : json(nullptr)},
          {"live_bytes", device.status.live_bytes},
          {"peak_bytes", device.status.peak_bytes},
          {"busy", known(device.busy)}};
}

json rank_json(const RankView& rank) {
  json devices = json::array();
  for (const auto& device : rank.devices) devices.push_back(device_json(device));
  return {{"rank", rank.status.rank},
          {"pid", rank.status.pid},
          {"program", rank.status.program},
          {"state", rank.state},
          {"problem", rank.problem.empty() ? json(nullptr) : json(rank.problem)},
          {"step", rank.status.step},
          {"steps_per_s", known(rank.steps_per_s)},
          {"loss", loss_json(rank.status)},
          {"busy", known(rank.busy)},
          {"communicating", known(rank.communicating)},
          {"idle", known(rank.idle)},
          {"quiet_s", rank.quiet_s},
          {"collective", collective_json(rank)},
          {"error", error_json(rank.status.error)},
          {"devices", devices}};
}

template <class Value>
json known(const std::optional<Value>& value) {
  return value ? json(*value) : json(nullptr);
}

json processes_json(const std::vector<GpuProcess>& processes) {
  json list = json::array();
  for (const auto& process : processes) {
    list.push_back({{"pid", process.pid}, {"memory_bytes", known(process.memory_bytes)}});
  }
  return list;
}

json gpus_json(const std::vector<GpuSample>& gpus) {
  json list = json::array();
  for (const auto& gpu : gpus) {
    list.push_back({{"index", gpu.index},
                    {"name", gpu.name},
                    {"memory_bytes", gpu.memory_bytes},
                    {"memory_used_bytes", gpu.memory_used_bytes},
                    {"utilisation", known(gpu.utilisation)},
                    {"power_w", known(gpu.power_w)},
                    {"power_limit_w", known(gpu.power_limit_w)},
                    {"temperature_c", known(gpu.temperature_c)},
                    {"sm_clock_mhz", known(gpu.sm_clock_mhz)},
                    {"processes", gpu.processes ? processes_json(*gpu.processes) : json(nullptr)}});
  }
  return list;
}

}  // namespace

json top_json(const TopView& view) {
  json runs = json::array();
  for (const auto& run : view.runs) {
    json ranks = json::array();
    for (const auto& rank : run.ranks) ranks.push_back(rank_json(rank));
    runs.push_back({{"name", run.info.run_name},
                    {"launcher_pid", run.info.launcher_pid},
                    {"ended", run.ended},
                    {"age_s", run.age_s},
                    {"ranks", ranks}});
  }
  return {{"schema", kSchema}, {"runs", runs}, {"gpus", gpus_json(view.gpus)}};
}

}  // namespace lockstep::cli
