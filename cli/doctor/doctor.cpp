#include "cli/doctor/doctor.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <sstream>
#include <type_traits>
#include <vector>

#include "base/json_text.hpp"
#include "base/machine.hpp"
#include "cli/doctor/facts.hpp"
#include "lockstep/cli_parse.hpp"
#include "lockstep/table.hpp"
#include "lockstep/units.hpp"
#include "lockstep/version.hpp"

namespace lockstep::cli {
namespace {

using nlohmann::json;

// A value of the wanted type at a JSON pointer, or nothing.
template <class T>
std::optional<T> fact(const json& facts, const char* pointer) {
  const json::json_pointer where(pointer);
  if (!facts.contains(where) || facts.at(where).is_null()) return std::nullopt;
  try {
    if constexpr (std::is_same_v<T, int64_t>) {
      return whole_number_in(facts.at(where), INT64_MIN, INT64_MAX);
    } else {
      return facts.at(where).get<T>();
    }
  } catch (const json::exception&) {
    return std::nullopt;
  }
}

// The finding of a check whose facts are missing.
Finding unknown(const char* check) {
  return {check, Level::kWarn, "could not be found out",
          "`lockstep doctor --json` shows the facts there are"};
}

json gpus_of(const json& facts) {
  return fact<json>(facts, "/machine/driver/gpus").value_or(json::array());
}

std::string describe_gpus(const json& facts) {
  std::vector<std::string> names;
  for (const auto& gpu : gpus_of(facts)) {
    names.push_back(fmt::format("{} ({})", gpu.value("name", "?"),
                                format_bytes(gpu.value("memory_bytes", int64_t{0}))));
  }
  const auto cuda = fact<std::string>(facts, "/machine/driver/cuda_version");
  return fmt::format("{}, driver {}{}", fmt::join(names, ", "),
                     fact<std::string>(facts, "/machine/driver/version").value_or("?"),
                     cuda ? " for CUDA " + *cuda : "");
}

// Whether libtorch can use the GPUs that the driver has.
Finding check_cuda(const json& facts) {
  const auto built = fact<bool>(facts, "/probe/torch/cuda_built");
  const auto usable = fact<int64_t>(facts, "/probe/gpus_usable");
  if (!built || !usable) return unknown("CUDA");
  const auto gpus = gpus_of(facts).size();
  const auto visible = fact<std::string>(facts, "/machine/environment/CUDA_VISIBLE_DEVICES");
  if (!*built && gpus > 0) {
    return {"CUDA", Level::kWarn,
            fmt::format("this libtorch has no CUDA, so these stay idle: {}", describe_gpus(facts)),
            "build lockstep with a CUDA libtorch: scripts/quickstart --torch python"};
  }
  if (!*built)
    return {"CUDA", Level::kPass, "not built in, and no GPU is here: devices are cores", ""};
  if (gpus == 0)
    return {"CUDA", Level::kPass, "built in, but no GPU is here: devices are cores", ""};
  const std::string value =
      fmt::format("libtorch can use {} of {}: {}", *usable, gpus, describe_gpus(facts));
  if (*usable == static_cast<int64_t>(gpus)) return {"CUDA", Level::kPass, value, ""};
  if (visible) {
    return {"CUDA", *usable > 0 ? Level::kPass : Level::kWarn,
            fmt::format("{}; CUDA_VISIBLE_DEVICES=\"{}\"", value, *visible),
            *usable > 0 ? "" : "unset CUDA_VISIBLE_DEVICES, or name a GPU that exists"};
  }
  return {"CUDA", *usable > 0 ? Level::kWarn : Level::kFail, value,
          "the driver may be too old for this libtorch, or the GPU is held by another process "
          "(nvidia-smi)"};
}

// Whether lockstep was built with GPU code, and for these GPUs. Needs a libtorch with CUDA.
Finding check_gpu_code(const json& facts) {
  const auto built = fact<bool>(facts, "/probe/cuda/code");
  const auto architectures = fact<std::string>(facts, "/probe/cuda/architectures");
  if (!built || (*built && !architectures)) return unknown("GPU code");
  if (!*built) {
    return {"GPU code", Level::kWarn,
            "this lockstep was built without it: steps are not captured, and ranks on GPUs talk "
            "through the host's memory",
            "configure with -DLOCKSTEP_CUDA=ON and build again"};
  }
  const std::string value = fmt::format("built for {}", *architectures);
  std::vector<std::string> served;
  for (const auto& gpu : gpus_of(facts)) {
    const auto name = gpu.value("name", "?");
    const auto capability = gpu.value("compute_capability", "");
    if (capability.empty()) continue;
    if (!gpu_code_serves(*architectures, capability)) {
      return {
          "GPU code", Level::kFail,
          fmt::format("{}, which {} (compute capability {}) cannot run", value, name, capability),
          "configure with -DCMAKE_CUDA_ARCHITECTURES=native on that machine, and build again"};
    }
    served.push_back(fmt::format("{} ({})", name, capability));
  }
  if (served.empty()) return {"GPU code", Level::kPass, value, ""};
  return {"GPU code", Level::kPass,
          fmt::format("{}, which suits {}", value, fmt::join(served, ", ")), ""};
}

// How ranks on GPUs will communicate. Needs a libtorch with CUDA.
Finding check_gpu_ranks(const json& facts) {
  const auto built = fact<bool>(facts, "/probe/cuda/code");
  const auto nccl = fact<bool>(facts, "/probe/cuda/nccl");
  if (!built || !nccl) return unknown("GPU ranks");
  if (!*built) return {"GPU ranks", Level::kPass, "through the host's memory", ""};
  const std::string alone = *nccl ? "NCCL where each rank has a GPU"
                                  : "no NCCL: ranks of several hosts talk through their memory";
  const auto ipc = fact<bool>(facts, "/probe/cuda/ipc");  // null if no GPU can be used
  if (!ipc) return {"GPU ranks", Level::kPass, alone, ""};
  if (!*ipc) {
    return {"GPU ranks", Level::kWarn,
            alone +
                "; CUDA IPC is not supported here, so ranks that share a GPU talk through the "
                "host's memory",
            "give each rank a GPU of its own"};
  }
  const json gpus = gpus_of(facts);
  for (size_t index = 0; index < gpus.size(); ++index) {
    if (gpus[index].value("may_be_shared", true)) continue;
    return {"GPU ranks", Level::kWarn,
            fmt::format("{}; GPU {} takes one process only (its compute mode), so ranks cannot "
                        "share it",
                        alone, index),
            "give each rank a GPU of its own, or ask the administrator for compute mode DEFAULT"};
  }
  return {"GPU ranks", Level::kPass, alone + "; ranks may share a GPU (ipc)", ""};
}

constexpr double kSlowGflops = 15;    // the reference BLAS reaches about 6, OpenBLAS 50 and more
constexpr double kBudgetSlack = 1.1;  // threads seen where one was allowed
constexpr int64_t kLittleMemory = 1_GiB;
constexpr int64_t kLittleSharedMemory = 256_MiB;
constexpr int64_t kFewOpenFiles = 1024;
constexpr int64_t kFewProcesses = 512;
constexpr const char* kInstallBlas =
    "apt-get install libopenblas0-openmp; if another BLAS is installed too, choose that one with "
    "update-alternatives --config libblas.so.3-$(uname -m)-linux-gnu";

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
              : "remove files that are not in use from /dev/shm"};
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
          fmt::format("add a line \"127.0.1.1 {}\" to /etc/hosts, or where it trains with other "
                      "hosts, one with the address that they use",
                      *name)};
}

