#pragma once

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "comm/backend.hpp"
#include "lockstep/clock.hpp"
#include "lockstep/error.hpp"

namespace lockstep::test {

inline int64_t in_seconds(double seconds) {
  return monotonic_ns() + static_cast<int64_t>(seconds * 1e9);
}

inline CallContext within(double seconds, std::string_view label = "") {
  return {.deadline_ns = in_seconds(seconds), .label = label};
}

/// What a rank does; returns "" or what went wrong.
using RankBody = std::function<std::string(Backend&)>;

/// A session that no other test has.
inline std::string fresh_session() {
  static int number = 0;
  return "shm-test-" + std::to_string(::getpid()) + "-" + std::to_string(++number);
}

/// Runs the body on every rank, each a thread; a rank's backend goes when its body ends.
inline void run_threads(int size, const RankBody& body) {
  auto backends = make_shm_thread_backends(size);
  std::vector<std::string> wrong(static_cast<size_t>(size));
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < backends.size(); ++rank) {
    threads.emplace_back([&, rank] {
      try {
        wrong[rank] = body(*backends[rank]);
      } catch (const std::exception& error) {
        wrong[rank] = error.what();
      }
      backends[rank].reset();
    });
  }
  for (auto& thread : threads) thread.join();
  for (size_t rank = 0; rank < wrong.size(); ++rank) {
    EXPECT_EQ(wrong[rank], "") << "rank " << rank << " of " << size << ", threads";
  }
}

/// A forked process for every rank; ends them all.
class ForkedRanks {
 public:
  ForkedRanks(int size, const RankBody& body, double rendezvous_s = 20) {
    const std::string session = fresh_session();
    for (int rank = 0; rank < size; ++rank) {
      std::fflush(nullptr);
      const pid_t pid = ::fork();
      if (pid != 0) {
        pids_.push_back(pid);
        continue;
      }
      int code = 1;
      try {
        const ShmOptions options{session, rank, size, in_seconds(rendezvous_s)};
        auto backend = make_shm_backend(options);
        const std::string wrong = body(*backend);
        backend.reset();
        code = wrong.empty() ? 0 : 1;
        if (code != 0) std::fprintf(stderr, "rank %d of %d: %s\n", rank, size, wrong.c_str());
      } catch (const std::exception& error) {
        std::fprintf(stderr, "rank %d of %d: %s\n", rank, size, error.what());
      }
      std::fflush(nullptr);
      ::_exit(code);
    }
  }
  ~ForkedRanks() {
    for (const pid_t pid : pids_) {
      if (pid == 0) continue;
      ::kill(pid, SIGKILL);
      ::waitpid(pid, nullptr, 0);
    }
  }
  ForkedRanks(const ForkedRanks&) = delete;
  ForkedRanks& operator=(const ForkedRanks&) = delete;

  pid_t pid(int rank) const { return pids_[static_cast<size_t>(rank)]; }

  /// 0 if the rank's body went well.
  int wait(int rank) {
    int status = 0;
    ::waitpid(pids_[static_cast<size_t>(rank)], &status, 0);
    pids_[static_cast<size_t>(rank)] = 0;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }

 private:
  std::vector<pid_t> pids_;
};

inline void run_processes(int size, const RankBody& body) {
  ForkedRanks ranks(size, body);
  for (int rank = 0; rank < size; ++rank) {
    EXPECT_EQ(ranks.wait(rank), 0) << "rank " << rank << " of " << size << ", processes";
  }
}

}  // namespace lockstep::test
