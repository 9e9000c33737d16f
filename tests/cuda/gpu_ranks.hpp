#pragma once

// Ranks as threads that share one GPU.

#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gpu_test.hpp"
#include "lockstep/device.hpp"
#include "ranks/rank_threads.hpp"
#include "torch_compat.hpp"

namespace lockstep::test {

using GpuRankBody = std::function<void(const Communicator&, Device&)>;

/// Every rank a thread on a slot of the GPU, with that slot's stream.
inline std::vector<RankOutcome> outcomes_on_gpu(std::vector<Communicator> comms,
                                                const GpuRankBody& body) {
  const Devices devices("cuda:0*" + std::to_string(comms.size()));
  std::vector<RankOutcome> outcomes(comms.size());
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < comms.size(); ++rank) {
    threads.emplace_back([&, rank, comm = std::move(comms[rank])]() mutable {
      const UseDevice home(devices[rank]);
      const compat::BackwardOnThisThread on_this_thread;
      try {
        const Communicator mine = std::move(comm);
        body(mine, devices[rank]);
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
inline void run_on_gpu(std::vector<Communicator> comms, const GpuRankBody& body) {
  const auto outcomes = outcomes_on_gpu(std::move(comms), body);
  for (size_t rank = 0; rank < outcomes.size(); ++rank) {
    EXPECT_FALSE(outcomes[rank].failed()) << "rank " << rank << ": " << outcomes[rank].text();
  }
}

inline void run_on_gpu(int size, const GpuRankBody& body) {
  run_on_gpu(Communicator::threads(size, kGpu), body);
}

}  // namespace lockstep::test
