#include "lockstep/device_plan.hpp"

#include <fmt/format.h>
#include <sched.h>

#include <cstdlib>
#include <map>
#include <numeric>
#include <thread>

#include "base/lists.hpp"
#include "lockstep/error.hpp"

namespace lockstep {
namespace {

constexpr int kMaxDevices = 256;
constexpr const char* kGrammar = "write cpu:4, cuda, cuda:0,1 or cuda:0*4";

[[noreturn]] void fail_spec(std::string_view spec, const std::string& reason,
                            const std::string& help = kGrammar) {
  throw Error(Code::kDeviceSpec, fmt::format("--devices \"{}\": {}", spec, reason), help);
}

// A non-negative decimal number.
std::optional<int> parse_number(std::string_view text) {
  const auto number = parse_whole_number(text);
  return number && *number >= 0 ? number : std::nullopt;
}

int parse_count(std::string_view spec, std::string_view text) {
  const auto count = parse_number(text);
  if (!count || *count < 1 || *count > kMaxDevices) {
    fail_spec(spec,
              fmt::format("\"{}\" is not a number of devices from 1 to {}", text, kMaxDevices));
  }
  return *count;
}

}  // namespace

std::vector<SlotPlan> plan_cpu_devices(int devices, const Hardware& hardware) {
  const int cores = static_cast<int>(hardware.cores.size());
  const bool own_cores = devices <= cores;
  const int cores_each = own_cores ? cores / devices : 1;
  std::vector<SlotPlan> slots;
  for (int index = 0; index < devices; ++index) {
    SlotPlan slot;
    slot.index = index;
    slot.threads = hardware.threads_per_device.value_or(cores_each);
    slot.shared_by = own_cores ? 1 : devices;
    // With more devices than cores, pinning would tie some devices to a crowded core.
    if (own_cores) {
      const auto first = hardware.cores.begin() + static_cast<long>(index) * cores_each;
      slot.cores.assign(first, first + cores_each);
    }
    slots.push_back(std::move(slot));
  }
  return slots;
}

namespace {

void require_gpu(std::string_view spec, int gpu, const Hardware& hardware) {
  if (gpu < hardware.gpus) return;
  const std::string here = hardware.gpus == 0 ? "this machine has no GPU that libtorch can use"
                           : hardware.gpus == 1
                               ? "this machine has one GPU, number 0"
                               : fmt::format("this machine has GPUs 0 to {}", hardware.gpus - 1);
  throw Error(Code::kDeviceMissing, fmt::format("--devices \"{}\": there is no GPU {}", spec, gpu),
              hardware.gpus == 0
                  ? "use --devices cpu:2; `lockstep doctor` shows what is here"
                  : "name one that exists, or cuda:0*2 for two logical devices that share GPU 0",
              {here});
}

// One item of a list: "G" or "G*K".
struct GpuItem {
  int gpu;
  int slots;
};

GpuItem parse_gpu_item(std::string_view spec, std::string_view item) {
  const size_t star = item.find('*');
  const auto gpu = parse_number(item.substr(0, star));
  if (!gpu) fail_spec(spec, fmt::format("\"{}\" is not a GPU number", item.substr(0, star)));
  const int slots = star == std::string_view::npos ? 1 : parse_count(spec, item.substr(star + 1));
  return {*gpu, slots};
}

std::vector<GpuItem> parse_gpu_list(std::string_view spec, std::string_view list) {
  std::vector<GpuItem> items;
  std::map<int, int> seen;  // GPU -> slots
  for (size_t begin = 0; begin <= list.size();) {
    const size_t comma = std::min(list.find(',', begin), list.size());
    const GpuItem item = parse_gpu_item(spec, list.substr(begin, comma - begin));
    if (!seen.emplace(item.gpu, item.slots).second) {
      fail_spec(spec, fmt::format("GPU {} is named twice", item.gpu),
                fmt::format("for logical devices that share a GPU write cuda:{}*2", item.gpu));
    }
    items.push_back(item);
    begin = comma + 1;
  }
  return items;
}

std::vector<SlotPlan> plan_cuda(std::string_view spec, const std::vector<GpuItem>& items,
                                const Hardware& hardware) {
  std::vector<SlotPlan> slots;
  for (const auto& item : items) {
    require_gpu(spec, item.gpu, hardware);
    for (int slot_on_gpu = 0; slot_on_gpu < item.slots; ++slot_on_gpu) {
      SlotPlan slot;
      slot.kind = DeviceKind::kCuda;
      slot.index = static_cast<int>(slots.size());
      slot.gpu = item.gpu;
      slot.slot_on_gpu = slot_on_gpu;
      slot.shared_by = item.slots;
      slot.threads = hardware.threads_per_device.value_or(1);
      slots.push_back(std::move(slot));
    }
  }
  if (slots.size() > kMaxDevices) fail_spec(spec, fmt::format("more than {} devices", kMaxDevices));
  return slots;
}

}  // namespace

std::string format_cores(const std::vector<int>& cores) {
  return format_number_list(cores);
}

std::vector<int> parse_cores(std::string_view text) {
  if (text.empty()) return {};
  auto cores = parse_number_list(text);
  if (!cores || cores->back() >= CPU_SETSIZE) {
    throw Error(Code::kUsage, fmt::format("\"{}\" is not a list of cores", text),
                "write numbers and ranges, such as 0-3,8");
  }
  return std::move(*cores);
}

Hardware Hardware::detect(int gpus) {
  Hardware hardware;
  hardware.gpus = gpus;
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (sched_getaffinity(0, sizeof(allowed), &allowed) == 0) {
    for (int core = 0; core < CPU_SETSIZE; ++core) {
      if (CPU_ISSET(core, &allowed)) hardware.cores.push_back(core);
    }
  }
  if (hardware.cores.empty()) {
    const int count = static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
    for (int core = 0; core < count; ++core) hardware.cores.push_back(core);
  }
  if (const char* text = std::getenv("OMP_NUM_THREADS")) {
    const auto threads = parse_number(text);
    if (threads && *threads > 0) hardware.threads_per_device = threads;
  }
  return hardware;
}

std::string SlotPlan::name() const {
  if (kind == DeviceKind::kCpu) return fmt::format("cpu:{}", index);
  return shared_by > 1 ? fmt::format("cuda:{}#{}", gpu, slot_on_gpu) : fmt::format("cuda:{}", gpu);
}

std::string SlotPlan::physical() const {
  if (kind == DeviceKind::kCuda) return fmt::format("GPU {}", gpu);
  if (cores.empty()) return "all cores, shared";
  return fmt::format("{} {}", cores.size() == 1 ? "core" : "cores", format_cores(cores));
}

std::vector<SlotPlan> plan_devices(std::string_view spec, const Hardware& hardware) {
  if (spec.empty()) return plan_devices(hardware.gpus > 0 ? "cuda" : "cpu:2", hardware);
  const size_t colon = spec.find(':');
  const std::string_view kind = spec.substr(0, colon);
  const bool has_list = colon != std::string_view::npos;
  const std::string_view list = has_list ? spec.substr(colon + 1) : std::string_view();
  if (kind == "cpu") return plan_cpu_devices(parse_count(spec, has_list ? list : "1"), hardware);
  if (kind == "cuda") {
    if (has_list) return plan_cuda(spec, parse_gpu_list(spec, list), hardware);
    require_gpu(spec, 0, hardware);
    std::vector<GpuItem> every_gpu;
    every_gpu.reserve(static_cast<size_t>(hardware.gpus));
    for (int gpu = 0; gpu < hardware.gpus; ++gpu) every_gpu.push_back({gpu, 1});
    return plan_cuda(spec, every_gpu, hardware);
  }
  // "gpu" is one letter from "cpu", but "cuda" is meant.
  const std::string meant = kind.starts_with("gpu") ? "cuda" : did_you_mean(kind, {"cpu", "cuda"});
  fail_spec(spec, fmt::format("\"{}\" is not a kind of device{}", kind,
                              meant.empty() ? "" : fmt::format(" (did you mean {}?)", meant)));
}

std::string spread_over_gpus(const std::vector<int>& gpus, int devices) {
  const int used = std::min(static_cast<int>(gpus.size()), devices);
  std::string spec = "cuda:";
  for (int i = 0; i < used; ++i) {
    const int slots = devices / used + (i < devices % used ? 1 : 0);
    spec += fmt::format("{}{}{}", i > 0 ? "," : "", gpus[static_cast<size_t>(i)],
                        slots > 1 ? fmt::format("*{}", slots) : "");
  }
  return spec;
}

std::string default_devices(const Hardware& hardware, int devices) {
  if (hardware.gpus == 0) return fmt::format("cpu:{}", devices);
  std::vector<int> gpus(static_cast<size_t>(hardware.gpus));
  std::iota(gpus.begin(), gpus.end(), 0);
  return spread_over_gpus(gpus, devices);
}

}  // namespace lockstep
