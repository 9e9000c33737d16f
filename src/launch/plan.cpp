#include "launch/plan.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>

#include "launch/signals.hpp"
#include "lockstep/error.hpp"
#include "lockstep/rank_environment.hpp"
#include "lockstep/table.hpp"
#include "lockstep/version.hpp"
#include "net/socket.hpp"

namespace lockstep {
namespace {

constexpr int kMostRanks = 256;  // the most logical devices of a host
constexpr int kMostNodes = 4096;
constexpr int kStaticPort = 29500;  // torchrun's
constexpr int kRendezvousPort = 29400;
constexpr int kShortestHostTimeout = 3;  // seconds
constexpr double kLongestSeconds = 1e7;

std::vector<std::string_view> split_list(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(separator, begin), text.size());
    parts.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

// Reads settings one by one, and records each value as a fact of the plan. Every error names the
// flag or variable, its text and the remedy.
class PlanReader {
 public:
  PlanReader(const Settings& settings, LaunchPlan& plan) : settings_(settings), plan_(plan) {}

  const Setting* find(std::string_view name) const;  // nullptr if not set
  bool is_on(std::string_view name) const { return find(name) != nullptr; }

  int whole(std::string_view name, std::string_view fact, int fallback, int first, int last);
  double seconds(std::string_view name, std::string_view fact, double fallback);
  std::string text(std::string_view name, std::string_view fact, const std::string& fallback);

  void add_fact(std::string_view fact, std::string value, std::string source);

  [[noreturn]] static void fail(const Setting& setting, const std::string& reason,
                                const std::string& help);

