// A program for the tests of `lockstep run`: does what its arguments say, in order. "ACTION:VALUE"
// is for every rank, "2:ACTION:VALUE" for rank 2 alone.

#include <fmt/format.h>
#include <sched.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "base/running_clock.hpp"
#include "comm/backend.hpp"
#include "lockstep/clock.hpp"
#include "lockstep/detail/board.hpp"
#include "lockstep/error.hpp"
#include "lockstep/rank_environment.hpp"
#include "net/store.hpp"

namespace lockstep {
namespace {

using Action = void (*)(const std::string& value);

const RankEnvironment& environment() {
  static const RankEnvironment environment = RankEnvironment::from_env();
  return environment;
}

BoardPage page() {
  return BoardPage::attach(environment().board, environment().local_rank);
}

volatile sig_atomic_t caught = 0;  // the last signal

// A process that nobody here waits for: in a session of its own, deaf to polite signals.
void start_daemon(const std::string& list) {
  if (::fork() != 0) return;
  ::setsid();
  if (::fork() != 0) ::_exit(0);
  for (const int signal : {SIGTERM, SIGINT, SIGHUP}) ::signal(signal, SIG_IGN);
  std::ofstream(list, std::ios::app) << ::getpid() << std::endl;
  ::sleep(600);
  ::_exit(0);
}

// One child in this process's group, and one that has left it.
void start_descendants(const std::string& list) {
  start_daemon(list);
  if (::fork() == 0) {
    ::signal(SIGTERM, SIG_IGN);
    std::ofstream(list, std::ios::app) << ::getpid() << std::endl;
    ::sleep(600);
    ::_exit(0);
  }
  // Both have written their number before this rank goes on.
  for (int lines = 0; lines < 2;) {
    std::ifstream file(list);
    std::string line;
    for (lines = 0; std::getline(file, line);) ++lines;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

void print_environment(const std::string& name) {
  const char* value = std::getenv(name.c_str());
  fmt::print("{}={}\n", name, value == nullptr ? "(unset)" : value);
}

void print_cores(const std::string&) {
  cpu_set_t allowed;
  ::sched_getaffinity(0, sizeof(allowed), &allowed);
  std::string list;
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(static_cast<size_t>(core), &allowed)) list += fmt::format(" {}", core);
  }
  fmt::print("cores{}\n", list);
}

int64_t deadline() {
  return running_ns() + static_cast<int64_t>(environment().timeout_s.value_or(20) * 1e9);
}

// Connects the ranks over the backend that the launcher was given.
std::unique_ptr<Backend> connect_ranks() {
  if (environment().backend != "gloo") {
    return make_shm_backend({.session = environment().session,
                             .rank = environment().rank,
                             .size = environment().world_size,
                             .deadline_ns = deadline()});
  }
  StoreAddress address;
  address.unix_name = "worker-" + environment().session;
  static std::optional<StoreServer> server;
  if (environment().rank == 0) server.emplace(address);
  try {
    return make_network_backend("gloo", {.store = connect_store(address, deadline()),
                                         .rank = environment().rank,
                                         .size = environment().world_size,
                                         .address = "127.0.0.1",
                                         .deadline_ns = deadline()});
  } catch (const RankError&) {
    throw;
  } catch (const Error& error) {  // whoever loses the store is rank 0's victim
    throw RankError(error.code(), 0, error.message(), error.help());
  }
}

// As a World does.
std::unique_ptr<Backend> rendezvous() {
  BoardPage board = page();
  board.start("launch_worker");
  board.begin_collective(kRendezvousSequence, kRendezvousName, 0);
  auto backend = connect_ranks();
  board.finish_collective(kRendezvousSequence);
  return backend;
}

std::unique_ptr<Backend> comm;  // from "rendezvous" to the end of the body

// Too large to be on its way before the other side comes.
std::vector<float>& much() {
  static std::vector<float> values(4 << 20, 1.0F);
  return values;
}

Buffer all_of(std::vector<float>& values) {
  return {values.data(), static_cast<int64_t>(values.size()), Dtype::kF32};
}

ConstBuffer read_all_of(const std::vector<float>& values) {
  return {values.data(), static_cast<int64_t>(values.size()), Dtype::kF32};
}

// All-reduces without end, as training does.
void reduce_forever(const std::string& list) {
  const auto backend = rendezvous();
  BoardPage board = page();
  std::vector<float> values(1 << 16, 1.0F);
  std::ofstream(list, std::ios::app) << ::getpid() << std::endl;
  for (int64_t step = 1;; ++step) {
    board.set_step(step);
    board.begin_collective(step, "all_reduce", static_cast<int64_t>(values.size()) * 4);
    backend->all_reduce(all_of(values), ReduceOp::kMax, 1, {deadline(), "test"})->wait();
    board.finish_collective(step);
  }
}

const std::map<std::string, Action>& actions() {
  static const std::map<std::string, Action> table = {
      {"print", [](const std::string& text) { fmt::print("{}\n", text); }},
      {"partial", [](const std::string& text) { fmt::print("{}", text); }},
      {"warn", [](const std::string& text) { fmt::print(stderr, "{}\n", text); }},
      {"long", [](const std::string& n) { fmt::print("{}\n", std::string(std::stoul(n), 'x')); }},
      {"lines",
       [](const std::string& n) {
         for (int i = 0; i < std::stoi(n); ++i)
           fmt::print("line {} of rank {}\n", i, environment().rank);
       }},
      {"env", print_environment},
      {"cores", print_cores},
      {"pid", [](const std::string& f) { std::ofstream(f, std::ios::app) << ::getpid() << '\n'; }},
      {"echo",
       [](const std::string&) {
         for (int c = std::getchar(); c != EOF; c = std::getchar()) std::putchar(c);
       }},
      {"exit",
       [](const std::string& code) {
         std::fflush(nullptr);
         ::_exit(std::stoi(code));
       }},
      {"exit-first-attempt",
       [](const std::string& code) {
         if (environment().restart_count == 0) std::exit(std::stoi(code));
       }},
      {"sleep-first-attempt",
       [](const std::string& seconds) {
         std::fflush(nullptr);
         if (environment().restart_count > 0) return;
         std::this_thread::sleep_for(std::chrono::duration<double>(std::stod(seconds)));
       }},
      {"throw", [](const std::string& text) { throw std::runtime_error(text); }},
      {"fail", [](const std::string& text) { throw Error(Code::kSplit, text, "do it right"); }},
      {"blame",
       [](const std::string& rank) {
         throw RankError(Code::kRankAbsent, std::stoi(rank),
                         fmt::format("all_reduce #17: rank {} absent after 1.00 s", rank));
       }},
      {"abort", [](const std::string&) { std::abort(); }},
      {"segfault", [](const std::string&) { ::raise(SIGSEGV); }},
      {"kill", [](const std::string& number) { ::kill(::getpid(), std::stoi(number)); }},
      {"sleep",
       [](const std::string& seconds) {
         std::fflush(nullptr);
         std::this_thread::sleep_for(std::chrono::duration<double>(std::stod(seconds)));
       }},
      {"loop",
       [](const std::string&) {
         while (monotonic_ns() != 0) {
         }
       }},
      {"ignore-term", [](const std::string&) { ::signal(SIGTERM, SIG_IGN); }},
      {"graceful",
       [](const std::string& code) {
         static int exit_code = std::stoi(code);
         ::signal(SIGTERM, [](int) { ::_exit(exit_code); });
         ::signal(SIGINT, [](int) { ::_exit(exit_code); });
       }},
      {"descendants", start_descendants},
      {"step", [](const std::string& number) { page().set_step(std::stoll(number)); }},
      {"collective",
       [](const std::string& number) {
         page().begin_collective(std::stoll(number), "all_reduce", 24 << 20, 3);
       }},
      {"all-reduce", reduce_forever},
      {"rendezvous",
       [](const std::string&) {
         much();
         comm = rendezvous();
       }},
      {"reduce",
       [](const std::string&) {
         comm->all_reduce(all_of(much()), ReduceOp::kSum, 1, {deadline(), ""})->wait();
       }},
      {"barrier",
       [](const std::string&) {
         comm->barrier({deadline(), ""});
       }},
      {"split",
       [](const std::string&) {
         comm->split(0, 0, "part", {deadline(), ""});
       }},
      {"broadcast",
       [](const std::string& root) {
         comm->broadcast(all_of(much()), std::stoi(root), {deadline(), ""})->wait();
       }},
      {"send",
       [](const std::string& to) {
         comm->send(read_all_of(much()), std::stoi(to), 0, {deadline(), ""})->wait();
       }},
      {"recv",
       [](const std::string& from) {
         comm->recv(all_of(much()), std::stoi(from), 0, {deadline(), ""})->wait();
       }},
      {"catch", [](const std::string& n) { ::signal(std::stoi(n), [](int s) { caught = s; }); }},
      {"await",
       [](const std::string& number) {
         while (caught != std::stoi(number)) {
           std::this_thread::sleep_for(std::chrono::milliseconds(2));
         }
       }},
  };
  return table;
}

void perform(std::string word) {
  const size_t digits = word.find_first_not_of("0123456789");
  if (digits > 0 && digits != std::string::npos && word[digits] == ':') {
    if (std::stoi(word.substr(0, digits)) != environment().rank) return;
    word = word.substr(digits + 1);
  }
  const size_t colon = word.find(':');
  const std::string value = colon == std::string::npos ? "" : word.substr(colon + 1);
  actions().at(word.substr(0, colon))(value);
}

int body(int argc, char** argv) {
  struct Leaving {
    ~Leaving() { comm.reset(); }
  } leaving;
  for (int i = 1; i < argc; ++i) perform(argv[i]);
  return 0;
}

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) {
  return lockstep::run_program(lockstep::body, argc, argv);
}
