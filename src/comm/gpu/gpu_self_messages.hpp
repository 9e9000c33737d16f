#pragma once

#include <deque>

#include "comm/backend.hpp"
#include "comm/gpu/gpu_runtime.hpp"

namespace lockstep {

/// Messages of a rank to itself: copies on its GPU, kept until it receives them.
class GpuSelfMessages {
 public:
  explicit GpuSelfMessages(const Group& group) : group_(group) {}
  ~GpuSelfMessages();
  GpuSelfMessages(const GpuSelfMessages&) = delete;
  GpuSelfMessages& operator=(const GpuSelfMessages&) = delete;

  /// In the order of context.stream; the current GPU is this rank's.
  void send(const ConstBuffer& buffer, int tag, const CallContext& context);
  void recv(const Buffer& buffer, int tag, const CallContext& context);

 private:
  struct Message {
    Call call;
    void* bytes = nullptr;
    GpuEvent filled;
  };

  Group group_;
  int64_t sent_ = 0;
  int64_t received_ = 0;
  std::deque<Message> messages_;
};

}  // namespace lockstep
