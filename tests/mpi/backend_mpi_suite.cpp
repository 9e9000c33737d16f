#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <stdexcept>
#include <string>

#include "lockstep/rank_environment.hpp"
#include "ranks/backend_world.hpp"

// The suite over MPI. mpirun starts this program as all ranks of one size, and each of them goes
// through the same tests: see run_mpi_suite.py.

namespace lockstep::test {
namespace {

constexpr int kMostRuns = 512;  // of one process

// The shared facts of every run, in a file that all ranks of this job have mapped.
SharedFacts* facts_of(int run) {
  static SharedFacts* const all = [] {
    const char* path = std::getenv("LOCKSTEP_TEST_FACTS");
    const int file = path == nullptr ? -1 : ::open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    constexpr size_t kBytes = kMostRuns * sizeof(SharedFacts);
    if (file < 0 || ::ftruncate(file, kBytes) != 0) {
      throw std::runtime_error("LOCKSTEP_TEST_FACTS names no file: start run_mpi_suite.py");
    }
    void* mapped = ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    ::close(file);
    if (mapped == MAP_FAILED) throw std::runtime_error("LOCKSTEP_TEST_FACTS cannot be mapped");
    return static_cast<SharedFacts*>(mapped);  // a file begins with zeros, and so do facts
  }();
  if (run >= kMostRuns) throw std::runtime_error("too many runs in one process");
  return all + run;
}

StartedRank next_rank() {
  static const auto environment = RankEnvironment::from_env();
  static int runs = 0;
  const int run = runs++;
  const char* only = std::getenv("LOCKSTEP_TEST_RUN");
  if (only != nullptr && std::to_string(run) != only) return {};
  return {.rank = environment.rank,
          .facts = facts_of(run),
          .session = "mpi-test-" + environment.session + "-" + std::to_string(run)};
}

}  // namespace

const Suite& suite_under_test() {
  static const Suite suite = {
      .backends = {"mpi"},
      .missing = [](const std::string&) -> std::string { return ""; },
      .host = [](const std::string& backend) { return backend; },
      .build = [](const WorldCase&, std::unique_ptr<Backend> host) { return host; },
      .next_rank = next_rank,
  };
  return suite;
}

}  // namespace lockstep::test
