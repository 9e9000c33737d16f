#pragma once

#include <gtest/gtest.h>
#include <sys/types.h>

#include <array>
#include <atomic>
#include <functional>
#include <iosfwd>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "comm/backend.hpp"
#include "lockstep/clock.hpp"
#include "lockstep/error.hpp"

namespace lockstep::test {

enum class Ranks { kThreads, kProcesses };

/// Which backend, how many ranks, and what a rank is.
struct WorldCase {
  std::string backend;
  int size = 1;
  Ranks ranks = Ranks::kThreads;
  std::string hosts = {};  ///< [rank]: on which host two_level takes it to be; "": see host_of()

  std::string name() const;  ///< "gloo_3_processes"
  /// Of two ranks both are on one host, of more the first half is on one and the rest on another.
  std::string host_of(int rank) const;
};

void PrintTo(const WorldCase& world, std::ostream* out);  ///< for GoogleTest

/// Memory that all ranks of a test see, also across processes.
struct SharedFacts {
  std::array<std::atomic<int64_t>, 16> numbers{};  ///< for the test's own use
  std::atomic<int64_t> synced = 0;                 ///< ranks that have left sync(), all times
  std::array<std::atomic<int>, 8> processes{};     ///< [rank]: as StartedRank only
  std::atomic<int64_t> ended = 0;                  ///< ranks that are through, as StartedRank only
  char notes[8][96] = {};                          ///< [rank]: what it does now, for the watchdog
};

/// One rank of a test.
struct Rank {
  int rank = 0;
  int size = 1;
  std::unique_ptr<Backend> comm;
  SharedFacts* shared = nullptr;
  int64_t syncs = 0;

  /// A barrier that all ranks have left before any goes on: a rank that fails right after an
  /// ordinary one may take those with it that are still inside.
  void sync();

  /// What comes next, should this be the last thing heard from the rank.
  void note(const std::string& text) const;

  /// Enough for any call in which nothing is wrong.
  CallContext in_time(std::string_view label = "") const;
  CallContext within_ms(int64_t ms, std::string_view label = "") const;
};

struct RunOptions {
  std::set<int> killed;  ///< ranks that must end by SIGKILL; all others must end well
  int gone = -1;         ///< a rank that ends its process
  std::function<void(const std::vector<pid_t>& pids, SharedFacts& shared)> meanwhile;  ///< parent
};

/// Runs body on every rank and waits for all. An exception that leaves a body fails the test. A
/// test that takes longer than a minute is ended with what its ranks did last. Gives the shared
/// numbers as they were at the end.
std::array<int64_t, 16> run_ranks(const WorldCase& world, const std::function<void(Rank&)>& body,
                                  const RunOptions& options = {});

/// What a call threw.
struct Caught {
  bool thrown = false;
  Code code = Code::kInternal;
  int blamed = -1;
  std::string text;

  /// Expects this code and all fragments.
  void expect(Code expected, const std::vector<std::string>& fragments) const;
};
Caught catch_error(const std::function<void()>& action);

/// Waits for a number of the shared facts to reach a value; false after ten seconds.
bool wait_until_at_least(const std::atomic<int64_t>& number, int64_t value);

/// The cases of the backends under test, for these world sizes; `self`, and `nccl` with threads,
/// have size 1 only.
std::vector<WorldCase> world_cases(const std::vector<int>& sizes,
                                   const std::vector<Ranks>& ranks = {Ranks::kThreads,
                                                                      Ranks::kProcesses});

/// Ranks as threads of two_level on hosts of many kinds: of different sizes, with one rank, with
/// ranks that take turns; for this suite's other tests.
std::vector<WorldCase> host_cases();

std::string case_name(const testing::TestParamInfo<WorldCase>& info);

/// This process as a rank that another program started.
struct StartedRank {
  int rank = 0;
  SharedFacts* facts = nullptr;  ///< of the next run; null: it is left out
  std::string session;           ///< of the next run
};

/// What an executable of this suite tests: backend_host.cpp has the host's backends, the folder
/// cuda those of the GPU.
struct Suite {
  std::vector<std::string> backends;
  /// Why one cannot be tested here; "" if it can.
  std::function<std::string(const std::string& backend)> missing;
  /// The host's backend of the rendezvous: the one under test, or the one it stands on.
  std::function<std::string(const std::string& backend)> host;
  std::function<std::unique_ptr<Backend>(const WorldCase& world, std::unique_ptr<Backend> host)>
      build;
  /// Ranks as threads get a process of their own: what they use must not be in the one that forks.
  bool fork_threads = false;
  /// Where this process is a rank itself, and starts none.
  std::function<StartedRank()> next_rank = {};
};
const Suite& suite_under_test();

/// Tests of backends: skips, by name, where what the backend needs is missing.
class BackendTest : public testing::TestWithParam<WorldCase> {
 protected:
  void SetUp() override;
};

}  // namespace lockstep::test
