#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>

#include "cli/doctor/diagnose_gpu.hpp"
#include "cli/doctor/doctor_facts.hpp"
#include "lockstep/cli_parse.hpp"
#include "lockstep/loaded_libraries.hpp"
#include "lockstep/units.hpp"

namespace lockstep::cli {
namespace {

using nlohmann::json;

constexpr double kSlowGflops = 15;    // the reference BLAS reaches about 6, OpenBLAS 50 and more
constexpr double kBudgetSlack = 1.1;  // threads seen where one was allowed
constexpr int64_t kLittleMemory = 1_GiB;
constexpr int64_t kLittleSharedMemory = 256_MiB;
constexpr int64_t kFewOpenFiles = 1024;
constexpr int64_t kFewProcesses = 512;
constexpr const char* kInstallBlas =
    "apt-get install libopenblas0-openmp, then build lockstep again";

Finding check_lockstep(const json& facts) {
  const auto command = fact<std::string>(facts, "/lockstep").value_or("?");
  const auto probe = fact<std::string>(facts, "/probe/lockstep");
  if (const auto error = fact<std::string>(facts, "/probe/error")) {
    return {"lockstep", Level::kFail,
            fmt::format("{}, but lockstep-probe failed: {}", command, *error),
            "build and install lockstep's programs together; a missing library is named above"};
  }
  if (probe && *probe != command) {
    return {"lockstep", Level::kFail, fmt::format("{}, but lockstep-probe is {}", command, *probe),
            "build and install lockstep's programs together"};
  }
  return {"lockstep", Level::kPass, command, ""};
}

Finding check_libtorch(const json& facts) {
  const auto built = fact<std::string>(facts, "/probe/torch/built").value_or("?");
  const auto loaded = fact<std::string>(facts, "/probe/torch/loaded").value_or("");
  const auto libraries = fact<std::vector<std::string>>(facts, "/probe/torch/libraries")
                             .value_or(std::vector<std::string>{});
  if (libraries.empty()) return unknown("libtorch");
  std::set<std::string> folders;
  for (const auto& library : libraries) {
    folders.insert(std::filesystem::path(library).parent_path().string());
  }
  if (folders.size() > 1) {
    return {"libtorch", Level::kFail,
            fmt::format("two libtorches are mixed: {}", fmt::join(folders, " and ")),
            "remove the build folder, configure with -DLOCKSTEP_TORCH=/path/to/torch, and unset "
            "LD_LIBRARY_PATH and LD_PRELOAD"};
  }
  // A wheel's version has a suffix ("2.11.0+cu130") that its headers may not have.
  const auto number = [](const std::string& text) { return text.substr(0, text.find('+')); };
  if (!loaded.empty() && number(loaded) != number(built)) {
    return {
        "libtorch", Level::kFail,
        fmt::format("built with {}, but {} is loaded from {}", built, loaded, *folders.begin()),
        "build lockstep again with the libtorch it is to use (-DLOCKSTEP_TORCH=/path/to/torch)"};
  }
  return {"libtorch", Level::kPass, fmt::format("{} in {}", built, *folders.begin()), ""};
}

Finding check_abi(const json& facts) {
  const auto cxx11 = fact<bool>(facts, "/probe/torch/cxx11_abi");
  if (!cxx11) return unknown("C++ ABI");
  if (*cxx11)
    return {"C++ ABI", Level::kPass, "C++11 (std::string as GCC 5 and newer have it)", ""};
  return {"C++ ABI", Level::kFail, "the old one, from before C++11",
          "use PyTorch 2.6 or newer, or a libtorch download marked cxx11-abi"};
}

Finding check_blas(const json& facts) {
  const auto libraries = fact<std::set<std::string>>(facts, "/probe/blas/libraries");
  const auto gflops = fact<double>(facts, "/probe/blas/gflops_one_thread");
  if (!libraries || !gflops) return unknown("BLAS");
  const Blas blas =
      classify_blas(*libraries, fact<std::string>(facts, "/probe/torch/config").value_or(""));
  const std::string value =
      fmt::format("{}, {:.0f} GFLOP/s in fp32 with a budget of one thread{}", blas_title(blas),
                  *gflops, libraries->empty() ? "" : ", " + *libraries->begin());
  if (blas == Blas::kReference) {
    return {"BLAS", Level::kFail,
            value + ": matrix products are 10 to 30 times slower than they should be",
            kInstallBlas};
  }
  if (blas == Blas::kOpenBlasPthread) {
    return {"BLAS", Level::kFail, value + ": this flavour ignores thread budgets", kInstallBlas};
  }
  if (*gflops < kSlowGflops) {
    return {"BLAS", Level::kWarn, value + ": that is slow",
            "see whether the machine is busy; if it is not, " + std::string(kInstallBlas)};
  }
  if (blas == Blas::kOpenBlasSerial) {
    return {"BLAS", Level::kWarn, value + ": this flavour never uses more than one core",
            kInstallBlas};
  }
  return {"BLAS", Level::kPass, value, ""};
}

Finding check_thread_budget(const json& facts) {
  const auto used = fact<double>(facts, "/probe/threads_used_of_one");
  if (!used) return unknown("thread budget");
  const std::string value =
      fmt::format("{:.2f} threads computed where one was allowed (CPU time, measured)", *used);
  if (*used <= kBudgetSlack) return {"thread budget", Level::kPass, value, ""};
  return {"thread budget", Level::kFail, value + ": logical devices would compete for cores",
          kInstallBlas};
}

Finding check_cores(const json& facts) {
  const auto allowed = fact<int64_t>(facts, "/machine/cores_allowed");
  const auto online = fact<int64_t>(facts, "/machine/cores_online");
  if (!allowed || !online) return unknown("cores");
  const auto quota = fact<double>(facts, "/machine/cpu_quota_cores");
  std::string value = fmt::format("{} allowed of {} online", *allowed, *online);
  if (!quota) return {"cores", Level::kPass, value + ", no cgroup quota", ""};
  value += fmt::format(", cgroup quota {:.2g} cores", *quota);
  if (*quota + 0.01 >= static_cast<double>(*allowed)) return {"cores", Level::kPass, value, ""};
  return {"cores", Level::kWarn, value + ": threads will be paused when the quota is used up",
          fmt::format("use at most cpu:{}, or raise the container's CPU limit",
                      std::max<int64_t>(1, static_cast<int64_t>(*quota)))};
}

Finding check_memory(const json& facts) {
  const auto total = fact<int64_t>(facts, "/machine/memory_total_bytes");
  auto free = fact<int64_t>(facts, "/machine/memory_available_bytes");
  if (!total || !free) return unknown("memory");
  std::string value = fmt::format("{} available of {}", format_bytes(*free), format_bytes(*total));
  if (const auto limit = fact<int64_t>(facts, "/machine/memory_limit_bytes")) {
    value += fmt::format(", cgroup limit {}", format_bytes(*limit));
    free = std::min(*free, *limit);
  }
  if (*free >= kLittleMemory) return {"memory", Level::kPass, value, ""};
  return {"memory", Level::kWarn, value, "close other programs, or train smaller models"};
}

Finding check_shared_memory(const json& facts) {
  const auto size = fact<int64_t>(facts, "/machine/shared_memory/size_bytes");
  const auto free = fact<int64_t>(facts, "/machine/shared_memory/free_bytes");
  if (!size || !free || !fact<bool>(facts, "/machine/shared_memory/writable").value_or(false)) {
    return {
        "shared memory", Level::kFail, "/dev/shm cannot be used",
        "mount a tmpfs there that you may write to: mount -t tmpfs -o mode=1777 tmpfs /dev/shm"};
  }
  const std::string value =
      fmt::format("/dev/shm has {} free of {}", format_bytes(*free), format_bytes(*size));
  if (*free >= kLittleSharedMemory) return {"shared memory", Level::kPass, value, ""};
  return {"shared memory", Level::kWarn, value,
          *size < kLittleSharedMemory
              ? "make it larger: docker run --shm-size=1g, or mount -o remount,size=1g /dev/shm"
              : "remove files from /dev/shm that nobody uses"};
}

Finding check_limit(const json& facts, const char* check, const char* pointer, int64_t few,
                    const char* flag) {
  const auto limit = fact<int64_t>(facts, pointer);
  if (!limit) return {check, Level::kPass, "no limit", ""};
  if (*limit >= few) return {check, Level::kPass, fmt::format("at most {}", *limit), ""};
  return {check, Level::kWarn, fmt::format("at most {}", *limit),
          fmt::format("ulimit {} {}", flag, few)};
}

Finding check_host(const json& facts) {
  const auto name = fact<std::string>(facts, "/machine/host/name");
  const auto problem = fact<std::string>(facts, "/machine/host/problem");
  if (!name || !problem) return unknown("host name");
  if (problem->empty()) return {"host name", Level::kPass, *name + " resolves", ""};
  return {"host name", Level::kWarn, fmt::format("{} does not resolve: {}", *name, *problem),
          fmt::format("add a line \"127.0.1.1 {}\" to /etc/hosts", *name)};
}

Finding check_environment(const json& facts) {
  std::vector<std::string> set;
  for (const char* name : {"OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"}) {
    const std::string pointer = fmt::format("/machine/environment/{}", name);
    const auto value = fact<std::string>(facts, pointer.c_str());
    if (value) set.push_back(fmt::format("{}={}", name, *value));
  }
  if (set.empty()) return {"environment", Level::kPass, "no variable sets a number of threads", ""};
  return {"environment", Level::kWarn,
          fmt::format("{}: logical devices get that many threads instead of cores / devices",
                      fmt::join(set, ", ")),
          "unset it unless you mean it"};
}

Finding check_boards(const json& facts) {
  const auto boards = fact<std::vector<std::string>>(facts, "/machine/leftover_boards");
  const auto others = fact<std::vector<std::string>>(facts, "/machine/unknown_boards");
  if (!boards || !others) return unknown("boards");
  if (boards->empty() && others->empty()) return {"boards", Level::kPass, "none left over", ""};
  std::vector<std::string> problems;
  std::vector<std::string> remedies;
  if (!boards->empty()) {
    problems.push_back(fmt::format("{} left over by runs that died: {}", boards->size(),
                                   fmt::join(*boards, ", ")));
    std::vector<const char*> removal = {"rm"};
    for (const auto& board : *boards) removal.push_back(board.c_str());
    remedies.push_back(shell_line(static_cast<int>(removal.size()), removal.data()));
  }
  if (!others->empty()) {
    problems.push_back(
        fmt::format("{} that lockstep cannot read: {}", others->size(), fmt::join(*others, "; ")));
    remedies.push_back("lockstep leaves what it cannot read alone: see whose it is");
  }
  return {"boards", Level::kWarn, fmt::format("{}", fmt::join(problems, "; ")),
          fmt::format("{}", fmt::join(remedies, "; "))};
}

}  // namespace

const char* level_name(Level level) {
  switch (level) {
    case Level::kPass:
      return "pass";
    case Level::kWarn:
      return "warn";
    case Level::kFail:
      return "fail";
  }
  return "";
}

std::vector<Finding> diagnose(const json& facts) {
  std::vector<Finding> findings = {check_lockstep(facts)};
  if (!facts.contains(json::json_pointer("/probe/error"))) {
    for (const auto check :
         {check_libtorch, check_abi, check_blas, check_thread_budget, check_cuda}) {
      findings.push_back(check(facts));
    }
    if (fact<bool>(facts, "/probe/torch/cuda_built").value_or(false)) {
      findings.push_back(check_gpu_code(facts));
      findings.push_back(check_gpu_ranks(facts));
    }
  }
  for (const auto check : {check_cores, check_memory, check_shared_memory}) {
    findings.push_back(check(facts));
  }
  findings.push_back(check_limit(facts, "open files", "/machine/open_files", kFewOpenFiles, "-n"));
  findings.push_back(check_limit(facts, "processes", "/machine/processes", kFewProcesses, "-u"));
  for (const auto check : {check_host, check_environment, check_boards}) {
    findings.push_back(check(facts));
  }
  return findings;
}

}  // namespace lockstep::cli
