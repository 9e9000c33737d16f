// What bench/scale measures: ranks that only connect and agree, a store with thousands of clients,
// and a rendezvous of thousands of hosts. Each prints one line of JSON.
//
// usage: bench_scale rank CALLS             a rank of `lockstep run`: joins, then makes all-reduces
//        bench_scale rank CALLS RANKS       the same over TCP, as if each host had so many ranks
//        bench_scale store CLIENTS          server and clients are processes of their own
//        bench_scale hosts HOSTS            the same for the launchers' rendezvous
#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/file.hpp"
#include "base/lists.hpp"
#include "base/running_clock.hpp"
#include "comm/backend.hpp"
#include "launch/rendezvous_messages.hpp"
#include "lockstep/error.hpp"
#include "lockstep/rank_environment.hpp"
#include "lockstep/version.hpp"
#include "net/connection.hpp"
#include "net/store.hpp"

namespace {

using namespace lockstep;  // NOLINT: a program

constexpr const char* kToken = "the token of a benchmark";
constexpr const char* kLoopback = "127.0.0.1";
constexpr int kThreads = 16;  // that open connections at the same time

int64_t in_seconds(int64_t seconds) {
  return running_ns() + seconds * 1'000'000'000;
}

double seconds_since(int64_t begin_ns) {
  return static_cast<double>(running_ns() - begin_ns) * 1e-9;
}

// The most memory that a process has had, in MiB.
double peak_mib(pid_t pid) {
  std::ifstream status(fmt::format("/proc/{}/status", pid));
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("VmHWM:")) return std::stod(line.substr(6)) / 1024;
  }
  return 0;
}

// One rank's connections to all others; of rank 0, with the store through which they find each
// other.
struct Joined {
  std::unique_ptr<StoreServer> server;
  std::unique_ptr<Backend> backend;
};

Joined join(const RankEnvironment& environment, int ranks_of_host) {
  Joined joined;
  if (ranks_of_host == 0) {
    joined.backend = make_shm_backend({.session = environment.session,
                                       .rank = environment.rank,
                                       .size = environment.world_size,
                                       .deadline_ns = in_seconds(120)});
    return joined;
  }
  StoreAddress address;
  address.unix_name = "scale-" + environment.session;
  if (environment.rank == 0) joined.server = std::make_unique<StoreServer>(address);
  const int host = environment.rank / ranks_of_host;
  constexpr int kRanksOfAddress = 8;  // each has ports for only so many pairs of ranks
  joined.backend = make_two_level_backend(
      {.network = {.store = connect_store(address, in_seconds(120)),
                   .rank = environment.rank,
                   .size = environment.world_size,
                   .address = fmt::format("127.0.1.{}", environment.rank / kRanksOfAddress + 1),
                   .deadline_ns = in_seconds(120)},
       .host = fmt::format("host {}", host)});
  return joined;
}

// Joins the other ranks, and adds up their ranks again and again.
int rank(int calls, int ranks_of_host) {
  const RankEnvironment environment = RankEnvironment::from_env();
  const int64_t begin_ns = running_ns();
  const Joined joined = join(environment, ranks_of_host);
  Backend* const backend = joined.backend.get();
  const double rendezvous_s = seconds_since(begin_ns);
  const int64_t met_ns = running_ns();
  const auto size = static_cast<float>(environment.world_size);
  for (int call = 0; call < calls; ++call) {
    std::vector<float> values(1024, static_cast<float>(environment.rank));
    backend
        ->all_reduce({values.data(), 1024, Dtype::kF32}, ReduceOp::kSum, 1,
                     {in_seconds(120), "scale"})
        ->wait();
    if (values.back() == size * (size - 1) / 2) continue;
    throw Error(Code::kInternal, fmt::format("the sum of all ranks is {}", values.back()));
  }
  const double all_s = seconds_since(met_ns);
  backend->barrier({in_seconds(120), "scale"});
  if (environment.rank != 0) return 0;
  fmt::print("{{\"rendezvous_s\": {:.3f}, \"call_ms\": {:.3f}}}\n", rendezvous_s,
             all_s * 1e3 / std::max(1, calls));
  return 0;
}

// A server in a process of its own: its memory and its files are not the clients'.
class ServerProcess {
 public:
  explicit ServerProcess(const std::function<void(int port_pipe)>& serve) {
    std::array<int, 2> ends{};
    if (::pipe(ends.data()) != 0) throw Error(Code::kInternal, "no pipe");
    pid_ = ::fork();
    if (pid_ == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      ::close(ends[0]);
      serve(ends[1]);
      ::_exit(0);
    }
    ::close(ends[1]);
    if (::read(ends[0], &port_, sizeof port_) != ssize_t{sizeof port_}) {
      throw Error(Code::kInternal, "the server did not start");
    }
    ::close(ends[0]);
  }
  ~ServerProcess() {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
  ServerProcess(const ServerProcess&) = delete;
  ServerProcess& operator=(const ServerProcess&) = delete;

  int port() const { return port_; }
  pid_t pid() const { return pid_; }

 private:
  pid_t pid_ = -1;
  int port_ = 0;
};

void tell_port(int pipe, int port) {
  [[maybe_unused]] const ssize_t written = ::write(pipe, &port, sizeof port);
}

// Connects all clients, from several threads at once.
std::vector<Connection> connect_all(int clients, int port, size_t max_payload) {
  std::vector<std::vector<Connection>> parts(kThreads);
  std::vector<std::thread> threads;
  for (int thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&, thread] {
      for (int client = thread; client < clients; client += kThreads) {
        parts[static_cast<size_t>(thread)].push_back(
            Connection::open_tcp({kLoopback, port}, kToken, max_payload, in_seconds(120)));
      }
    });
  }
  for (auto& thread : threads) thread.join();
  std::vector<Connection> all;
  for (auto& part : parts) {
    for (auto& connection : part) all.push_back(std::move(connection));
  }
  return all;
}

