#include "launch/crash_bundle.hpp"

#include <fmt/format.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <ctime>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string_view>

#include "base/file.hpp"
#include "base/stack.hpp"
#include "launch/output.hpp"
#include "lockstep/clock.hpp"
#include "lockstep/version.hpp"

namespace lockstep {
namespace {

using nlohmann::json;

constexpr int64_t kTailBytes = 8192;

// Variables that decide how ranks run.
constexpr std::array<std::string_view, 9> kRecorded = {
    "LOCKSTEP_", "OMP_", "NCCL_", "GLOO_", "CUDA_", "SLURM_", "MASTER_", "TORCH", "OPENBLAS_"};

// Unless their names say that they are secrets.
constexpr std::array<std::string_view, 6> kSecret = {"TOKEN", "JWT",      "SECRET",
                                                     "KEY",   "PASSWORD", "CREDENTIAL"};

bool is_secret(std::string_view name) {
  return std::any_of(kSecret.begin(), kSecret.end(), [name](std::string_view word) {
    return name.find(word) != std::string_view::npos;
  });
}

std::string kernel() {
  utsname system{};
  if (::uname(&system) != 0) return "";
  return fmt::format("{} {} {}", system.sysname, system.release, system.machine);
}

json recorded_environment() {
  json variables = json::object();
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view text(*entry);
    const size_t equals = std::min(text.find('='), text.size());
    const std::string_view name = text.substr(0, equals);
    const bool recorded =
        std::any_of(kRecorded.begin(), kRecorded.end(),
                    [name](std::string_view prefix) { return name.starts_with(prefix); });
    if (!recorded || is_secret(name)) continue;
    variables[std::string(name)] = text.substr(std::min(equals + 1, text.size()));
  }
  return variables;
}

std::string tail_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  file.seekg(0, std::ios::end);
  const int64_t size = file.tellg();
  if (size <= 0) return "";
  file.seekg(std::max<int64_t>(0, size - kTailBytes));
  return {std::istreambuf_iterator<char>(file), {}};
}

double seconds_ago(int64_t then_ns, int64_t now_ns) {
  return std::round(static_cast<double>(now_ns - then_ns) * 1e-6) * 1e-3;
}

json collective_json(const CollectiveStatus& call, int64_t now_ns) {
  json entry = {{"sequence", call.sequence},
                {"operation", call.operation},
                {"bytes", call.bytes},
                {"started_seconds_ago", seconds_ago(call.started_ns, now_ns)}};
  if (call.bucket >= 0) entry["bucket"] = call.bucket;
  if (call.finished_ns != 0) {
    entry["milliseconds"] = static_cast<double>(call.finished_ns - call.started_ns) * 1e-6;
  } else {
    entry["finished"] = false;
  }
  return entry;
}

json end_json(const RankView& view) {
  if (!view.end) return {{"alive", true}, {"process_state", std::string(1, view.state)}};
  json end = {{"exit_code", view.end->exit_code()}, {"order", view.order}};
  if (view.end->signal() != 0) end["signal"] = view.end->signal();
  return end;
}

json rank_json(const CrashBundle& bundle, size_t local_rank, int64_t now_ns) {
  const RankView& view = bundle.ranks[local_rank];
  json rank = {{"rank", view.rank},
               {"pid", view.pid},
               {"end", end_json(view)},
               {"phase", phase_name(view.board.phase)},
               {"step", view.board.step}};
  if (!view.board.versions.empty()) rank["versions"] = view.board.versions;
  if (std::isfinite(view.board.loss)) rank["loss"] = view.board.loss;
  if (view.board.error) {
    rank["error"] = {{"code", code_name(view.board.error->code)},
                     {"message", view.board.error->message},
                     {"blamed_rank", view.board.error->blamed_rank}};
  }
  json& calls = rank["last_collectives"] = json::array();
  for (const auto& call : bundle.board.past_collectives(static_cast<int>(local_rank))) {
    calls.push_back(collective_json(call, now_ns));
  }
  const std::string& logs = bundle.environment.logs;
  rank["stack"] = functions_in_stack(tail_of(stack_file_of(logs, view.rank)));
  rank["output"] = tail_of(log_file(logs, view.rank, Stream::kOut));
  rank["errors"] = tail_of(log_file(logs, view.rank, Stream::kErr));
  return rank;
}

std::string utc_now() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  ::gmtime_r(&now, &parts);
  std::array<char, 32> text{};
  std::strftime(text.data(), text.size(), "%Y-%m-%dT%H:%M:%SZ", &parts);
  return text.data();
}

}  // namespace

std::string write_crash_bundle(const CrashBundle& bundle) {
  const JobLayout& layout = bundle.environment.layout;
  json text = {{"lockstep", kVersion},
               {"time", utc_now()},
               {"host", layout.hosts[static_cast<size_t>(layout.node_rank)]},
               {"kernel", kernel()},
               {"hosts", layout.hosts},
               {"world_size", layout.world_size()},
               {"attempt", layout.attempt},
               {"command", bundle.plan.command},
               {"failure", bundle.failure},
               {"environment", recorded_environment()}};
  json& plan = text["plan"] = json::object();
  for (const PlanFact& fact : bundle.plan.facts) {
    plan[fact.name] = {{"value", fact.value}, {"source", fact.source}};
  }
  json& ranks = text["ranks"] = json::array();
  const int64_t now_ns = monotonic_ns();
  for (size_t i = 0; i < bundle.ranks.size(); ++i) ranks.push_back(rank_json(bundle, i, now_ns));
  std::string path = bundle.environment.logs + "/crash.json";
  try {
    // Commands and logs are this user's own.
    write_file_atomically(path, text.dump(1, ' ', false, json::error_handler_t::replace) + "\n",
                          0600);
  } catch (const Error&) {
    path.clear();  // the disk is full, perhaps: the failure itself is what must be reported
  }
  return path;
}

}  // namespace lockstep
