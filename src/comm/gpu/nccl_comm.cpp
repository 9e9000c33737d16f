#if LOCKSTEP_NCCL

#include "comm/gpu/nccl_comm.hpp"

#include <fmt/format.h>

#include <chrono>
#include <thread>

#include "base/running_clock.hpp"
#include "lockstep/error.hpp"

namespace lockstep {
namespace {

constexpr auto kPollPeriod = std::chrono::microseconds(20);
constexpr int64_t kFarewellNs = 5'000'000'000;  // for peers to take leave together

[[noreturn]] void throw_aborted(std::string_view call) {
  throw RankError(Code::kRankFailed, -1,
                  fmt::format("{}: this rank's NCCL communicator was given up", call),
                  "look for the first error of this run");
}

}  // namespace

void check_nccl(ncclResult_t result, ncclComm_t comm, std::string_view call) {
  if (result == ncclSuccess || result == ncclInProgress) return;
  const char* detail = ncclGetLastError(comm);
  const std::string message = fmt::format("{} failed: {}{}{}", call, ncclGetErrorString(result),
                                          detail != nullptr && *detail != '\0' ? ": " : "",
                                          detail != nullptr ? detail : "");
  if (result == ncclRemoteError) {
    throw RankError(Code::kRankFailed, -1, message,
                    "look for the rank that failed first: this one is its victim");
  }
  throw Error(Code::kBackend, message,
              "run with NCCL_DEBUG=WARN to hear NCCL's own words, or use --backend gloo or shm");
}

NcclComm::NcclComm(const ncclUniqueId& id, int rank, int size, int64_t deadline_ns) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  check_nccl(ncclCommInitRankConfig(&comm_, size, id, rank, &config), nullptr,
             "ncclCommInitRankConfig");
  try {
    settle("ncclCommInitRankConfig", deadline_ns);
  } catch (...) {
    abort();
    throw;
  }
}

// Peers may still take data from this rank, so that they finish together where all are well.
NcclComm::~NcclComm() {
  if (comm_ == nullptr) return;
  try {
    run("ncclCommFinalize", running_ns() + kFarewellNs, ncclCommFinalize);
    const std::lock_guard lock(mutex_);
    if (comm_ != nullptr) (void)ncclCommDestroy(comm_);
  } catch (const std::exception&) {
    abort();
  }
}

void NcclComm::run(std::string_view what, int64_t deadline_ns,
                   const std::function<ncclResult_t(ncclComm_t)>& call) {
  {
    const std::lock_guard lock(mutex_);
    if (comm_ == nullptr) throw_aborted(what);
    check_nccl(call(comm_), comm_, what);
  }
  settle(what, deadline_ns);
}

void NcclComm::check_health() {
  const std::lock_guard lock(mutex_);
  if (comm_ != nullptr) check_nccl(state(), comm_, "NCCL");
}

void NcclComm::abort() noexcept {
  const std::lock_guard lock(mutex_);
  if (comm_ != nullptr) (void)ncclCommAbort(comm_);
  comm_ = nullptr;
}

// Under the mutex.
ncclResult_t NcclComm::state() {
  ncclResult_t found = ncclSuccess;
  const ncclResult_t asked = ncclCommGetAsyncError(comm_, &found);
  return asked == ncclSuccess ? found : asked;
}

void NcclComm::settle(std::string_view what, int64_t deadline_ns) {
  for (;;) {
    {
      const std::lock_guard lock(mutex_);
      if (comm_ == nullptr) throw_aborted(what);
      const ncclResult_t now = state();
      check_nccl(now, comm_, what);
      if (now != ncclInProgress) return;
    }
    if (running_ns() > deadline_ns) {
      throw RankError(Code::kRankAbsent, -1,
                      fmt::format("{}: NCCL did not reach all ranks before the deadline", what),
                      "run with NCCL_DEBUG=INFO to see which connection it waits for; where the "
                      "ranks are only slow, give them more time with --timeout of `lockstep run`");
    }
    std::this_thread::sleep_for(kPollPeriod);
  }
}

}  // namespace lockstep

#endif
