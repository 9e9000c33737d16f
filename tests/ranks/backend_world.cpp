#include "backend_world.hpp"

#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <optional>
#include <ostream>
#include <thread>

#include "base/backends.hpp"
#include "net/store.hpp"

namespace lockstep::test {
namespace {

constexpr int kWatchdogSeconds = 60;
constexpr int64_t kPatienceNs = 40'000'000'000;

SharedFacts* watched_facts = nullptr;
char watched_case[128] = {};

void write_text(const char* text) {
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, text, std::strlen(text));
}

// Only what a signal handler may do.
void bark(int) {
  write_text("\nwatchdog: a test hangs: ");
  write_text(watched_case);
  write_text("\n");
  for (const auto& note : watched_facts->notes) {
    if (note[0] == '\0') continue;
    write_text("  ");
    write_text(note);
    write_text("\n");
  }
  ::_exit(3);
}

// Ends this process, and with it the ranks it started, when a test hangs.
class Watchdog {
 public:
  Watchdog(const WorldCase& world, SharedFacts* facts) {
    const auto* test = testing::UnitTest::GetInstance()->current_test_info();
    const std::string name = std::string(test->name()) + ", " + world.name();
    std::strncpy(watched_case, name.c_str(), sizeof watched_case - 1);
    watched_facts = facts;
    ::signal(SIGALRM, bark);
    ::alarm(kWatchdogSeconds);
  }
  ~Watchdog() { ::alarm(0); }
};

class SharedPage {
 public:
  SharedPage() {
    void* page = ::mmap(nullptr, sizeof(SharedFacts), PROT_READ | PROT_WRITE,
                        MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED) throw std::runtime_error("no shared page");
    facts_ = new (page) SharedFacts;
  }
  ~SharedPage() { ::munmap(facts_, sizeof(SharedFacts)); }
  SharedFacts* get() const { return facts_; }

 private:
  SharedFacts* facts_;
};

std::string unique_name() {
  static int count = 0;
  return "lockstep-test-" + std::to_string(::getpid()) + "-" + std::to_string(++count);
}

StoreAddress store_at(const std::string& session) {
  StoreAddress address;
  address.unix_name = session;
  return address;
}

int64_t rendezvous_deadline() {
  return monotonic_ns() + kPatienceNs;
}

NetworkOptions network(std::shared_ptr<Store> store, int rank, int size) {
  return {.store = std::move(store),
          .rank = rank,
          .size = size,
          .address = "127.0.0.1",
          .deadline_ns = rendezvous_deadline()};
}

bool is_over_tcp(const std::string& host_backend) {
  return find_backend(host_backend)->over_tcp;
}

std::unique_ptr<Backend> make_over_tcp(const WorldCase& world, std::shared_ptr<Store> store,
                                       int rank) {
  const NetworkOptions options = network(std::move(store), rank, world.size);
  const std::string host = suite_under_test().host(world.backend);
  if (host != "two_level") return make_network_backend(host, options);
  return make_two_level_backend({.network = options, .host = world.host_of(rank)});
}

void run_body(Rank& rank, const std::function<void(Rank&)>& body) {
  try {
    body(rank);
    rank.note("leaves");
    rank.comm.reset();
    rank.note("has left");
  } catch (const std::exception& error) {
    ADD_FAILURE() << "rank " << rank.rank << " threw: " << error.what();
  }
}

void run_threads(const WorldCase& world, SharedFacts* facts,
                 const std::function<void(Rank&)>& body) {
  const std::string host = suite_under_test().host(world.backend);
  std::vector<std::unique_ptr<Backend>> made;
  if (host == "shm") made = make_shm_thread_backends(world.size);
  if (host == "self") made.push_back(make_self_backend());
  const auto store = make_local_store();
  std::vector<std::thread> threads;
  for (int number = 0; number < world.size; ++number) {
    threads.emplace_back([&, number] {
      Rank rank{number, world.size, nullptr, facts};
      rank.note("rendezvous");
      try {
        auto backend = is_over_tcp(host) ? make_over_tcp(world, store, number)
                                         : std::move(made[static_cast<size_t>(number)]);
        rank.comm = suite_under_test().build(world, std::move(backend));
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << number << " did not start: " << error.what();
        return;
      }
      run_body(rank, body);
    });
  }
  for (auto& thread : threads) thread.join();
}

// Of a rank that is a process.
std::unique_ptr<Backend> make_host(const WorldCase& world, int number, const std::string& session) {
  const std::string host = suite_under_test().host(world.backend);
  const int64_t deadline_ns = rendezvous_deadline();
  if (host == "shm") {
    return make_shm_backend(
        {.session = session, .rank = number, .size = world.size, .deadline_ns = deadline_ns});
  }
  if (is_over_tcp(host)) {
    return make_over_tcp(world, connect_store(store_at(session), deadline_ns), number);
  }
  return make_self_backend();
}

void begin_child() {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  ::signal(SIGALRM, SIG_DFL);
}

[[noreturn]] void end_child() {
  std::fflush(nullptr);
  ::_exit(testing::Test::HasFailure() ? 1 : 0);
}

// In the child: never returns to the tests.
[[noreturn]] void run_child(const WorldCase& world, int number, const std::string& session,
                            SharedFacts* facts, const std::function<void(Rank&)>& body) {
  begin_child();
  Rank rank{number, world.size, nullptr, facts};
  rank.note("rendezvous");
  try {
    rank.comm = suite_under_test().build(world, make_host(world, number, session));
  } catch (const std::exception& error) {
    ADD_FAILURE() << "rank " << number << " did not start: " << error.what();
  }
  if (rank.comm) run_body(rank, body);
  end_child();
}

void expect_end_of(const std::string& who, pid_t pid, bool killed) {
  int status = 0;
  while (::waitpid(pid, &status, 0) < 0 && errno == EINTR) {
  }
  if (killed) {
    EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL)
        << who << " was not killed: status " << status;
    return;
  }
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0)
      << who << " failed: "
      << (WIFSIGNALED(status) ? "signal " + std::to_string(WTERMSIG(status))
                              : "exit code " + std::to_string(WEXITSTATUS(status)));
}

