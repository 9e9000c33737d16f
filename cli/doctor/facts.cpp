#include "cli/doctor/facts.hpp"

#include <fmt/format.h>
#include <netdb.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <future>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>
#include <thread>

#include "base/json_text.hpp"
#include "base/process.hpp"
#include "cli/nvml.hpp"
#include "comm/network/transport_loader.hpp"
#include "lockstep/detail/board.hpp"
#include "lockstep/device_plan.hpp"
#include "lockstep/error.hpp"

namespace lockstep::cli {
namespace {

using nlohmann::json;
namespace fs = std::filesystem;

constexpr std::chrono::seconds kResolveDeadline{3};
constexpr std::chrono::milliseconds kWatch{400};
constexpr int64_t kUnlimited = int64_t{1} << 60;  // what the kernel writes for "no limit" is above

std::string first_line(const fs::path& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

std::optional<int64_t> whole_number(const std::string& text) {
  std::istringstream stream(text);
  int64_t value = 0;
  if (stream >> value) return value;
  return std::nullopt;
}

// The folders that hold this process's limits of one kind, innermost first: version 2 keeps all
// kinds in one tree, version 1 has a tree per kind.
std::vector<fs::path> cgroup_folders(const std::string& kind) {
  std::vector<fs::path> folders;
  std::ifstream file("/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string kinds = line.substr(first + 1, second - first - 1);
    if (!kinds.empty() && ("," + kinds + ",").find("," + kind + ",") == std::string::npos) continue;
    const fs::path root = kinds.empty() ? "/sys/fs/cgroup" : "/sys/fs/cgroup/" + kinds;
    for (fs::path inner = fs::path(line.substr(second + 1)).relative_path();;
         inner = inner.parent_path()) {
      folders.push_back(root / inner);
      if (inner.empty()) break;
    }
  }
  return folders;
}

// The cores' worth of time that the tightest group allows; null without a quota.
json cpu_quota() {
  json quota;
  const auto keep_smaller = [&quota](double cores) {
    if (quota.is_null() || cores < quota.get<double>()) quota = cores;
  };
  for (const auto& folder : cgroup_folders("cpu")) {
    std::istringstream both(first_line(folder / "cpu.max"));  // "max 100000" or "150000 100000"
    double share = 0;
    double period = 0;
    if (both >> share >> period && period > 0) keep_smaller(share / period);
    const auto old_share = whole_number(first_line(folder / "cpu.cfs_quota_us"));
    const auto old_period = whole_number(first_line(folder / "cpu.cfs_period_us"));
    if (old_share && old_period && *old_share > 0 && *old_period > 0) {
      keep_smaller(static_cast<double>(*old_share) / static_cast<double>(*old_period));
    }
  }
  return quota;
}

json memory_limit() {
  json limit;
  for (const auto& folder : cgroup_folders("memory")) {
    for (const char* name : {"memory.max", "memory.limit_in_bytes"}) {
      const auto bytes = whole_number(first_line(folder / name));
      if (bytes && *bytes < kUnlimited && (limit.is_null() || *bytes < limit.get<int64_t>())) {
        limit = *bytes;
      }
    }
  }
  return limit;
}

json meminfo(const std::string& field) {
  std::ifstream file("/proc/meminfo");
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with(field + ":")) continue;
    const auto kibibytes = whole_number(line.substr(field.size() + 1));
    if (kibibytes) return *kibibytes * 1024;
  }
  return nullptr;
}

json shared_memory() {
  struct statvfs info {};
  if (::statvfs("/dev/shm", &info) != 0) return nullptr;
  const auto block = static_cast<int64_t>(info.f_frsize);
  return {{"size_bytes", static_cast<int64_t>(info.f_blocks) * block},
          {"free_bytes", static_cast<int64_t>(info.f_bavail) * block},
          {"writable", ::access("/dev/shm", W_OK) == 0}};
}

json limit_of(__rlimit_resource resource) {
  rlimit limit{};
  if (::getrlimit(resource, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return nullptr;
  return static_cast<int64_t>(limit.rlim_cur);
}

// Resolving may hang in a broken network. Then the thread is left behind and ends with lockstep.
json host_name() {
  std::array<char, 256> name{};
  ::gethostname(name.data(), name.size() - 1);
  const auto answer = std::make_shared<std::promise<std::string>>();
  auto result = answer->get_future();
  std::thread([answer, host = std::string(name.data())] {
    addrinfo* found = nullptr;
    const int error = ::getaddrinfo(host.c_str(), nullptr, nullptr, &found);
    if (found != nullptr) ::freeaddrinfo(found);
    answer->set_value(error == 0 ? "" : ::gai_strerror(error));
  }).detach();
  const bool in_time = result.wait_for(kResolveDeadline) == std::future_status::ready;
  const std::string problem =
      in_time ? result.get() : fmt::format("no answer within {} s", kResolveDeadline.count());
  return {{"name", name.data()}, {"problem", problem}};
}

json environment() {
  json set = json::object();
  for (const char* name :
       {"OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "CUDA_VISIBLE_DEVICES"}) {
    if (const char* value = std::getenv(name)) set[name] = value;
  }
  return set;
}

// The module of each transport between hosts, and what starts ranks for MPI; "" if there is
// none.
json transports() {
  json found = json::object();
  for (const BackendInfo& backend : kBackends) {
    if (backend.module == nullptr) continue;
    found[std::string(backend.module->name)] = find_module(backend.module->file);
  }
  found["mpirun"] = find_in_path("mpirun", std::getenv("PATH"));
  return found;
}

// Ticks of all cores since the start: those spent, and all.
struct Ticks {
  double busy = 0;
  double all = 0;
};

Ticks read_ticks() {
  std::ifstream file("/proc/stat");
  std::string label;
  file >> label;  // "cpu": user nice system idle iowait irq softirq steal
  Ticks ticks;
  for (int field = 0; field < 8; ++field) {
    double value = 0;
    file >> value;
    ticks.all += value;
    if (field != 3 && field != 4) ticks.busy += value;
  }
  return ticks;
}

// Boards of this user's runs that were killed; and, separately, files that only have a board's
// name: another user's, another version's, or no board at all.
void add_boards(json& facts) {
  facts["leftover_boards"] = json::array();
  facts["unknown_boards"] = json::array();
  for (const auto& board : list_boards()) {
    if (board.state == BoardState::kStale) facts["leftover_boards"].push_back(board.path);
    if (board.state == BoardState::kUnusable) facts["unknown_boards"].push_back(board.problem);
  }
}

}  // namespace

json machine_facts() {
  const Hardware hardware = Hardware::detect(0);
  json facts = {{"cores_allowed", hardware.cores.size()},
                {"cores_online", std::max(1L, ::sysconf(_SC_NPROCESSORS_ONLN))},
                {"cpu_quota_cores", cpu_quota()},
                {"memory_total_bytes", meminfo("MemTotal")},
                {"memory_available_bytes", meminfo("MemAvailable")},
                {"memory_limit_bytes", memory_limit()},
                {"shared_memory", shared_memory()},
                {"open_files", limit_of(RLIMIT_NOFILE)},
                {"processes", limit_of(RLIMIT_NPROC)},
                {"host", host_name()},
                {"environment", environment()},
                {"transports", transports()},
                {"driver", driver_facts()}};
  add_boards(facts);
  return facts;
}

double busy_cores() {
  const Ticks before = read_ticks();
  std::this_thread::sleep_for(kWatch);
  const Ticks after = read_ticks();
  const double all = after.all - before.all;
  if (all <= 0) return 0;
  return (after.busy - before.busy) / all * static_cast<double>(::sysconf(_SC_NPROCESSORS_ONLN));
}

json probe_facts(bool measure, const Interrupts& interrupts) {
  try {
    ChildCommand command{.program = sibling_path("lockstep-probe"), .arguments = {}};
    if (!measure) command.arguments.push_back("--no-measure");
    command.deadline = std::chrono::seconds(120);
    auto facts = parse_json(run_child_or_throw(command, interrupts).output);
    if (facts) return std::move(*facts);
    return {{"error", "lockstep-probe did not print a JSON object"}};
  } catch (const Error& error) {
    std::string text = error.message();
    for (const auto& note : error.notes()) text += "\n" + note;
    return {{"error", text}};
  }
}

}  // namespace lockstep::cli
