#include "launch/flags.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <array>
#include <charconv>
#include <cmath>

#include "base/backends.hpp"
#include "base/lists.hpp"
#include "lockstep/error.hpp"

namespace lockstep {
namespace {

constexpr std::string_view kRanks = "Ranks";
constexpr std::string_view kHosts = "Several hosts";
constexpr std::string_view kFailures = "Failures";
constexpr std::string_view kOutput = "Output";
constexpr std::string_view kProgram = "Program";
constexpr std::string_view kTorchrun = "Accepted for torchrun's sake, without effect";

const std::string kBackendValues = fmt::format("{}", fmt::join(launched_backends(), "|"));

const std::array kFlags = {
    FlagInfo{"nproc-per-node", "n", "N|auto|cpu|gpu", "ranks on this host (default: 1)", kRanks,
             "PET_NPROC_PER_NODE"},
    FlagInfo{"threads", "", "N", "threads per rank (default: OMP_NUM_THREADS, or cores / ranks)",
             kRanks, ""},
    FlagInfo{"no-pin", "", "", "let ranks run on any core", kRanks, ""},
    FlagInfo{"backend", "", kBackendValues, "how ranks communicate (default: auto)", kRanks,
             "LOCKSTEP_BACKEND"},
    FlagInfo{"role", "", "NAME", "ROLE_NAME for the program (default: default)", kRanks,
             "PET_ROLE"},

    FlagInfo{"nnodes", "", "N|MIN:MAX", "hosts; each runs the same command (default: 1)", kHosts,
             "PET_NNODES"},
    FlagInfo{"node-rank", "", "N", "which host this is (default: by order of arrival)", kHosts,
             "PET_NODE_RANK"},
    FlagInfo{"rdzv-endpoint", "", "HOST[:PORT]", "the hosts' rendezvous, on host 0", kHosts,
             "PET_RDZV_ENDPOINT"},
    FlagInfo{"rdzv-id", "", "NAME", "name of the job; others are refused (default: none)", kHosts,
             "PET_RDZV_ID"},
    FlagInfo{"rdzv-backend", "", "static|c10d", "both mean lockstep's own rendezvous", kHosts,
             "PET_RDZV_BACKEND"},
    FlagInfo{"rdzv-conf", "", "KEY=VALUE,...",
             "torchrun's join_timeout and last_call_timeout, as the two flags below", kHosts,
             "PET_RDZV_CONF"},
    FlagInfo{"join-timeout", "", "SECONDS", "longest wait for enough hosts (default: 300)", kHosts,
             ""},
    FlagInfo{"last-call", "", "SECONDS",
             "wait for each further host once MIN have come (default: 30)", kHosts, ""},
    FlagInfo{"host-timeout", "", "SECONDS", "silence after which a host is lost (default: 10)",
             kHosts, ""},
    FlagInfo{"heartbeat", "", "SECONDS", "how often hosts give a sign of life (default: 1)", kHosts,
             ""},
    FlagInfo{"standalone", "", "", "one host, whatever the other flags say", kHosts,
             "PET_STANDALONE"},
    FlagInfo{"master-addr", "", "HOST", "host of rank 0 (default: 127.0.0.1, or as hosts agree)",
             kHosts, "PET_MASTER_ADDR"},
    FlagInfo{"master-port", "", "PORT", "port for rank 0's store (default: a free one)", kHosts,
             "PET_MASTER_PORT"},

    FlagInfo{"timeout", "", "SECONDS", "longest wait of a rank for another (LOCKSTEP_TIMEOUT_S)",
             kFailures, "LOCKSTEP_TIMEOUT_S"},
    FlagInfo{"step-timeout", "", "SECONDS",
             "longest time without a step or collective of any rank (default: none)", kFailures,
             ""},
    FlagInfo{"grace", "", "SECONDS",
             "from SIGTERM to SIGKILL (default: 5; 25 if asked to stop by SIGTERM)", kFailures, ""},
    FlagInfo{"max-restarts", "", "N", "restart all ranks at most N times (default: 0)", kFailures,
             "PET_MAX_RESTARTS"},
    FlagInfo{"inject", "", "FAULT@rank=R,step=S",
             "provoke kill, stop, exit, slow, nan, mismatch or netcut in a rank", kFailures, ""},
    FlagInfo{
        "signals-to-handle", "", "LIST",
        "signals to pass on to the ranks (default: SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2)",
        kFailures, "PET_SIGNALS_TO_HANDLE"},

    FlagInfo{"ranks", "", "all|LIST", "whose output the console shows (default: 0, errors of all)",
             kOutput, ""},
    FlagInfo{"log-dir", "", "DIR", "keep all output here (default: kept after failures, in /tmp)",
             kOutput, "PET_LOG_DIR"},
    FlagInfo{"redirects", "r", "0-3|LIST", "to files only: 1 output, 2 errors, 3 both, or 0:1,1:3",
             kOutput, "PET_REDIRECTS"},
    FlagInfo{"tee", "t", "0-3|LIST", "to the console also: 1 output, 2 errors, 3 both, or 0:1,1:3",
             kOutput, "PET_TEE"},
    FlagInfo{"local-ranks-filter", "", "LIST", "the console shows only these local ranks", kOutput,
             "PET_LOCAL_RANKS_FILTER"},
    FlagInfo{"quiet", "", "", "no start line", kOutput, ""},
    FlagInfo{"dry-run", "", "", "print the plan and where each value came from; start nothing",
             kOutput, ""},

    FlagInfo{"module", "m", "", "the program is a Python module", kProgram, "PET_MODULE"},
    FlagInfo{"no-python", "", "", "start even a .py file directly", kProgram, "PET_NO_PYTHON"},

    FlagInfo{"run-path", "", "", "refused: programs are started, not run inside lockstep",
             kTorchrun, "PET_RUN_PATH"},
    FlagInfo{"monitor-interval", "", "SECONDS", "exits are seen at once", kTorchrun,
             "PET_MONITOR_INTERVAL"},
    FlagInfo{"start-method", "", "NAME", "ranks are always new processes", kTorchrun,
             "PET_START_METHOD"},
    FlagInfo{"event-log-handler", "", "NAME", "there is no event log", kTorchrun,
             "PET_EVENT_LOG_HANDLER"},
    FlagInfo{"logs-specs", "", "NAME", "see --log-dir", kTorchrun, "PET_LOGS_SPECS"},
    FlagInfo{"local-addr", "", "HOST", "the rendezvous finds addresses itself", kTorchrun,
             "PET_LOCAL_ADDR"},
    FlagInfo{"numa-binding", "", "KIND", "each rank has its own cores; see --no-pin", kTorchrun,
             "PET_NUMA_BINDING"},
};

bool switch_is_on(const Setting& setting) {
  if (setting.text == "1" || setting.text == "true") return true;
  if (setting.text == "0" || setting.text == "false") return false;
  throw Error(Code::kUsage,
              fmt::format("{} \"{}\" is neither 1 nor 0", setting.source, setting.text),
              fmt::format("set {0}=1, or unset {0}", setting.source));
}

}  // namespace

std::span<const FlagInfo> run_flags() {
  return kFlags;
}

Settings collect_settings(const std::map<std::string, std::string>& given,
                          const VariableLookup& lookup) {
  Settings settings;
  for (const FlagInfo& flag : kFlags) {
    const std::string name(flag.name);
    if (const auto found = given.find(name); found != given.end()) {
      settings[name] = {flag.is_switch() ? "1" : found->second, "--" + name};
      continue;
    }
    const std::string variable(flag.variable);
    const char* text = variable.empty() ? nullptr : lookup(variable.c_str());
    if (text == nullptr || *text == '\0') continue;
    Setting setting{text, variable};
    if (flag.is_switch() && !switch_is_on(setting)) continue;
    settings[name] = flag.is_switch() ? Setting{"1", variable} : setting;
  }
  return settings;
}

std::optional<HostCount> parse_host_count(std::string_view text) {
  const size_t colon = text.find(':');
  const auto least = parse_whole_number(text.substr(0, colon));
  const auto most =
      colon == std::string_view::npos ? least : parse_whole_number(text.substr(colon + 1));
  if (!least || !most || *least < 1 || *most < *least || *most > kMostHosts) return std::nullopt;
  return HostCount{*least, *most};
}

std::string HostCount::text() const {
  return elastic() ? fmt::format("{}:{}", least, most) : std::to_string(most);
}

std::string HostCount::words() const {
  return elastic() ? fmt::format("{} to {}", least, most) : std::to_string(most);
}

std::optional<double> parse_finite_number(std::string_view text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || !std::isfinite(value)) {
    return std::nullopt;
  }
  return value;
}

}  // namespace lockstep