// Ranks are forked while this process has no other thread; the store is served after that.
void run_processes(const WorldCase& world, SharedFacts* facts,
                   const std::function<void(Rank&)>& body, const RunOptions& options) {
  const std::string session = unique_name();
  std::vector<pid_t> pids;
  std::fflush(nullptr);
  for (int number = 0; number < world.size; ++number) {
    const pid_t pid = ::fork();
    ASSERT_GE(pid, 0);
    if (pid == 0) run_child(world, number, session, facts, body);
    pids.push_back(pid);
  }
  const StoreServer server(store_at(session));
  if (options.meanwhile) options.meanwhile(pids, *facts);
  for (int number = 0; number < world.size; ++number) {
    expect_end_of("rank " + std::to_string(number), pids[static_cast<size_t>(number)],
                  options.killed.count(number) > 0);
  }
}

void run_threads_in_child(const WorldCase& world, SharedFacts* facts,
                          const std::function<void(Rank&)>& body) {
  std::fflush(nullptr);
  const pid_t pid = ::fork();
  ASSERT_GE(pid, 0);
  if (pid == 0) {
    begin_child();
    run_threads(world, facts, body);
    end_child();
  }
  expect_end_of("the process of all ranks", pid, false);
}

// This process is a rank already. Ranks that the case does not count wait for the others.
void run_started_rank(const WorldCase& world, const StartedRank& self,
                      const std::function<void(Rank&)>& body, const RunOptions& options) {
  SharedFacts& facts = *self.facts;
  const auto rank_number = static_cast<size_t>(self.rank);
  std::optional<StoreServer> server;
  std::thread meanwhile;
  if (self.rank < world.size) {
    facts.processes[rank_number] = ::getpid();
    if (self.rank == 0) server.emplace(store_at(self.session));
    Rank rank{self.rank, world.size, nullptr, &facts};
    rank.note("rendezvous");
    auto store = connect_store(store_at(self.session), rendezvous_deadline());
    rank.comm =
        make_network_backend(world.backend, network(std::move(store), self.rank, world.size));
    if (self.rank == 0 && options.meanwhile) {
      meanwhile = std::thread([&] {
        const std::vector<pid_t> pids(facts.processes.begin(),
                                      facts.processes.begin() + world.size);
        options.meanwhile(pids, facts);
      });
    }
    run_body(rank, body);
    facts.ended.fetch_add(1);
  }
  if (meanwhile.joinable()) meanwhile.join();
  const auto lost = static_cast<int64_t>(options.killed.size()) + (options.gone < 0 ? 0 : 1);
  EXPECT_TRUE(wait_until_at_least(facts.ended, world.size - lost)) << "not all ranks ended";
}

}  // namespace

std::string WorldCase::name() const {
  return backend + "_" + std::to_string(size) +
         (ranks == Ranks::kThreads ? "_threads" : "_processes") +
         (hosts.empty() ? "" : "_on_" + hosts);
}

