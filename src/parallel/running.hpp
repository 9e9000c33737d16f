#pragma once

#include <fmt/format.h>

#include <exception>
#include <future>
#include <type_traits>
#include <vector>

#include "lockstep/device.hpp"
#include "lockstep/error.hpp"

namespace lockstep {

/// Work of several replicas in flight. However the scope is left, all of it has ended by then,
/// because it refers to the caller's variables.
template <class Result>
class Running {
 public:
  Running() = default;
  ~Running() {
    for (const auto& replica : running_) {
      if (replica.valid()) replica.wait();
    }
  }
  Running(const Running&) = delete;
  Running& operator=(const Running&) = delete;

  /// The work of the next replica; wait() is told which replica the first one is.
  void add(std::future<Result> replica) { running_.push_back(std::move(replica)); }

  /// Waits for all, also after one has failed; then returns their results, or throws the first
  /// failure with replica and device named and the original exception nested. `doing` is "forward"
  /// and the like.
  auto wait(const Devices& devices, const char* doing, size_t first = 0) {
    for (const auto& replica : running_) replica.wait();
    std::conditional_t<std::is_void_v<Result>, std::vector<char>, std::vector<Result>> results;
    for (size_t i = 0; i < running_.size(); ++i) {
      try {
        if constexpr (std::is_void_v<Result>) {
          running_[i].get();
        } else {
          results.push_back(running_[i].get());
        }
      } catch (const std::exception& error) {
        std::throw_with_nested(
            Error(Code::kReplicaFailed,
                  fmt::format("{} of replica {} on {}: {}", doing, first + i,
                              devices[first + i].name(), describe(error)),
                  "what follows the device's name is the module's own error; run the module alone "
                  "on that device's rows to find it"));
      }
    }
    return results;
  }

 private:
  std::vector<std::future<Result>> running_;
};

}  // namespace lockstep
