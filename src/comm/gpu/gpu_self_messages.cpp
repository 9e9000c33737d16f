#include "comm/gpu/gpu_self_messages.hpp"

#include <cuda_runtime_api.h>

#include "comm/make_call.hpp"
#include "lockstep/error.hpp"

namespace lockstep {

GpuSelfMessages::~GpuSelfMessages() {
  for (const Message& message : messages_) (void)cudaFree(message.bytes);
}

void GpuSelfMessages::send(const ConstBuffer& buffer, int tag, const CallContext& context) {
  Message message;
  message.call = make_message_call(Operation::kSend, ++sent_, buffer, tag, context.label);
  if (buffer.count > 0) {
    check_cuda(cudaMallocAsync(&message.bytes, static_cast<size_t>(buffer.bytes()), context.stream),
               "cudaMallocAsync");
    messages_.push_back(std::move(message));
    gpu_copy(messages_.back().bytes, buffer.data, buffer.bytes(), context.stream);
    messages_.back().filled.record(context.stream);
  } else {
    messages_.push_back(std::move(message));
  }
}

void GpuSelfMessages::recv(const Buffer& buffer, int tag, const CallContext& context) {
  const Call call =
      make_message_call(Operation::kRecv, received_ + 1, {buffer.data, buffer.count, buffer.dtype},
                        tag, context.label);
  if (messages_.empty()) {
    throw Error(Code::kUsage, describe(call) + ": this rank waits for a message from itself",
                "send it first");
  }
  const Message& message = messages_.front();
  require_same_message(group_, group_.rank, message.call, group_.rank, call);
  if (message.bytes != nullptr) {
    message.filled.hold(context.stream);
    gpu_copy(buffer.data, message.bytes, buffer.bytes(), context.stream);
    check_cuda(cudaFreeAsync(message.bytes, context.stream), "cudaFreeAsync");
  }
  ++received_;
  messages_.pop_front();
}

}  // namespace lockstep