std::string answer_of(Connection& connection) {
  auto answer = connection.receive(in_seconds(120));
  if (!answer) throw Error(Code::kInternal, "no answer within 120 s");
  return std::move(*answer);
}

void ask(Connection& connection, StoreVerb verb, const std::string& key,
         const std::string& value = "") {
  connection.post(encode(StoreRequest{.verb = verb, .key = key, .value = value}));
  connection.wait(Connection::Until::kWritten, in_seconds(120));
}

// Every client sets a value of its own, and waits for one that is set when all wait.
int store(int clients) {
  const ServerProcess server([](int pipe) {
    const StoreServer store({.unix_name = "", .host = kLoopback, .port = 0, .token = kToken});
    tell_port(pipe, store.port());
    ::pause();
  });
  int64_t begin_ns = running_ns();
  auto connections = connect_all(clients, server.port(), kMaxStorePayload);
  const double connect_s = seconds_since(begin_ns);
  begin_ns = running_ns();
  for (size_t i = 0; i < connections.size(); ++i) {
    ask(connections[i], StoreVerb::kSet, fmt::format("rank/{}", i), std::string(64, 'x'));
  }
  for (auto& connection : connections) answer_of(connection);
  const double set_s = seconds_since(begin_ns);
  begin_ns = running_ns();
  for (auto& connection : connections) ask(connection, StoreVerb::kGet, "all");
  auto last =
      Connection::open_tcp({kLoopback, server.port()}, kToken, kMaxStorePayload, in_seconds(120));
  ask(last, StoreVerb::kSet, "all", "here");
  answer_of(last);
  for (auto& connection : connections) answer_of(connection);
  const double get_s = seconds_since(begin_ns);
  fmt::print("{{\"connect_s\": {:.3f}, \"set_s\": {:.3f}, \"get_s\": {:.3f}, \"mib\": {:.1f}}}\n",
             connect_s, set_s, get_s, peak_mib(server.pid()));
  return 0;
}

// All launchers but node 0's say that they are here, and wait for the layout of the job.
int hosts(int count) {
  const auto options = [&](int port) {
    RendezvousOptions wanted;
    wanted.host = kLoopback;
    wanted.port = port;
    wanted.serve = true;
    wanted.token = kToken;
    wanted.nnodes = {count, count};
    wanted.deadline_ns = in_seconds(120);
    return wanted;
  };
  const ServerProcess server([&](int pipe) {
    const int port = bound_port(listen_tcp({kLoopback, 0}));
    tell_port(pipe, port);
    const auto link = NodeLink::join(options(port), {.node_rank = 0, .host = "host0"});
    ::pause();
  });
  const int64_t begin_ns = running_ns();
  auto connections = connect_all(count - 1, server.port(), kMaxNodeMessage);
  const RendezvousOptions theirs = options(server.port());
  for (size_t i = 0; i < connections.size(); ++i) {
    JoinMessage join{.version = kVersion,
                     .job_id = theirs.job_id,
                     .nnodes = theirs.nnodes,
                     .max_restarts = theirs.max_restarts,
                     .heartbeat_ns = theirs.heartbeat_ns,
                     .lost_after_ns = theirs.lost_after_ns,
                     .offer = {.host = fmt::format("host{}", i + 1)}};
    connections[i].post(encode(join));
    connections[i].wait(Connection::Until::kWritten, in_seconds(120));
  }
  for (auto& connection : connections) {
    while (!std::holds_alternative<LayoutMessage>(decode_node_message(answer_of(connection)))) {
    }
  }
  fmt::print("{{\"layout_s\": {:.3f}, \"mib\": {:.1f}}}\n", seconds_since(begin_ns),
             peak_mib(server.pid()));
  return 0;
}

int body(int argc, char** argv) {
  const std::string what = argc > 2 ? argv[1] : "";
  const auto count = parse_whole_number(argc > 2 ? argv[2] : "").value_or(0);
  const ManyFiles files;
  const auto ranks_of_host = parse_whole_number(argc > 3 ? argv[3] : "").value_or(0);
  if (what == "rank" && count > 0) return rank(count, ranks_of_host);
  if (what == "store" && count > 0) return store(count);
  if (what == "hosts" && count > 1) return hosts(count);
  throw Error(
      Code::kUsage, "nothing to measure",
      "bench_scale rank CALLS [RANKS], bench_scale store CLIENTS, or bench_scale hosts HOSTS");
}

}  // namespace

int main(int argc, char** argv) {
  return run_program(body, argc, argv);
}
