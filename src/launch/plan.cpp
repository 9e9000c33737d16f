#include "launch/plan.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>

#include "launch/number_list.hpp"
#include "launch/plan_values.hpp"
#include "launch/signal_watch.hpp"
#include "lockstep/error.hpp"

namespace lockstep {
namespace {

constexpr int kMostRanks = 256;  // logical devices a host can have
constexpr int kMostNodes = 4096;
constexpr int kStaticPort = 29500;  // torchrun's
constexpr int kMeetingPort = 29400;
constexpr int kShortestHostTimeout = 3;  // seconds

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

int count_nodes(PlanReader& reader) {
  const Setting* setting = reader.find("nnodes");
  if (setting == nullptr || reader.is_on("standalone")) {
    reader.add_fact("hosts", "1", reader.is_on("standalone") ? "--standalone" : "default");
    return 1;
  }
  const size_t colon = setting->text.find(':');
  const std::string least = setting->text.substr(0, colon);
  const std::string most = colon == std::string::npos ? least : setting->text.substr(colon + 1);
  if (least != most) {
    PlanReader::fail(*setting, "asks for a number of hosts that may change while the job runs",
                     fmt::format("lockstep's jobs keep their size: write --nnodes {}", most));
  }
  const auto number = parse_whole_number(least);
  if (!number || *number < 1 || *number > kMostNodes) {
    PlanReader::fail(*setting, fmt::format("is not a number of hosts from 1 to {}", kMostNodes),
                     "write --nnodes 2");
  }
  reader.add_fact("hosts", least, setting->source);
  return *number;
}

void plan_meeting(PlanReader& reader, LaunchPlan& plan) {
  const Setting* backend = reader.find("rdzv-backend");
  if (backend != nullptr && backend->text != "static" && backend->text != "c10d") {
    PlanReader::fail(*backend, "is not a meeting that lockstep knows",
                     "leave it out: the launchers meet at --rdzv-endpoint by themselves");
  }
  plan.job_id = reader.text("rdzv-id", "job", "none");
  const Setting* rank = reader.find("node-rank");
  if (plan.nnodes == 1) {
    if (rank != nullptr && rank->text != "0") {
      PlanReader::fail(*rank, "does not exist: there is one host", "say --nnodes as well");
    }
    plan.node_rank = 0;
    return;
  }
  plan.node_rank = reader.whole("node-rank", "this host's number", -1, 0, plan.nnodes - 1);
  if (plan.node_rank < 0) plan.facts.back().value = "by order of arrival";
  if (const Setting* conf = reader.find("rdzv-conf")) {
    plan.join_timeout_s = rendezvous_number(*conf, "join_timeout", plan.join_timeout_s);
  }
  plan.host_timeout_s = reader.seconds("host-timeout", "silence after which a host is lost", 10);
  if (plan.host_timeout_s < kShortestHostTimeout) {
    PlanReader::fail(*reader.find("host-timeout"),
                     fmt::format("is less than {} s", kShortestHostTimeout),
                     "hosts give a sign of life every second: write --host-timeout 10");
  }
  const Setting* endpoint = reader.find("rdzv-endpoint");
  const Setting* master = reader.find("master-addr");
  if (endpoint == nullptr && master == nullptr) {
    throw Error(Code::kUsage, fmt::format("{} hosts need a place to meet", plan.nnodes),
                "say --rdzv-endpoint HOST:29400 with host 0's name, the same on every host");
  }
  const Setting& place = endpoint != nullptr ? *endpoint : *master;
  MeetingPlace meeting =
      parse_meeting_place(place, endpoint != nullptr ? kMeetingPort : kStaticPort);
  if (endpoint == nullptr && reader.is_on("master-port")) {
    meeting.port = reader.whole("master-port", "port of the meeting", kStaticPort, 1, 65535);
  }
  plan.endpoint_host = meeting.host;
  plan.endpoint_port = meeting.port;
  reader.add_fact("meeting", fmt::format("{}:{}", meeting.host, meeting.port), place.source);
}

void plan_master(PlanReader& reader, LaunchPlan& plan) {
  if (plan.nnodes > 1) return;
  plan.master_addr = reader.text("master-addr", "MASTER_ADDR", "127.0.0.1");
  plan.master_port = reader.whole("master-port", "MASTER_PORT", 0, 1, 65535);
  if (plan.master_port == 0) plan.facts.back().value = "a free port";
}

void plan_cores(PlanReader& reader, const LaunchFacts& facts, LaunchPlan& plan) {
  plan.host_cores = facts.cores;
  const int ranks = plan.local_world_size;
  const int share = std::max(1, static_cast<int>(facts.cores.size()) / ranks);
  plan.threads = reader.whole("threads", "threads per rank", share, 1, 4096);
  const char* variable = facts.lookup("OMP_NUM_THREADS");
  const auto wished = parse_whole_number(variable == nullptr ? "" : variable);
  if (!reader.is_on("threads") && wished && *wished > 0) {
    plan.threads = *wished;
    plan.facts.back() = {"threads per rank", std::to_string(*wished), "OMP_NUM_THREADS"};
  }
  plan.slots = plan_devices(fmt::format("cpu:{}", ranks),
                            {.cores = facts.cores, .gpus = 0, .threads_per_device = plan.threads});
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
  const bool on_host = name == "auto" || name == "self" || name == "shm" || name == "gloo";
  if (!on_host && name != "nccl" && name != "ipc") {
    PlanReader::fail(*setting, "is not a backend", "write auto, shm, gloo, nccl or ipc");
  }
  if ((name == "shm" || name == "ipc") && plan.nnodes > 1) {
    PlanReader::fail(*setting, "serves one host only", "write auto, gloo or nccl");
  }
  if (name != "auto") plan.backend = name;
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
    if (plan.nnodes == 1 && setting != nullptr && last >= plan.local_world_size) {
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

void plan_failures(PlanReader& reader, LaunchPlan& plan) {
  if (const Setting* timeout = reader.find("timeout")) {
    plan.timeout_s = reader.seconds("timeout", "longest wait for a rank", 0);
    if (*plan.timeout_s <= 0) PlanReader::fail(*timeout, "is no time at all", "write 30");
  }
  plan.grace_s = reader.seconds("grace", "from SIGTERM to SIGKILL", 5);
  plan.max_restarts = reader.whole("max-restarts", "restarts", 0, 0, 1'000'000);
  plan_signals(reader, plan);
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

// Letters, digits, '.', '_' and '-' of the program's name; the board allows no others.
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

// What torchrun has and lockstep does not need is taken with a note.
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
  for (const char* name : {"rdzv-endpoint", "rdzv-conf", "host-timeout"}) {
    const Setting* setting = reader.find(name);
    if (setting == nullptr || plan.nnodes > 1) continue;
    plan.notes.push_back(fmt::format("{} has no effect: there is one host", setting->source));
  }
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
  plan.nnodes = count_nodes(reader);
  plan_meeting(reader, plan);
  plan_master(reader, plan);
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

}  // namespace lockstep
