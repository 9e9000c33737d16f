#pragma once

#include <fmt/format.h>

#include <exception>
#include <future>
#include <vector>

#include "lockstep/device.hpp"
#include "lockstep/error.hpp"

namespace lockstep {

/// Waits for every replica, also after one has failed; then returns their results or throws the
/// first failure with its replica and device named. `doing` is "forward" or "backward".
template <class Result>
std::vector<Result> wait_for_replicas(std::vector<std::future<Result>>& running,
                                      const Devices& devices, const char* doing) {
  for (const auto& replica : running) replica.wait();
  std::vector<Result> results;
  for (size_t i = 0; i < running.size(); ++i) {
    try {
      results.push_back(running[i].get());
    } catch (const std::exception& error) {
      throw Error(
          Code::kReplicaFailed,
          fmt::format("{} of replica {} on {}: {}", doing, i, devices[i].name(), describe(error)),
          "what follows the device's name is the module's own error; run the module alone "
          "on that device's rows to find it");
    }
  }
  return results;
}

}  // namespace lockstep
