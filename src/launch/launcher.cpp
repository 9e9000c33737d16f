#include "launch/launcher.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <memory>

#include "base/file.hpp"
#include "base/process.hpp"
#include "base/random.hpp"
#include "base/running_clock.hpp"
#include "launch/attempt.hpp"
#include "lockstep/clock.hpp"
#include "lockstep/error.hpp"
#include "net/secret.hpp"
#include "net/socket.hpp"

namespace lockstep {
namespace {

constexpr int64_t kLastFlushNs = 2'000'000'000;
constexpr size_t kSessionDigits = 32;

enum class Found { kNothing, kFolder, kNotExecutable, kExecutable };

Found look_at_path(const std::string& path) {
  struct stat info {};
  if (::stat(path.c_str(), &info) != 0) return Found::kNothing;
  if (S_ISDIR(info.st_mode)) return Found::kFolder;
  return ::access(path.c_str(), X_OK) == 0 ? Found::kExecutable : Found::kNotExecutable;
}

[[noreturn]] void fail_program(const std::string& message, const std::string& help) {
  throw Error(Code::kLaunch, message, help);
}

std::string check_path(const std::string& path) {
  switch (look_at_path(path)) {
    case Found::kNothing:
      fail_program(fmt::format("there is no program {}", path),
                   "check the path, or build it first");
    case Found::kFolder:
      fail_program(fmt::format("{} is a folder, not a program", path),
                   "name the program inside it");
    case Found::kNotExecutable:
      fail_program(fmt::format("{} may not be executed", path),
                   fmt::format("chmod +x {}, or name the program that reads it", path));
    case Found::kExecutable:
      break;
  }
  return path;
}

std::string search_folders(const std::string& name, const char* path_variable,
                           const std::vector<std::string>& more_folders) {
  if (auto path = find_in_path(name, path_variable); !path.empty()) return path;
  for (const auto& folder : more_folders) {
    const std::string path = folder + "/" + name;
    if (look_at_path(path) == Found::kExecutable) return path;
  }
  if (look_at_path("./" + name) == Found::kExecutable) {
    fail_program(fmt::format("there is no program {} in PATH", name),
                 fmt::format("to start the one in this folder write ./{}", name));
  }
  fail_program(fmt::format("there is no program {} in PATH", name),
               "write its path, such as ./train or build/train");
}

// The hosts of a job: one, or several after their rendezvous.
class Hosts {
 public:
  Hosts(const LaunchPlan& plan, Console& console) : plan_(plan), console_(console) {}

  // Waits for the first attempt that this host takes part in. False if the job finished without it.
  bool begin_first_attempt() {
    if (!plan_.nnodes.several()) {
      begin_attempt_on_one_host(0);
      return true;
    }
    token_ = load_or_make_token();
    port_ = std::make_unique<PortHold>(0, false);
    link_ = join();
    if (link_ == nullptr) return false;
    layout_ = link_->layout();
    return true;
  }

  const JobLayout& layout() const { return layout_; }
  const std::string& token() const { return token_; }
  NodeLink* link() const { return link_.get(); }

  // Agrees on a new session and port on all hosts.
  void begin_next_attempt() {
    if (link_ == nullptr) {
      begin_attempt_on_one_host(layout_.attempt + 1);
      return;
    }
    port_ = std::make_unique<PortHold>(0, false);
    link_->rejoin(port_->port(), deadline());
    layout_ = link_->layout();
  }

 private:
  // Without --node-rank the first launcher on the endpoint's host serves the rendezvous. A second
  // one there finds the port in use, and joins the first.
  std::unique_ptr<NodeLink> join() const {
    if (plan_.node_rank == 0) return join(true);
    if (plan_.node_rank > 0 || !is_this_host(plan_.endpoint_host)) return join(false);
    try {
      return join(true);
    } catch (const AddressInUse&) {
      return join(false);
    }
  }

  std::unique_ptr<NodeLink> join(bool serve) const {
    return NodeLink::join({.host = plan_.endpoint_host,
                           .port = plan_.endpoint_port,
                           .serve = serve,
                           .token = token_,
                           .job_id = plan_.job_id,
                           .nnodes = plan_.nnodes,
                           .max_restarts = plan_.max_restarts,
                           .heartbeat_ns = static_cast<int64_t>(plan_.heartbeat_s * 1e9),
                           .lost_after_ns = static_cast<int64_t>(plan_.host_timeout_s * 1e9),
                           .deadline_ns = deadline(),
                           .last_call_ns = static_cast<int64_t>(plan_.last_call_s * 1e9),
                           .on_wait =
                               [this](const std::string& line) {
                                 if (!plan_.quiet) console_.message("lockstep: " + line);
                               }},
                          {.node_rank = serve ? 0 : plan_.node_rank,
                           .local_world_size = plan_.local_world_size,
                           .host = host_name(),
                           .master_port = port_->port()});
  }

  void begin_attempt_on_one_host(int attempt) {
    port_.reset();  // the user's own port must be free before it is reserved again
    port_ = std::make_unique<PortHold>(plan_.master_port, plan_.master_port == 0);
    layout_ = {};
    layout_.local_world_sizes = {plan_.local_world_size};
    layout_.hosts = {host_name()};
    layout_.master_addr = plan_.master_addr;
    layout_.master_port = port_->port();
    layout_.attempt = attempt;
    layout_.session = random_hex(kSessionDigits);
  }

  int64_t deadline() const {
    return running_ns() + static_cast<int64_t>(plan_.join_timeout_s * 1e9);
  }

