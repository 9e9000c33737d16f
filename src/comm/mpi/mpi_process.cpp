#include "comm/mpi/mpi_process.hpp"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <cstdlib>

namespace lockstep::mpi_module {
namespace {

using std::chrono::steady_clock;

constexpr std::chrono::milliseconds kSettle(200);  // for messages of a call that failed
constexpr std::chrono::milliseconds kDriveEvery(2);
constexpr std::chrono::seconds kDriveFor(2);  // after the last call
constexpr std::chrono::milliseconds kIdle(100);
constexpr std::chrono::seconds kLeaveAfterFailure(2);
constexpr std::chrono::milliseconds kLeaveSleep(20);  // while other ranks may work for hours

// Blocks signals in this thread and in threads it starts, which must not run the program's
// handlers.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

}  // namespace

MpiProcess& MpiProcess::get() {
  static MpiProcess* const process = new MpiProcess;  // threads may use it to the very end
  return *process;
}

std::string MpiProcess::error_text(int error) {
  char words[MPI_MAX_ERROR_STRING] = {};
  int length = 0;
  MPI_Error_string(error, words, &length);
  return {words, static_cast<size_t>(length)};
}

void MpiProcess::check_usable() const {
  if (!unusable_.empty()) throw std::runtime_error(unusable_);
}

void MpiProcess::begin_mpi() {
  int begun = 0;
  int ended = 0;
  int level = MPI_THREAD_SINGLE;
  MPI_Initialized(&begun);
  MPI_Finalized(&ended);
  if (ended != 0) throw std::runtime_error("the program has ended MPI already");
  ours_ = begun == 0;
  if (ours_) {
    MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &level);
    if (level >= MPI_THREAD_SERIALIZED) return;
    throw std::runtime_error("this MPI serves one thread only: MPI_THREAD_SERIALIZED is needed");
  }
  MPI_Query_thread(&level);
  if (level >= MPI_THREAD_MULTIPLE) return;
  throw std::runtime_error(
      "the program initialised MPI without MPI_THREAD_MULTIPLE, which lockstep's threads require");
}

void MpiProcess::start(const std::function<bool()>& late) {
  const std::lock_guard lock(mutex_);
  check_usable();
  if (started_) return;
  const SignalsBlocked blocked;
  begin_mpi();
  MPI_Request request = MPI_REQUEST_NULL;
  MPI_Comm_idup(MPI_COMM_WORLD, &comm_, &request);
  Pause pause;
  for (;;) {
    int done = 0;
    MPI_Test(&request, &done, MPI_STATUS_IGNORE);
    if (done != 0) break;
    if (late()) unusable_ = "not all of MPI's ranks have come";
    check_usable();
    pause();
  }
  MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN);
  MPI_Comm_rank(comm_, &rank_);
  MPI_Comm_size(comm_, &size_);
  void* limit = nullptr;
  int has_limit = 0;
  MPI_Comm_get_attr(comm_, MPI_TAG_UB, &limit, &has_limit);
  tag_limit_ = has_limit != 0 ? *static_cast<int*>(limit) : SHRT_MAX;
  process_ = ::getpid();
  started_ = true;
  driver_ = std::thread([this] { drive(); });
  std::atexit([] { get().leave(); });
}

int MpiProcess::take_tags(int count) {
  const std::lock_guard lock(mutex_);
  if (next_tag_ > tag_limit_ - count) {
    throw std::runtime_error("this process has made more groups than MPI has tags for");
  }
  const int first = next_tag_;
  next_tag_ += count;
  return first;
}

// Requests that are done become MPI_REQUEST_NULL.
bool MpiProcess::test(std::vector<MPI_Request>& requests) {
  int done = 0;
  call([&] {
    return MPI_Testall(static_cast<int>(requests.size()), requests.data(), &done,
                       MPI_STATUSES_IGNORE);
  });
  return done != 0;
}

// When all requests of a transfer are done, MPI may still hold data that it has not yet handed to
// the network. It makes progress only while it is called, so this thread calls it for a while.
void MpiProcess::drive() {
  for (;;) {
    bool idle = false;
    {
      const std::lock_guard lock(mutex_);
      idle = !unusable_.empty() || steady_clock::now() - last_call_ > kDriveFor;
      int found = 0;
      if (!idle) MPI_Iprobe(MPI_ANY_SOURCE, 0, comm_, &found, MPI_STATUS_IGNORE);
    }
    std::unique_lock lock(driver_mutex_);
    if (wake_.wait_for(lock, idle ? kIdle : kDriveEvery, [this] { return stopping_; })) return;
  }
}

void MpiProcess::settle(std::vector<MPI_Request>& receives,
                        std::vector<MPI_Request>& sends) noexcept {
  if (receives.empty() && sends.empty()) return;
  try {
    for (MPI_Request& request : receives) {
      if (request != MPI_REQUEST_NULL) call([&] { return MPI_Cancel(&request); });
    }
    const auto end = steady_clock::now() + kSettle;
    const auto stop = [end] {
      if (steady_clock::now() > end) throw Late();
    };
    wait(receives, stop);
    wait(sends, stop);
  } catch (const std::exception&) {
    const std::lock_guard lock(mutex_);
    if (unusable_.empty()) {
      unusable_ = "a transfer of this process failed half way, and MPI cannot give it up";
    }
  }
}

// Runs at the exit of the process. MPI_Finalize waits for all ranks and has no deadline, so the
// ranks first tell each other that they have come. A rank that works alone after the others may
// take as long as it likes: a launcher of MPI kills all ranks when one leaves without MPI_Finalize.
void MpiProcess::leave() {
  if (::getpid() != process_) return;  // of a child, which is no rank
  {
    const std::lock_guard lock(driver_mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  driver_.join();
  try {
    int ended = 0;
    MPI_Finalized(&ended);
    if (!ours_ || ended != 0) return;
    std::vector<MPI_Request> requests(1, MPI_REQUEST_NULL);
    call([&] { return MPI_Ibarrier(comm_, requests.data()); });
    const auto end = steady_clock::now() + kLeaveAfterFailure;
    const auto stop = [&] {
      if (failed_ && steady_clock::now() > end) throw Late();
    };
    wait(requests, stop, Pause(kLeaveSleep));
    const std::lock_guard lock(mutex_);
    unusable_ = "MPI has ended";
    MPI_Finalize();
  } catch (const std::exception&) {
    // The launcher of MPI sees that this process ended without the others.
  }
}

}  // namespace lockstep::mpi_module
