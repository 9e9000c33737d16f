#pragma once

#include <cstring>
#include <deque>
#include <vector>

#include "comm/arguments.hpp"
#include "comm/backend.hpp"
#include "comm/failure.hpp"
#include "lockstep/error.hpp"

namespace lockstep {

/// Messages of a rank to itself: kept until it receives them.
class SelfMessages {
 public:
  explicit SelfMessages(const Group& group) : group_(group) {}

  void send(const ConstBuffer& buffer, int tag, const CallContext& context) {
    Message message;
    message.call = make_message_fingerprint(Operation::kSend, ++sent_, buffer, tag, context.label);
    const auto* bytes = static_cast<const char*>(buffer.data);
    message.bytes.assign(bytes, bytes + buffer.bytes());
    messages_.push_back(std::move(message));
  }

  void recv(const Buffer& buffer, int tag, const CallContext& context) {
    const Fingerprint call =
        make_message_fingerprint(Operation::kRecv, received_ + 1,
                                 {buffer.data, buffer.count, buffer.dtype}, tag, context.label);
    if (messages_.empty()) {
      throw Error(Code::kUsage, describe(call) + ": this rank waits for a message from itself",
                  "send it first");
    }
    const Message& message = messages_.front();
    require_same_message(group_, group_.rank, message.call, group_.rank, call);
    if (!message.bytes.empty()) {
      std::memcpy(buffer.data, message.bytes.data(), message.bytes.size());
    }
    ++received_;
    messages_.pop_front();
  }

 private:
  struct Message {
    Fingerprint call;
    std::vector<char> bytes;
  };

  Group group_;
  int64_t sent_ = 0;
  int64_t received_ = 0;
  std::deque<Message> messages_;
};

}  // namespace lockstep
