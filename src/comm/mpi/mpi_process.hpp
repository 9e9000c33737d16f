#pragma once

#include <mpi.h>
#include <sched.h>
#include <sys/types.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "comm/network/module_status.hpp"

// Note [One call at a time]
//
// Transfers run in several threads. All of them only begin messages and test them, each time under
// one mutex, which is what MPI_THREAD_SERIALIZED asks for; none waits inside MPI. MPI moves data
// only while it is called. A thread that waits therefore tests, and between two tests gives up its
// core: first it yields, then it sleeps for longer and longer.

namespace lockstep::mpi_module {

using transport_module::Aborted;
using transport_module::guarded;
using transport_module::Late;

/// Waits between two tests of a message.
class Pause {
 public:
  explicit Pause(std::chrono::microseconds longest_sleep = kShortSleep)
      : longest_sleep_(longest_sleep) {}

  void operator()() {
    if (std::chrono::steady_clock::now() - begin_ < kYielding) {
      ::sched_yield();
      return;
    }
    std::this_thread::sleep_for(sleep_);
    sleep_ = std::min(sleep_ * 2, longest_sleep_);
  }

 private:
  static constexpr std::chrono::microseconds kYielding{100};
  static constexpr std::chrono::microseconds kShortSleep{100};

  const std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
  const std::chrono::microseconds longest_sleep_;
  std::chrono::microseconds sleep_{10};
};

/// MPI in this process: begun with the first group, ended at the process's exit.
class MpiProcess {
 public:
  static MpiProcess& get();

  /// Begins MPI, unless it has begun; `late` returns true once the deadline has passed.
  void start(const std::function<bool()>& late);

  int rank() const { return rank_; }
  int size() const { return size_; }
  MPI_Comm comm() const { return comm_; }  ///< of all ranks, lockstep's own

  /// The first of `count` tags that no other group of this rank has.
  int take_tags(int count);

  /// Calls MPI. Throws std::runtime_error with MPI's own message if the call fails.
  template <class Call>
  void call(Call&& what) {
    const std::lock_guard lock(mutex_);
    check_usable();
    const int error = what();
    last_call_ = std::chrono::steady_clock::now();
    if (error != MPI_SUCCESS) throw std::runtime_error(error_text(error));
  }

  /// Tests these until all are done. `stop` may throw.
  template <class Stop>
  void wait(std::vector<MPI_Request>& requests, Stop&& stop, Pause pause = Pause()) {
    while (!test(requests)) {
      stop();
      pause();
    }
  }

  /// After a failure: MPI must not touch the buffers of these requests any more. If that cannot be
  /// guaranteed, this process never calls MPI again, so that MPI cannot touch them either.
  void settle(std::vector<MPI_Request>& receives, std::vector<MPI_Request>& sends) noexcept;

  /// A group has failed: other ranks may be gone.
  void note_failure() { failed_ = true; }

 private:
  MpiProcess() = default;

  static std::string error_text(int error);
  void check_usable() const;
  void begin_mpi();
  bool test(std::vector<MPI_Request>& requests);
  void drive();
  void leave();

  std::mutex mutex_;  // held while MPI is called; guards what follows
  bool started_ = false;
  bool ours_ = false;     // started here, and not by the program
  std::string unusable_;  // why MPI may not be called any more
  std::chrono::steady_clock::time_point last_call_;
  MPI_Comm comm_ = MPI_COMM_NULL;
  int rank_ = 0;
  int size_ = 1;
  int tag_limit_ = 0;
  int next_tag_ = 1;
  pid_t process_ = 0;

  std::atomic<bool> failed_ = false;
  std::mutex driver_mutex_;  // guards stopping_
  std::condition_variable wake_;
  bool stopping_ = false;
  std::thread driver_;
};

}  // namespace lockstep::mpi_module
