#pragma once

#include <chrono>
#include <memory>
#include <optional>

#include "comm/backend.hpp"
#include "lockstep/communicator.hpp"

namespace lockstep {

/// Of every wait for other ranks, where nobody said otherwise.
inline constexpr std::chrono::milliseconds kDefaultTimeout = std::chrono::minutes(5);

/// What the copies of one Communicator share.
struct CommState {
  CommState(std::unique_ptr<Backend> made, std::chrono::milliseconds limit)
      : backend(std::move(made)), timeout(limit) {}

  CallContext context(int64_t begun_ns, const CallOptions& options) const;

  std::unique_ptr<Backend> backend;
  std::chrono::milliseconds timeout;
  std::optional<BoardPage> page;
  CommStats stats;
};

}  // namespace lockstep
