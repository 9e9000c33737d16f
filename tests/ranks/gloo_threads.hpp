#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "comm/network/transport_loader.hpp"
#include "lockstep/clock.hpp"
#include "lockstep/communicator.hpp"
#include "net/store.hpp"
#include "world/comm_state.hpp"

namespace lockstep::test {

/// Ranks as threads over Gloo, each with connections of its own. All must succeed.
inline void run_gloo_ranks(int size, const std::function<void(const Communicator&)>& body) {
  const auto store = make_local_store();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        const Communicator comm(std::make_shared<CommState>(
            make_network_backend("gloo", {.store = store,
                                          .rank = rank,
                                          .size = size,
                                          .address = "127.0.0.1",
                                          .deadline_ns = monotonic_ns() + 30'000'000'000}),
            std::chrono::seconds(60)));
        body(comm);
        comm.barrier();
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << rank << ": " << error.what();
      }
    });
  }
  for (auto& thread : threads) thread.join();
}

}  // namespace lockstep::test
