#include "launch/plan.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>

#include "base/backends.hpp"
#include "base/counted.hpp"
#include "base/lists.hpp"
#include "launch/plan_reader.hpp"
#include "launch/signals.hpp"
#include "lockstep/error.hpp"
#include "lockstep/table.hpp"
#include "lockstep/version.hpp"

namespace lockstep {
namespace {

// Processes of any kind. What a host really bears is found out when they start: open files,
// processes and memory have limits that name themselves; ranks of the backend shm are at most 250.
constexpr int kMostRanks = 4096;

// torchrun's stream numbers: "3" for every rank, or "0:1,1:2" by local rank. Returns [local rank].
std::vector<int> parse_stream_bits(const Setting& setting, int local_world_size) {
  const char* help = "write 0, 1 (output), 2 (errors) or 3 (both), or by local rank: 0:1,1:3";
  std::vector<int> bits(static_cast<size_t>(local_world_size), 0);
  const auto parse_bits = [&](std::string_view text) {
    const auto number = parse_whole_number(text);
    if (!number || *number < 0 || *number > 3) {
      PlanReader::fail(setting, fmt::format("has \"{}\" where 0, 1, 2 or 3 belongs", text), help);
    }
    return *number;
  };
  if (setting.text.find(':') == std::string::npos) {
    bits.assign(bits.size(), parse_bits(setting.text));
    return bits;
  }
  for (const std::string_view item : split_list(setting.text, ',')) {
    const size_t colon = item.find(':');
    const auto rank = parse_whole_number(item.substr(0, colon));
    if (colon == std::string_view::npos || !rank || *rank < 0 || *rank >= local_world_size) {
      PlanReader::fail(setting,
                       fmt::format("has \"{}\", which does not name a local rank from 0 to {}",
                                   item, local_world_size - 1),
                       help);
    }
    bits[static_cast<size_t>(*rank)] = parse_bits(item.substr(colon + 1));
  }
  return bits;
}

// "SIGTERM,USR1", without duplicates.
std::vector<int> parse_signals(const Setting& setting) {
  std::vector<int> signals;
  for (const std::string_view item : split_list(setting.text, ',')) {
    const auto& known = known_signals();
    const auto found = std::find_if(known.begin(), known.end(), [item](const SignalInfo& info) {
      return item == info.name || item == info.name.substr(3);
    });
    if (found == known.end()) {
      std::string names;
      for (const SignalInfo& info : known) names += fmt::format(" {}", info.name);
      PlanReader::fail(setting, fmt::format("has \"{}\", which lockstep cannot handle", item),
                       "write names with commas between them, of these:" + names);
    }
    if (std::find(signals.begin(), signals.end(), found->number) == signals.end()) {
      signals.push_back(found->number);
    }
  }
  return signals;
}

int count_ranks(PlanReader& reader, const LaunchFacts& facts) {
  const Setting* setting = reader.find("nproc-per-node");
  const int cores = static_cast<int>(facts.cores.size());
  if (setting != nullptr && setting->text == "cpu") {
    reader.add_fact("ranks on this host", fmt::format("{} (one per core)", cores), setting->source);
    return std::min(cores, kMostRanks);
  }
  if (setting != nullptr && (setting->text == "gpu" || setting->text == "auto")) {
    const int gpus = facts.count_gpus();
    if (gpus == 0 && setting->text == "gpu") {
      throw Error(Code::kDeviceMissing,
                  fmt::format("{} gpu: this machine has no GPU", setting->source),
                  "write a number, or cpu for one rank per core");
    }
    const int ranks = std::min(gpus > 0 ? gpus : cores, kMostRanks);
    reader.add_fact("ranks on this host",
                    fmt::format("{} (one per {})", ranks, gpus > 0 ? "GPU" : "core"),
                    setting->source);
    return ranks;
  }
  if (setting != nullptr && !parse_whole_number(setting->text)) {
    PlanReader::fail(*setting, "is neither a number nor auto, cpu or gpu", "write -n 4");
  }
  return reader.whole("nproc-per-node", "ranks on this host", 1, 1, kMostRanks);
}

void plan_cores(PlanReader& reader, const LaunchFacts& facts, LaunchPlan& plan) {
  plan.host_cores = facts.cores;
  const int ranks = plan.local_world_size;
  const int share = std::max(1, static_cast<int>(facts.cores.size()) / ranks);
  plan.threads = reader.whole("threads", "threads per rank", share, 1, 4096);
  const char* variable = facts.lookup("OMP_NUM_THREADS");
  const auto wanted = parse_whole_number(variable == nullptr ? "" : variable);
  if (!reader.is_on("threads") && wanted && *wanted > 0) {
    plan.threads = *wanted;
    plan.facts.back() = {"threads per rank", std::to_string(*wanted), "OMP_NUM_THREADS"};
  }
  plan.slots = plan_cpu_devices(
      ranks, {.cores = facts.cores, .gpus = 0, .threads_per_device = plan.threads});
  plan.pin = !reader.is_on("no-pin");
  if (!plan.pin) {
    for (auto& slot : plan.slots) slot.cores.clear();
  }
  std::string cores = plan.slots[0].physical();
  if (!plan.pin) cores = fmt::format("any of {}", format_number_list(facts.cores));
  for (size_t i = 1; i < plan.slots.size() && !plan.slots[i].cores.empty(); ++i) {
    cores += fmt::format(" | {}", format_number_list(plan.slots[i].cores));
  }
  reader.add_fact("cores", cores, plan.pin ? "default" : reader.find("no-pin")->source);
}

void plan_backend(PlanReader& reader, LaunchPlan& plan) {
  const std::string name = reader.text("backend", "backend", "auto");
  const Setting* setting = reader.find("backend");
  if (name == "auto") return;
  const BackendInfo* const backend = find_backend(name);
  if (backend == nullptr) {
    PlanReader::fail(*setting, "is not a backend", "write " + alternatives(launched_backends()));
  }
  if (backend->has_own_launcher()) {
    PlanReader::fail(*setting, "needs ranks that lockstep run cannot start",
                     fmt::format("use {} PROGRAM --backend {}, or {}, instead of lockstep run",
                                 backend->launchers[0], name, backend->launchers[1]));
  }
  if (backend->one_host && plan.nnodes.several()) {
    PlanReader::fail(*setting, "works on one host only",
                     "write " + alternatives(launched_backends(/*several_hosts=*/true)));
  }
  plan.backend = name;
}

void plan_console(PlanReader& reader, LaunchPlan& plan) {
  const std::string ranks = reader.text("ranks", "console", "0");
  if (ranks == "all") {
    plan.console.ranks.reset();
  } else {
    const Setting* setting = reader.find("ranks");
    plan.console.ranks = parse_number_list(ranks);
    if (!plan.console.ranks) {
      PlanReader::fail(*setting, "is neither all nor a list of ranks",
                       "write --ranks all or --ranks 0,3");
    }
    const int last = plan.console.ranks->back();
    if (!plan.nnodes.several() && setting != nullptr && last >= plan.local_world_size) {
      PlanReader::fail(*setting, fmt::format("names rank {}, which does not exist", last),
                       fmt::format("ranks are 0 to {}", plan.local_world_size - 1));
    }
  }
  if (const Setting* filter = reader.find("local-ranks-filter")) {
    plan.console.local_ranks = parse_number_list(filter->text);
    if (!plan.console.local_ranks) {
      PlanReader::fail(*filter, "is not a list of local ranks", "write 0,1");
    }
    reader.add_fact("console, local ranks", filter->text, filter->source);
  }
  if (const Setting* redirects = reader.find("redirects")) {
    plan.console.redirects = parse_stream_bits(*redirects, plan.local_world_size);
    reader.add_fact("to files only", redirects->text, redirects->source);
  }
  if (const Setting* tee = reader.find("tee")) {
    plan.console.tee = parse_stream_bits(*tee, plan.local_world_size);
    reader.add_fact("to the console also", tee->text, tee->source);
  }
}

void plan_signals(PlanReader& reader, LaunchPlan& plan) {
  const Setting* setting = reader.find("signals-to-handle");
  if (setting != nullptr) {
    plan.signals = parse_signals(*setting);
  } else {
    for (const SignalInfo& info : known_signals()) {
      if (info.by_default) plan.signals.push_back(info.number);
    }
  }
  std::string stops;
  std::string passed_on;
  for (const int signal : plan.signals) {
    const SignalInfo& info = signal_info(signal);
    std::string& list = info.stops ? stops : passed_on;
    list += (list.empty() ? "" : ",") + std::string(info.name);
  }
  const std::string source = setting == nullptr ? "default" : setting->source;
  reader.add_fact("signals that stop the ranks", stops.empty() ? "none" : stops, source);
  reader.add_fact("signals passed on to the ranks", passed_on.empty() ? "none" : passed_on, source);
}

void check_faults(const LaunchPlan& plan, const Setting& setting) {
  const bool one_host = !plan.nnodes.several();
  for (const Fault& fault : plan.faults) {
    if (one_host && fault.rank >= plan.local_world_size) {
      PlanReader::fail(setting, fmt::format("names rank {}", fault.rank),
                       fmt::format("there are ranks 0 to {}", plan.local_world_size - 1));
    }
    const bool between_ranks = fault.kind == FaultKind::kNan || fault.kind == FaultKind::kMismatch;
    if (between_ranks && one_host && plan.local_world_size == 1) {
      PlanReader::fail(setting, "needs gradients that ranks average",
                       "start two ranks or more: -n 2");
    }
    const BackendInfo* const backend = find_backend(plan.backend);
    const bool over_tcp = !one_host || (backend != nullptr && backend->over_tcp);
    if (fault.kind == FaultKind::kNetcut && !over_tcp) {
      PlanReader::fail(setting, "cuts connections that ranks of one host do not have",
                       "add --backend gloo, or use several hosts");
    }
  }
}

void plan_failures(PlanReader& reader, LaunchPlan& plan) {
  if (const Setting* timeout = reader.find("timeout")) {
    plan.timeout_s = reader.seconds("timeout", "longest wait for a rank", 0);
    if (*plan.timeout_s <= 0) PlanReader::fail(*timeout, "is not a positive time", "write 30");
  }
  if (const Setting* timeout = reader.find("step-timeout")) {
    plan.step_timeout_s = reader.seconds("step-timeout", "longest time without progress", 0);
    if (*plan.step_timeout_s < 1) PlanReader::fail(*timeout, "is less than 1 s", "write 600");
  }
  plan.grace_s = reader.seconds("grace", "from SIGTERM to SIGKILL", plan.grace_s);
  plan.grace_to_save_s =
      reader.seconds("grace", "the same, asked to stop by SIGTERM", plan.grace_to_save_s);
  plan.max_restarts = reader.whole("max-restarts", "restarts", 0, 0, 1'000'000);
  plan_signals(reader, plan);
  if (const Setting* faults = reader.find("inject")) {
    plan.faults = parse_faults(faults->text);
    check_faults(plan, *faults);
    reader.add_fact("faults provoked", format_faults(plan.faults), faults->source);
  }
}

bool is_python(const std::string& word) {
  return word.ends_with(".py");
}

void plan_command(PlanReader& reader, const std::vector<std::string>& program,
                  const LaunchFacts& facts, LaunchPlan& plan) {
  if (program.empty()) {
    throw Error(Code::kUsage, "lockstep run needs a program to start",
                "write it after the flags: lockstep run -n 4 ./train --steps 100");
  }
  const bool module = reader.is_on("module");
  if (module && reader.is_on("no-python")) {
    throw Error(Code::kUsage, "--module and --no-python contradict each other",
                "use one of them: a Python module needs python3");
  }
  if (module || (is_python(program[0]) && !reader.is_on("no-python"))) {
    const char* python = facts.lookup("PYTHON_EXEC");
    plan.command = {python == nullptr || *python == '\0' ? "python3" : python, "-u"};
    if (module) plan.command.emplace_back("-m");
    if (!module) plan.script = program[0];
  }
  plan.command.insert(plan.command.end(), program.begin(), program.end());
  std::string line;
  for (const auto& word : plan.command) line += (line.empty() ? "" : " ") + word;
  reader.add_fact("command", line, "command line");
}

// The board allows only letters, digits, '.', '_' and '-' in a run's name.
std::string make_run_name(const std::string& program, const std::string& random) {
  std::string name = std::filesystem::path(program).stem().string().substr(0, 40);
  for (char& c : name) {
    const bool plain = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
                       c == '.' || c == '_' || c == '-';
    if (!plain) c = '_';
  }
  return fmt::format("{}-{}", name.empty() ? "run" : name, random);
}

void plan_logs(PlanReader& reader, const LaunchFacts& facts, LaunchPlan& plan) {
  const Setting* folder = reader.find("log-dir");
  plan.keep_logs = folder != nullptr;
  plan.log_folder =
      folder != nullptr
          ? (std::filesystem::path(folder->text) / plan.run_name).string()
          : fmt::format("{}/lockstep-{}-{}", facts.temporary_folder, facts.user, plan.run_name);
  reader.add_fact("logs", plan.log_folder + (folder != nullptr ? "" : ", kept after a failure"),
                  folder != nullptr ? folder->source : "default");
}

// torchrun's flags that lockstep does not need are accepted with a note.
void note_flags_without_effect(const PlanReader& reader, LaunchPlan& plan) {
  if (const Setting* setting = reader.find("run-path")) {
    throw Error(Code::kUsage,
                fmt::format("{}: lockstep starts programs, it does not run scripts inside itself",
                            setting->source),
                "leave it out: a .py file is started with python3");
  }
  for (const FlagInfo& flag : run_flags()) {
    const Setting* setting = reader.find(flag.name);
    if (setting == nullptr || !flag.group.starts_with("Accepted")) continue;
    plan.notes.push_back(fmt::format("{} has no effect: {}", setting->source, flag.help));
  }
  for (const char* name :
       {"rdzv-endpoint", "rdzv-conf", "join-timeout", "last-call", "host-timeout", "heartbeat"}) {
    const Setting* setting = reader.find(name);
    if (setting == nullptr || plan.nnodes.several()) continue;
    plan.notes.push_back(fmt::format("{} has no effect: there is one host", setting->source));
  }
  const Setting* last_call = reader.find("last-call");
  if (last_call != nullptr && plan.nnodes.several() && !plan.nnodes.elastic()) {
    plan.notes.push_back(
        fmt::format("{} has no effect: the number of hosts is fixed", last_call->source));
  }
}

// "1 thread and 1 core each", "2 threads each, cores shared".
std::string share_of_each(const LaunchPlan& plan) {
  const std::string threads = counted(plan.threads, "thread");
  const auto& cores = plan.slots[0].cores;
  if (!cores.empty()) {
    return fmt::format("{} and {} each", threads, counted(cores.size(), "core"));
  }
  return fmt::format("{} each, {} {}", threads, counted(plan.host_cores.size(), "core"),
                     plan.pin ? "shared" : "not pinned");
}

bool contains(const std::vector<int>& list, int number) {
  return std::find(list.begin(), list.end(), number) != list.end();
}

bool has_stream_bit(const std::vector<int>& bits, int local_rank, Stream stream) {
  const auto index = static_cast<size_t>(local_rank);
  const int bit = stream == Stream::kOut ? 1 : 2;
  return index < bits.size() && (bits[index] & bit) != 0;
}

}  // namespace

LaunchPlan make_plan(const Settings& settings, const std::vector<std::string>& program,
                     const LaunchFacts& facts) {
  LaunchPlan plan;
  PlanReader reader(settings, plan);
  plan_command(reader, program, facts, plan);
  plan.run_name = make_run_name(program[0], facts.random);
  reader.add_fact("run", plan.run_name, "program's name");
  plan.local_world_size = count_ranks(reader, facts);
  plan_hosts(reader, plan);
  plan_cores(reader, facts, plan);
  plan_backend(reader, plan);
  plan.role = reader.text("role", "role", "default");
  plan_failures(reader, plan);
  plan_console(reader, plan);
  plan_logs(reader, facts, plan);
  plan.quiet = reader.is_on("quiet");
  plan.dry_run = reader.is_on("dry-run");
  note_flags_without_effect(reader, plan);
  return plan;
}

Shown decide_shown(const ConsolePlan& plan, int rank, int local_rank, Stream stream) {
  if (plan.local_ranks && !contains(*plan.local_ranks, local_rank)) return Shown::kHidden;
  if (has_stream_bit(plan.tee, local_rank, stream)) return Shown::kLive;
  if (has_stream_bit(plan.redirects, local_rank, stream)) return Shown::kHidden;
  if (plan.local_ranks || !plan.ranks || contains(*plan.ranks, rank)) return Shown::kLive;
  return stream == Stream::kErr ? Shown::kHeld : Shown::kHidden;
}

std::string describe_plan(const LaunchPlan& plan) {
  Table table("What lockstep run would do", {{"what"}, {"value"}, {"from"}});
  for (const auto& fact : plan.facts) table.add_row({fact.name, fact.value, fact.source});
  for (const auto& note : plan.notes) table.add_note(note);
  return table.terminal(false);
}

std::string start_line(const LaunchPlan& plan) {
  const std::string hosts =
      plan.nnodes.several() ? fmt::format(" on each of {} hosts", plan.nnodes.words()) : "";
  return fmt::format("lockstep {}: {}{}, {}, backend {}, {} {}", kVersion,
                     counted(plan.local_world_size, "rank"), hosts, share_of_each(plan),
                     plan.backend.empty() ? "auto" : plan.backend,
                     plan.keep_logs ? "logs in" : "logs after a failure in", plan.log_folder);
}

}  // namespace lockstep