// By what ranks of several hosts can talk. MPI is optional: nobody is told to install it.
Finding check_transports(const json& facts) {
  const auto gloo = fact<std::string>(facts, "/machine/transports/gloo");
  const auto mpi = fact<std::string>(facts, "/machine/transports/mpi");
  const auto mpirun = fact<std::string>(facts, "/machine/transports/mpirun");
  if (!gloo || !mpi || !mpirun) return unknown("several hosts");
  std::string over_mpi = "; no MPI";
  if (!mpi->empty()) {
    over_mpi = mpirun->empty() ? "; mpi, but no mpirun is here (srun --mpi=pmix starts ranks, too)"
                               : fmt::format("; mpi, started by {}", *mpirun);
  }
  if (!gloo->empty()) return {"several hosts", Level::kPass, "gloo" + over_mpi, ""};
  return {"several hosts", Level::kWarn, "no gloo" + over_mpi,
          "apt-get install libgloo-dev, configure and build again; not needed on a single host"};
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

constexpr size_t kFindingWidth = 100;
constexpr size_t kFindingIndent = 22;  // columns before a value: "  pass  thread budget "

int64_t count_level(const std::vector<Finding>& findings, Level level) {
  return std::count_if(findings.begin(), findings.end(),
                       [level](const Finding& finding) { return finding.level == level; });
}

std::string coloured(Level level, bool style) {
  if (!style) return level_name(level);
  const int color = level == Level::kPass ? 32 : level == Level::kWarn ? 33 : 31;
  return fmt::format("\033[{}m{}\033[0m", color, level_name(level));
}

void print_findings(const std::vector<Finding>& findings) {
  const bool style = may_style(STDOUT_FILENO);
  const std::string indent(kFindingIndent, ' ');
  const size_t width = std::min(kFindingWidth, terminal_width(STDOUT_FILENO));
  for (const auto& finding : findings) {
    const std::string value = wrap_text(finding.value, width, indent).substr(kFindingIndent);
    fmt::print("  {}  {:<14}{}\n", coloured(finding.level, style), finding.check, value);
    if (!finding.remedy.empty()) {
      fmt::print("{}\n", wrap_text("help: " + finding.remedy, width, indent));
    }
  }
  fmt::print("\n{} checks: {} passed, {} warned, {} failed\n", findings.size(),
             count_level(findings, Level::kPass), count_level(findings, Level::kWarn),
             count_level(findings, Level::kFail));
}

void print_report_json(const json& facts, const std::vector<Finding>& findings, bool ok) {
  json list = json::array();
  for (const auto& finding : findings) {
    list.push_back({{"check", finding.check},
                    {"level", level_name(finding.level)},
                    {"value", finding.value},
                    {"remedy", finding.remedy}});
  }
  const json report = {{"schema", 1}, {"ok", ok}, {"findings", list}, {"facts", facts}};
  fmt::print("{}\n", report.dump(2, ' ', false, json::error_handler_t::replace));
}

}  // namespace

