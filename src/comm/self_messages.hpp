#pragma once

#include <cstring>
#include <deque>
#include <vector>

#include "comm/backend.hpp"
#include "lockstep/error.hpp"

namespace lockstep {

/// Messages of a rank to itself: kept until it receives them.
class SelfMessages {
 public:
  explicit SelfMessages(const Group& group)
      : pair_{.rank = 0,
              .world_ranks = {group.world_ranks[static_cast<size_t>(group.rank)],
                              group.world_ranks[static_cast<size_t>(group.rank)]},
              .name = group.name} {}

  void send(const ConstBuffer& buffer, int tag, const CallContext& context) {
    Message message;
    message.call = call_of(Operation::kSend, buffer, tag, ++sent_, context);
    const auto* bytes = static_cast<const char*>(buffer.data);
    message.bytes.assign(bytes, bytes + buffer.bytes());
    messages_.push_back(std::move(message));
  }

  void recv(const Buffer& buffer, int tag, const CallContext& context) {
    const Call call = call_of(Operation::kRecv, {buffer.data, buffer.count, buffer.dtype}, tag,
                              received_ + 1, context);
    if (messages_.empty()) {
      throw Error(Code::kUsage, describe(call) + ": this rank waits for a message from itself",
                  "send it first");
    }
    const Message& message = messages_.front();
    if (!agree(message.call, call)) throw_mismatch(pair_, std::vector<Call>{message.call, call});
    if (!message.bytes.empty()) {
      std::memcpy(buffer.data, message.bytes.data(), message.bytes.size());
    }
    ++received_;
    messages_.pop_front();
  }

 private:
  struct Message {
    Call call;
    std::vector<char> bytes;
  };

  static Call call_of(Operation operation, const ConstBuffer& buffer, int tag, int64_t sequence,
                      const CallContext& context) {
    Call call;
    call.operation = operation;
    call.sequence = sequence;
    call.count = buffer.count;
    call.dtype = buffer.dtype;
    call.root = tag;
    call.set_label(context.label);
    return call;
  }

  Group pair_;  // this rank, twice
  int64_t sent_ = 0;
  int64_t received_ = 0;
  std::deque<Message> messages_;
};

}  // namespace lockstep
