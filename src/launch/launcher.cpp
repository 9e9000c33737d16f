#include "launch/launcher.hpp"

#include <fmt/format.h>
#include <netdb.h>
#include <signal.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <memory>
#include <optional>

#include "base/descriptor.hpp"
#include "base/running_clock.hpp"
#include "launch/console.hpp"
#include "launch/log_folder.hpp"
#include "launch/port_hold.hpp"
#include "launch/rendezvous.hpp"
#include "launch/round.hpp"
#include "launch/signal_watch.hpp"
#include "launch/token.hpp"
#include "lockstep/clock.hpp"
#include "lockstep/error.hpp"
#include "net/socket.hpp"

namespace lockstep {
namespace {

constexpr int64_t kLastFlushNs = 2'000'000'000;
constexpr int kSessionDigits = 32;

// Only a host's own address can be bound.
bool is_this_host(const std::string& name) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* found = nullptr;
  if (::getaddrinfo(name.c_str(), nullptr, &hints, &found) != 0) return false;
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owner(found, &::freeaddrinfo);
  for (const addrinfo* entry = found; entry != nullptr; entry = entry->ai_next) {
    const Descriptor socket(::socket(entry->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    if (::bind(socket.get(), entry->ai_addr, entry->ai_addrlen) == 0) return true;
  }
  return false;
}

/// The hosts of a job: one, or several that have met.
class Hosts {
 public:
  explicit Hosts(const LaunchPlan& plan) : plan_(plan) {
    if (plan.nnodes == 1) {
      begin_round_on_one_host();
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

  /// A new session and port, on all hosts.
  void begin_next_round() {
    if (link_ == nullptr) {
      begin_round_on_one_host();
      return;
    }
    port_ = std::make_unique<PortHold>(0, false);
    link_->rejoin(port_->port(), deadline());
    layout_ = link_->layout();
  }

 private:
  // Without --node-rank the first launcher on the endpoint's host serves the rendezvous. A second
  // one there finds the port taken, and joins the first.
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

  void begin_round_on_one_host() {
    port_.reset();  // the user's own port must be free before it is held again
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

RoundResult run_round(const LaunchPlan& plan, const std::string& program, const Hosts& hosts,
                      const LogFolder& logs, const SignalWatch& signals, Console& console,
                      int round) {
  const Board board =
      Board::create(Board::default_path(plan.run_name), plan.local_world_size, plan.run_name);
  const RoundEnvironment environment{hosts.layout(), round, board.path(), logs.round_folder(round),
                                     hosts.token()};
  Leftovers leftovers{{board.path()}, {}};
  if (!logs.kept()) leftovers.folders.push_back(logs.path());
  const SignalWatch::WhileRanksRun while_ranks_run(signals);
  return Round({.plan = plan,
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

// The last words of a run that is over.
void report(const RoundResult& result, LogFolder& logs, Console& console) {
  if (result.failure) {
    logs.keep();
    console.message(result.failure->block());
  } else if (result.kind == RoundResult::Kind::kPreempted) {
    console.message("lockstep: all ranks stopped as they were asked to (exit code 75)");
  }
  console.flush_until(monotonic_ns() + kLastFlushNs);
}

}  // namespace

int launch(const LaunchPlan& plan, const std::string& program) {
  ::signal(SIGPIPE, SIG_IGN);  // a reader of our output that goes away must not end the training
  const SignalWatch signals(plan.signals);
  remove_stale_boards();
  Console console;
  Hosts hosts(plan);
  LogFolder logs(plan.log_folder, plan.keep_logs);
  announce(plan, hosts, console);
  for (int round = 0;; ++round) {
    const RoundResult result = run_round(plan, program, hosts, logs, signals, console, round);
    const bool again = result.kind == RoundResult::Kind::kFailed && !result.host_lost &&
                       !result.permanent && round < plan.max_restarts;
    if (!again) {
      if (result.permanent && round < plan.max_restarts) {
        console.message("lockstep: no restart: the ranks would end the same way again");
      }
      report(result, logs, console);
      return result.exit_code;
    }
    logs.keep();
    console.message(
        fmt::format("lockstep: {}; restart {} of {}", result.line, round + 1, plan.max_restarts));
    hosts.begin_next_round();
  }
}

std::string random_hex(int digits) {
  std::array<unsigned char, 32> bytes{};
  if (::getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size())) {
    throw Error(Code::kInternal, "the system gives no random numbers");
  }
  std::string text;
  for (const unsigned char byte : bytes) text += fmt::format("{:02x}", byte);
  return text.substr(0, static_cast<size_t>(digits));
}

std::string host_name() {
  std::array<char, 256> name{};
  if (::gethostname(name.data(), name.size() - 1) != 0) return "localhost";
  return name.data();
}

}  // namespace lockstep