constexpr int64_t kNewestMajor = 1000;  // a compute capability beyond it is no capability

bool gpu_code_serves(const std::string& architectures, const std::string& capability) {
  int64_t major = 0;
  int64_t minor = 0;
  char dot = 0;
  std::istringstream(capability) >> major >> dot >> minor;
  if (major < 0 || major > kNewestMajor || minor < 0 || minor > 9) return false;
  const int64_t wanted = major * 10 + minor;
  std::istringstream list(architectures);
  for (std::string entry; std::getline(list, entry, ',');) {
    char* rest = nullptr;
    const int64_t number = std::strtoll(entry.c_str(), &rest, 10);
    const std::string suffix(rest);
    const bool exact = suffix.starts_with("a");  // with instructions of that GPU only
    const bool machine = !suffix.ends_with("-virtual");
    const bool intermediate = !suffix.ends_with("-real") && !exact;
    if (number == wanted) return true;
    if (machine && !exact && number / 10 == major && number < wanted) return true;
    if (intermediate && number < wanted) return true;
  }
  return false;
}

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
  for (const auto check : {check_host, check_transports, check_environment, check_boards}) {
    findings.push_back(check(facts));
  }
  return findings;
}

int run_doctor(bool as_json) {
  const Interrupts interrupts;
  const json facts = {{"lockstep", kVersion},
                      {"machine", machine_facts()},
                      {"probe", probe_facts(true, interrupts)}};
  const auto findings = diagnose(facts);
  const bool ok = count_level(findings, Level::kFail) == 0;
  if (as_json) {
    print_report_json(facts, findings, ok);
  } else {
    print_findings(findings);
  }
  return ok ? 0 : 1;
}

}  // namespace lockstep::cli
