#pragma once

#include <vector>

#include "comm/self_messages.hpp"
#include "comm/shm/shm_engine.hpp"

namespace lockstep {

/// Messages between two ranks. Each ordered pair has a ring of bytes, through which a message
/// streams: its Call, then its data.
class ShmMessages {
 public:
  explicit ShmMessages(ShmEngine& engine);

  void send(const ConstBuffer& buffer, int to, int tag, const CallContext& context);
  void recv(const Buffer& buffer, int from, int tag, const CallContext& context);

 private:
  ShmEngine& engine_;
  SelfMessages own_;
  std::vector<int64_t> sent_;      // [place], messages
  std::vector<int64_t> received_;  // [place]
};

}  // namespace lockstep