  const LaunchPlan& plan_;
  Console& console_;
  std::string token_;
  std::unique_ptr<PortHold> port_;
  std::unique_ptr<NodeLink> link_;
  JobLayout layout_;
};

AttemptResult run_attempt(const LaunchPlan& plan, const std::string& program, const Hosts& hosts,
                          const LogFolder& logs, const SignalWatch& signals, const ManyFiles& files,
                          Console& console) {
  const Board board =
      Board::create(Board::default_path(plan.run_name), plan.local_world_size, plan.run_name);
  const AttemptEnvironment environment{hosts.layout(), board.path(),
                                       logs.attempt_folder(hosts.layout().attempt), hosts.token()};
  Leftovers leftovers{{board.path()}, {}};
  if (!logs.kept()) leftovers.folders.push_back(logs.path());
  const SignalWatch::WhileRanksRun while_ranks_run(signals);
  return Attempt({.plan = plan,
                  .program = program,
                  .environment = environment,
                  .board = board,
                  .leftovers = leftovers,
                  .signals = signals,
                  .console = console,
                  .open_files = files.before(),
                  .link = hosts.link()})
      .run();
}

// "host 1 of 3, ranks 4 to 7 of 12".
std::string host_and_ranks(const JobLayout& layout, int local_world_size) {
  const int first = layout.first_rank();
  return fmt::format("host {} of {}, ranks {} to {} of {}", layout.node_rank, layout.hosts.size(),
                     first, first + local_world_size - 1, layout.world_size());
}

void announce(const LaunchPlan& plan, const Hosts& hosts, Console& console) {
  for (const auto& note : plan.notes) console.message("lockstep: " + note);
  if (plan.quiet) return;
  std::string line = start_line(plan);
  if (hosts.link() != nullptr) line += "; " + host_and_ranks(hosts.layout(), plan.local_world_size);
  console.message(line);
}

void announce_restart(const LaunchPlan& plan, const Hosts& hosts, Console& console) {
  if (plan.quiet || hosts.link() == nullptr) return;
  const JobLayout& layout = hosts.layout();
  console.message(fmt::format("lockstep: restart {} begins on {}; {}", layout.attempt,
                              fmt::join(layout.hosts, ", "),
                              host_and_ranks(layout, plan.local_world_size)));
}

// The job needed a further attempt, and there were not enough hosts for it.
void report_no_restart(const AttemptResult& failed, const Error& reason, Console& console) {
  auto notes = reason.notes();
  notes.insert(notes.begin(), "before: " + failed.line);
  console.message(
      Error(reason.code(), "no restart: " + reason.message(), reason.help(), notes).block());
  console.flush_until(monotonic_ns() + kLastFlushNs);
}

// What the launcher prints when the run is over.
void report(const AttemptResult& result, LogFolder& logs, Console& console) {
  if (result.failure) {
    logs.keep();
    console.message(result.failure->block());
  } else if (result.kind == AttemptResult::Kind::kPreempted) {
    console.message("lockstep: all ranks stopped as requested (exit code 75)");
  }
  console.flush_until(monotonic_ns() + kLastFlushNs);
}

}  // namespace

std::string find_program(const LaunchPlan& plan, const VariableLookup& lookup,
                         const std::vector<std::string>& more_folders) {
  if (!plan.script.empty() && ::access(plan.script.c_str(), R_OK) != 0) {
    fail_program(fmt::format("cannot read {}: {}", plan.script, std::strerror(errno)),
                 "check the path");
  }
  return find_program(plan.command[0], lookup, more_folders);
}

std::string find_program(const std::string& name, const VariableLookup& lookup,
                         const std::vector<std::string>& more_folders) {
  if (name.find('/') != std::string::npos) return check_path(name);
  return search_folders(name, lookup("PATH"), more_folders);
}

int launch(const LaunchPlan& plan, const std::string& program) {
  ::signal(SIGPIPE, SIG_IGN);  // a reader of our output that leaves must not end the training
  const ManyFiles files;       // two pipes for each rank, a connection for each host
  const SignalWatch signals(plan.signals);
  remove_stale_boards();
  Console console;
  Hosts hosts(plan, console);
  if (!hosts.begin_first_attempt()) {
    console.message("lockstep: the job has finished; this host was not needed");
    console.flush_until(monotonic_ns() + kLastFlushNs);
    return 0;
  }
  LogFolder logs(plan.log_folder, plan.keep_logs);
  announce(plan, hosts, console);
  for (;;) {
    const AttemptResult result = run_attempt(plan, program, hosts, logs, signals, files, console);
    const int attempt = hosts.layout().attempt;
    const bool failed = result.kind == AttemptResult::Kind::kFailed && attempt < plan.max_restarts;
    if (failed && result.restart == Restart::kSameAgain) {
      console.message("lockstep: no restart: the ranks would end the same way again");
    }
    if (!failed || result.restart != Restart::kMayHelp) {
      report(result, logs, console);
      return result.exit_code;
    }
    logs.keep();
    console.message(fmt::format("lockstep: {}; restart {} of {}; logs in {}", result.line,
                                attempt + 1, plan.max_restarts, logs.attempt_folder(attempt)));
    try {
      hosts.begin_next_attempt();
    } catch (const Error& error) {
      report_no_restart(result, error, console);
      return 1;
    }
    announce_restart(plan, hosts, console);
  }
}

std::string host_name() {
  std::array<char, 256> name{};
  if (::gethostname(name.data(), name.size() - 1) != 0) return "localhost";
  return name.data();
}

}  // namespace lockstep
