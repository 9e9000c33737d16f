#include "launch/launcher.hpp"

#include <fmt/format.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <memory>
#include <string_view>

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

std::string search_path(const std::string& name, std::string_view path_variable,
                        const std::vector<std::string>& more_folders) {
  for (size_t begin = 0; begin <= path_variable.size();) {
    const size_t end = std::min(path_variable.find(':', begin), path_variable.size());
    const std::string folder(path_variable.substr(begin, end - begin));
    const std::string path = (folder.empty() ? "." : folder) + "/" + name;
    if (look_at_path(path) == Found::kExecutable) return path;
    begin = end + 1;
  }
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
  explicit Hosts(const LaunchPlan& plan) : plan_(plan) {
    if (plan.nnodes == 1) {
      begin_attempt_on_one_host();
      return;
    }
    token_ = load_or_make_token();
    port_ = std::make_unique<PortHold>(0, false);
    link_ = join();
    layout_ = link_->layout();
  }

  const JobLayout& layout() const { return layout_; }
  const std::string& token() const { return token_; }
  NodeLink* link() const { return link_.get(); }

  // Agrees on a new session and port on all hosts.
  void begin_next_attempt() {
    if (link_ == nullptr) {
      begin_attempt_on_one_host();
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
                           .deadline_ns = deadline(),
                           .lost_after_ns = static_cast<int64_t>(plan_.host_timeout_s * 1e9)},
                          {.node_rank = serve ? 0 : plan_.node_rank,
                           .local_world_size = plan_.local_world_size,
                           .host = host_name(),
                           .master_port = port_->port()});
  }

  void begin_attempt_on_one_host() {
    port_.reset();  // the user's own port must be free before it is reserved again
    port_ = std::make_unique<PortHold>(plan_.master_port, plan_.master_port == 0);
    layout_ = {};
    layout_.local_world_sizes = {plan_.local_world_size};
    layout_.hosts = {host_name()};
    layout_.master_addr = plan_.master_addr;
    layout_.master_port = port_->port();
    layout_.session = random_hex(kSessionDigits);
  }

  int64_t deadline() const {
    return running_ns() + static_cast<int64_t>(plan_.join_timeout_s * 1e9);
  }

  const LaunchPlan& plan_;
  std::string token_;
  std::unique_ptr<PortHold> port_;
  std::unique_ptr<NodeLink> link_;
  JobLayout layout_;
};

AttemptResult run_attempt(const LaunchPlan& plan, const std::string& program, const Hosts& hosts,
                          const LogFolder& logs, const SignalWatch& signals, Console& console,
                          int attempt) {
  const Board board =
      Board::create(Board::default_path(plan.run_name), plan.local_world_size, plan.run_name);
  const AttemptEnvironment environment{hosts.layout(), attempt, board.path(),
                                       logs.attempt_folder(attempt), hosts.token()};
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
                  .link = hosts.link()})
      .run();
}

void announce(const LaunchPlan& plan, const Hosts& hosts, Console& console) {
  for (const auto& note : plan.notes) console.message("lockstep: " + note);
  if (plan.quiet) return;
  std::string line = start_line(plan);
  if (hosts.link() != nullptr) {
    line += fmt::format("; host {} of {}, ranks {} to {} of {}", hosts.layout().node_rank,
                        plan.nnodes, hosts.layout().first_rank(),
                        hosts.layout().first_rank() + plan.local_world_size - 1,
                        hosts.layout().world_size());
  }
  console.message(line);
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
  const char* path_variable = lookup("PATH");
  return search_path(name,
                     path_variable == nullptr ? "/usr/local/bin:/usr/bin:/bin" : path_variable,
                     more_folders);
}

int launch(const LaunchPlan& plan, const std::string& program) {
  ::signal(SIGPIPE, SIG_IGN);  // a reader of our output that leaves must not end the training
  const SignalWatch signals(plan.signals);
  remove_stale_boards();
  Console console;
  Hosts hosts(plan);
  LogFolder logs(plan.log_folder, plan.keep_logs);
  announce(plan, hosts, console);
  for (int attempt = 0;; ++attempt) {
    const AttemptResult result = run_attempt(plan, program, hosts, logs, signals, console, attempt);
    const bool again = result.kind == AttemptResult::Kind::kFailed && !result.host_lost &&
                       !result.permanent && attempt < plan.max_restarts;
    if (!again) {
      if (result.permanent && attempt < plan.max_restarts) {
        console.message("lockstep: no restart: the ranks would end the same way again");
      }
      report(result, logs, console);
      return result.exit_code;
    }
    logs.keep();
    console.message(
        fmt::format("lockstep: {}; restart {} of {}", result.line, attempt + 1, plan.max_restarts));
    hosts.begin_next_attempt();
  }
}

std::string host_name() {
  std::array<char, 256> name{};
  if (::gethostname(name.data(), name.size() - 1) != 0) return "localhost";
  return name.data();
}

}  // namespace lockstep