 private:
  const Settings& settings_;
  LaunchPlan& plan_;
};

const Setting* PlanReader::find(std::string_view name) const {
  const auto found = settings_.find(name);
  return found == settings_.end() ? nullptr : &found->second;
}

void PlanReader::fail(const Setting& setting, const std::string& reason, const std::string& help) {
  throw Error(Code::kUsage, fmt::format("{} \"{}\" {}", setting.source, setting.text, reason),
              help);
}

void PlanReader::add_fact(std::string_view fact, std::string value, std::string source) {
  plan_.facts.push_back({std::string(fact), std::move(value), std::move(source)});
}

int PlanReader::whole(std::string_view name, std::string_view fact, int fallback, int first,
                      int last) {
  const Setting* setting = find(name);
  int value = fallback;
  if (setting != nullptr) {
    const auto number = parse_whole_number(setting->text);
    if (!number || *number < first || *number > last) {
      fail(*setting, fmt::format("is not a whole number from {} to {}", first, last),
           "`lockstep run --help` lists the flags");
    }
    value = *number;
  }
  add_fact(fact, std::to_string(value), setting == nullptr ? "default" : setting->source);
  return value;
}

double PlanReader::seconds(std::string_view name, std::string_view fact, double fallback) {
  const Setting* setting = find(name);
  double value = fallback;
  if (setting != nullptr) {
    const auto number = parse_finite_number(setting->text);
    if (!number || *number < 0 || *number > kLongestSeconds) {
      fail(*setting, fmt::format("is not a number of seconds from 0 to {:.0f}", kLongestSeconds),
           "write seconds, such as 2.5");
    }
    value = *number;
  }
  add_fact(fact, fmt::format("{} s", value), setting == nullptr ? "default" : setting->source);
  return value;
}

std::string PlanReader::text(std::string_view name, std::string_view fact,
                             const std::string& fallback) {
  const Setting* setting = find(name);
  if (setting != nullptr && setting->text.empty()) fail(*setting, "is empty", "give it a value");
  const std::string value = setting == nullptr ? fallback : setting->text;
  add_fact(fact, value, setting == nullptr ? "default" : setting->source);
  return value;
}

// "host", "host:29400", "[::1]:29400", "::1".
Endpoint parse_rendezvous_endpoint(const Setting& setting, int default_port) {
  const std::string& text = setting.text;
  const char* help = "write HOST:PORT, such as node0:29400";
  Endpoint endpoint{text, default_port};
  std::string port;
  if (text.starts_with('[')) {
    const size_t close = text.find(']');
    if (close == std::string::npos) PlanReader::fail(setting, "has no ]", help);
    endpoint.host = text.substr(1, close - 1);
    const std::string rest = text.substr(close + 1);
    if (!rest.empty() && rest[0] != ':') PlanReader::fail(setting, "is not HOST:PORT", help);
    if (!rest.empty()) port = rest.substr(1);
  } else if (const size_t colon = text.find(':');
             colon != std::string::npos && text.rfind(':') == colon) {
    endpoint.host = text.substr(0, colon);
    port = text.substr(colon + 1);
    if (port.empty()) PlanReader::fail(setting, "ends where a port should be", help);
  }
  if (endpoint.host.empty()) PlanReader::fail(setting, "names no host", help);
  if (port.empty()) return endpoint;
  const auto number = parse_whole_number(port);
  if (!number || *number < 1 || *number > 65535) {
    PlanReader::fail(setting, fmt::format("has no port from 1 to 65535: \"{}\"", port), help);
  }
  endpoint.port = *number;
  return endpoint;
}

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

// The number of `key` in "a=1,b=2"; `fallback` if it is not there.
double rendezvous_number(const Setting& conf, std::string_view key, double fallback) {
  for (const std::string_view item : split_list(conf.text, ',')) {
    const size_t equals = item.find('=');
    if (equals == std::string_view::npos) {
      PlanReader::fail(conf, fmt::format("has \"{}\" where KEY=VALUE belongs", item),
                       "write join_timeout=300");
    }
    if (item.substr(0, equals) != key) continue;
    const auto number = parse_finite_number(item.substr(equals + 1));
    if (!number || *number <= 0 || *number > kLongestSeconds) {
      PlanReader::fail(conf, fmt::format("has no number of seconds for {}", key),
                       fmt::format("write {}=300", key));
    }
    return *number;
  }
  return fallback;
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

void plan_rendezvous(PlanReader& reader, LaunchPlan& plan) {
  const Setting* backend = reader.find("rdzv-backend");
  if (backend != nullptr && backend->text != "static" && backend->text != "c10d") {
    PlanReader::fail(*backend, "is not a rendezvous that lockstep knows",
                     "leave it out: the launchers meet at --rdzv-endpoint anyway");
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
                     "hosts send a heartbeat every second: write --host-timeout 10");
  }
  const Setting* endpoint = reader.find("rdzv-endpoint");
  const Setting* master = reader.find("master-addr");
  if (endpoint == nullptr && master == nullptr) {
    throw Error(Code::kUsage, fmt::format("{} hosts need a rendezvous endpoint", plan.nnodes),
                "say --rdzv-endpoint HOST:29400 with host 0's name, the same on every host");
  }
  const Setting& chosen = endpoint != nullptr ? *endpoint : *master;
  Endpoint address =
      parse_rendezvous_endpoint(chosen, endpoint != nullptr ? kRendezvousPort : kStaticPort);
  if (endpoint == nullptr && reader.is_on("master-port")) {
    address.port = reader.whole("master-port", "port of the rendezvous", kStaticPort, 1, 65535);
  }
  plan.endpoint_host = address.host;
  plan.endpoint_port = address.port;
  reader.add_fact("rendezvous", fmt::format("{}:{}", address.host, address.port), chosen.source);
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
  const auto wanted = parse_whole_number(variable == nullptr ? "" : variable);
  if (!reader.is_on("threads") && wanted && *wanted > 0) {
    plan.threads = *wanted;
    plan.facts.back() = {"threads per rank", std::to_string(*wanted), "OMP_NUM_THREADS"};
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
  if (std::find(kBackendNames.begin(), kBackendNames.end(), name) == kBackendNames.end()) {
    PlanReader::fail(*setting, "is not a backend", "write auto, shm, gloo, nccl or ipc");
  }
  if ((name == "shm" || name == "ipc") && plan.nnodes > 1) {
    PlanReader::fail(*setting, "works on one host only", "write auto, gloo or nccl");
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

void check_faults(const LaunchPlan& plan, const Setting& setting) {
  const int hosts = plan.nnodes;
  for (const Fault& fault : plan.faults) {
    if (hosts == 1 && fault.rank >= plan.local_world_size) {
      PlanReader::fail(setting, fmt::format("names rank {}", fault.rank),
                       fmt::format("there are ranks 0 to {}", plan.local_world_size - 1));
    }
    const bool between_ranks = fault.kind == FaultKind::kNan || fault.kind == FaultKind::kMismatch;
    if (between_ranks && hosts == 1 && plan.local_world_size == 1) {
      PlanReader::fail(setting, "needs gradients that ranks average",
                       "start two ranks or more: -n 2");
    }
    if (fault.kind == FaultKind::kNetcut && hosts == 1 && plan.backend != "gloo") {
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
  plan.grace_s = reader.seconds("grace", "from SIGTERM to SIGKILL", 5);
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
  for (const char* name : {"rdzv-endpoint", "rdzv-conf", "host-timeout"}) {
    const Setting* setting = reader.find(name);
    if (setting == nullptr || plan.nnodes > 1) continue;
    plan.notes.push_back(fmt::format("{} has no effect: there is one host", setting->source));
  }
}

std::string plural(int count, const char* noun) {
  return fmt::format("{} {}{}", count, noun, count == 1 ? "" : "s");
}

// "1 thread and 1 core each", "2 threads each, cores shared".
std::string share_of_each(const LaunchPlan& plan) {
  const std::string threads = plural(plan.threads, "thread");
  const auto& cores = plan.slots[0].cores;
  if (!cores.empty()) {
    return fmt::format("{} and {} each", threads, plural(static_cast<int>(cores.size()), "core"));
  }
  return fmt::format("{} each, {} {}", threads,
                     plural(static_cast<int>(plan.host_cores.size()), "core"),
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
  plan.nnodes = count_nodes(reader);
  plan_rendezvous(reader, plan);
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
      plan.nnodes == 1 ? "" : fmt::format(" on each of {} hosts", plan.nnodes);
  return fmt::format("lockstep {}: {}{}, {}, backend {}, {} {}", kVersion,
                     plural(plan.local_world_size, "rank"), hosts, share_of_each(plan),
                     plan.backend.empty() ? "auto" : plan.backend,
                     plan.keep_logs ? "logs in" : "logs after a failure in", plan.log_folder);
}

}  // namespace lockstep
