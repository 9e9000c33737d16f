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

/// All values in one row, as float32.
inline torch::Tensor flat_weights(const std::vector<torch::Tensor>& parameters) {
  std::vector<torch::Tensor> flat;
  for (const auto& each : parameters) flat.push_back(each.detach().to(torch::kFloat).flatten());
  return torch::cat(flat);
}

/// Expects the same bits on all ranks.
inline void expect_same_on_all(const Communicator& comm, const torch::Tensor& values,
                               const std::string& what) {
  const torch::Tensor first = values.clone();
  comm.broadcast(first, 0);
  EXPECT_TRUE(torch::equal(values, first)) << what << " on rank " << comm.rank() << " is off by "
                                           << (values - first).abs().max().item<double>();
}

}  // namespace lockstep::test