std::string WorldCase::host_of(int rank) const {
  if (!hosts.empty()) return hosts.substr(static_cast<size_t>(rank), 1);
  return size == 2 || 2 * rank < size ? "0" : "1";
}

void PrintTo(const WorldCase& world, std::ostream* out) {
  *out << world.name();
}

void Rank::sync() {
  comm->barrier(in_time());
  shared->synced.fetch_add(1);
  EXPECT_TRUE(wait_until_at_least(shared->synced, ++syncs * size));
}

void Rank::note(const std::string& text) const {
  const std::string line = "rank " + std::to_string(rank) + " " + text;
  char* slot = shared->notes[rank];
  std::strncpy(slot, line.c_str(), sizeof shared->notes[0] - 1);
}

CallContext Rank::in_time(std::string_view label) const {
  return {monotonic_ns() + kPatienceNs, label};
}

CallContext Rank::within_ms(int64_t ms, std::string_view label) const {
  return {monotonic_ns() + ms * 1'000'000, label};
}

std::array<int64_t, 16> run_ranks(const WorldCase& world, const std::function<void(Rank&)>& body,
                                  const RunOptions& options) {
  if (suite_under_test().next_rank) {
    const StartedRank self = suite_under_test().next_rank();
    if (self.facts == nullptr) return {};
    const Watchdog watchdog(world, self.facts);
    run_started_rank(world, self, body, options);
    std::array<int64_t, 16> numbers{};
    std::copy(self.facts->numbers.begin(), self.facts->numbers.end(), numbers.begin());
    return numbers;
  }
  const SharedPage page;
  const Watchdog watchdog(world, page.get());
  if (world.ranks == Ranks::kProcesses) {
    run_processes(world, page.get(), body, options);
  } else if (suite_under_test().fork_threads) {
    run_threads_in_child(world, page.get(), body);
  } else {
    run_threads(world, page.get(), body);
  }
  std::array<int64_t, 16> numbers{};
  std::copy(page.get()->numbers.begin(), page.get()->numbers.end(), numbers.begin());
  return numbers;
}

void Caught::expect(Code expected, const std::vector<std::string>& fragments) const {
  if (!thrown) {
    ADD_FAILURE() << "no error; expected " << code_name(expected);
    return;
  }
  EXPECT_EQ(code_name(code), code_name(expected)) << text;
  EXPECT_NE(text.find("help: "), std::string::npos) << "no remedy in: " << text;
  for (const auto& fragment : fragments) {
    EXPECT_NE(text.find(fragment), std::string::npos) << "no \"" << fragment << "\" in: " << text;
  }
}

Caught catch_error(const std::function<void()>& action) {
  try {
    action();
  } catch (const RankError& error) {
    return {true, error.code(), error.blamed_rank(), error.block()};
  } catch (const Error& error) {
    return {true, error.code(), -1, error.block()};
  }
  return {};
}

bool wait_until_at_least(const std::atomic<int64_t>& number, int64_t value) {
  const int64_t end_ns = monotonic_ns() + 60'000'000'000;  // long enough under a sanitizer
  while (number.load() < value) {
    if (monotonic_ns() > end_ns) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

namespace {

// NCCL wants a GPU for each rank of a host, and so many there are not everywhere; processes can
// say that they are hosts of their own. To MPI a process is one rank.
bool can_be_many(const std::string& backend, Ranks ranks) {
  if (backend == "nccl" || backend == "mpi") return ranks == Ranks::kProcesses;
  return backend != "self";
}

}  // namespace

std::vector<WorldCase> world_cases(const std::vector<int>& sizes, const std::vector<Ranks>& ranks) {
  std::vector<WorldCase> cases;
  for (const auto& backend : suite_under_test().backends) {
    for (const int size : sizes) {
      for (const Ranks kind : ranks) {
        if (size == 1 || can_be_many(backend, kind)) cases.push_back({backend, size, kind});
      }
    }
  }
  return cases;
}

std::vector<WorldCase> host_cases() {
  std::vector<WorldCase> cases;
  const auto& backends = suite_under_test().backends;
  if (std::find(backends.begin(), backends.end(), "two_level") == backends.end()) return cases;
  for (const char* hosts : {"0001", "0101", "00112", "00001111", "00112233"}) {
    cases.push_back({"two_level", static_cast<int>(std::strlen(hosts)), Ranks::kThreads, hosts});
  }
  return cases;
}

std::string case_name(const testing::TestParamInfo<WorldCase>& info) {
  return info.param.name();
}

void BackendTest::SetUp() {
  const std::string missing = suite_under_test().missing(GetParam().backend);
  if (!missing.empty()) GTEST_SKIP() << missing;
}

}  // namespace lockstep::test
