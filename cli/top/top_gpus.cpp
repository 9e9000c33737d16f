#include "cli/top/top_gpus.hpp"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "lockstep/units.hpp"

namespace lockstep::cli {
namespace {

using nlohmann::json;

constexpr size_t kIndent = 2;
constexpr double kAlmostFull = 0.9;

std::string power_text(const GpuSample& gpu) {
  if (!gpu.power_limit_w) return fmt::format("{:.0f} W", *gpu.power_w);
  return fmt::format("{:.0f} of {:.0f} W", *gpu.power_w, *gpu.power_limit_w);
}

void add_fields(Flow& flow, const GpuSample& gpu, bool utf8) {
  flow.add(fmt::format("GPU {}", gpu.index), Ink::kStrong);
  flow.add(printable(gpu.name, utf8));
  if (gpu.utilisation) flow.add(fmt::format("{:.0f} %", *gpu.utilisation * 100), Ink::kBusy);
  const bool almost_full = static_cast<double>(gpu.memory_used_bytes) >
                           kAlmostFull * static_cast<double>(gpu.memory_bytes);
  flow.add(
      fmt::format("{} of {}", format_bytes(gpu.memory_used_bytes), format_bytes(gpu.memory_bytes)),
      almost_full ? Ink::kBad : Ink::kMemory);
  if (gpu.power_w) flow.add(power_text(gpu));
  if (gpu.temperature_c) flow.add(fmt::format("{} {}C", *gpu.temperature_c, utf8 ? "°" : ""));
  if (gpu.sm_clock_mhz) flow.add(fmt::format("{} MHz", *gpu.sm_clock_mhz), Ink::kFaint);
  if (gpu.processes) {
    const size_t count = gpu.processes->size();
    flow.add(fmt::format("{} process{}", count, count == 1 ? "" : "es"), Ink::kFaint);
  }
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

}  // namespace

std::vector<Line> gpu_lines(const std::vector<GpuSample>& gpus, size_t width, bool utf8) {
  std::vector<Line> lines;
  for (const auto& gpu : gpus) {
    Flow flow(width, kIndent);
    add_fields(flow, gpu, utf8);
    flow.finish(lines);
  }
  return lines;
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

}  // namespace lockstep::cli
