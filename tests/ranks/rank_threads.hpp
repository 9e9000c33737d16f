#pragma once

#include <exception>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/communicator.hpp"
#include "lockstep/error.hpp"
#include "tensor_support.hpp"

namespace lockstep::test {

/// How a rank ended: its error's code and text, or nothing.
struct RankOutcome {
  std::exception_ptr error;

  bool failed() const { return error != nullptr; }
  Code code() const {
    try {
      if (error) std::rethrow_exception(error);
    } catch (const Error& caught) {
      return caught.code();
    } catch (...) {
    }
    return Code::kInternal;
  }
  std::string text() const {
    try {
      if (error) std::rethrow_exception(error);
    } catch (const std::exception& caught) {
      return describe(caught);
    }
    return "";
  }
};

/// Runs `body` on ranks that are threads and gives how each ended. A rank's communicator ends with
/// its body, as a process's would.
inline std::vector<RankOutcome> outcomes_of_ranks(
    int size, const std::function<void(const Communicator&)>& body) {
  auto comms = Communicator::threads(size);
  std::vector<RankOutcome> outcomes(static_cast<size_t>(size));
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < comms.size(); ++rank) {
    threads.emplace_back([&, rank, comm = std::move(comms[rank])]() mutable {
      try {
        const Communicator mine = std::move(comm);
        body(mine);
      } catch (...) {
        outcomes[rank].error = std::current_exception();
      }
    });
  }
  comms.clear();
  for (auto& thread : threads) thread.join();
  return outcomes;
}

/// The same where all ranks must succeed.
inline void run_ranks(int size, const std::function<void(const Communicator&)>& body) {
  const auto outcomes = outcomes_of_ranks(size, body);
  for (size_t rank = 0; rank < outcomes.size(); ++rank) {
    EXPECT_FALSE(outcomes[rank].failed()) << "rank " << rank << ": " << outcomes[rank].text();
  }
}

}  // namespace lockstep::test
