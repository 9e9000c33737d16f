#include "comm/gpu/gpu_control.hpp"

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include "comm/arguments.hpp"
#include "lockstep/error.hpp"

namespace lockstep {
namespace {

std::vector<std::byte> fingerprint_and_note(const Fingerprint& call,
                                            std::span<const std::byte> note) {
  std::vector<std::byte> block(sizeof call + note.size());
  std::memcpy(block.data(), &call, sizeof call);
  if (!note.empty()) std::memcpy(block.data() + sizeof call, note.data(), note.size());
  return block;
}

std::vector<std::unique_ptr<Backend>> split_off(Backend& host, int channels, int64_t deadline_ns) {
  std::vector<std::unique_ptr<Backend>> parts;
  for (int i = 0; i < channels; ++i) {
    parts.push_back(host.split(0, host.rank(), host.group().name, {.deadline_ns = deadline_ns}));
  }
  return parts;
}

}  // namespace

GpuExchange::GpuExchange(Backend& channel, const Fingerprint& part_of,
                         std::span<const std::byte> own, int64_t deadline_ns)
    : channel_(channel),
      part_of_(part_of),
      block_bytes_(own.size()),
      blocks_(block_bytes_ * static_cast<size_t>(channel.size())) {
  if (!own.empty()) {
    std::memcpy(blocks_.data() + block_bytes_ * static_cast<size_t>(channel.rank()), own.data(),
                block_bytes_);
  }
  if (channel.size() == 1) return;
  // All other ranks have zeros where this one has its block: the sum is every rank's.
  const Buffer buffer{blocks_.data(), static_cast<int64_t>(blocks_.size()), Dtype::kU8};
  work_ = channel.all_reduce(buffer, ReduceOp::kSum, 1,
                             {.deadline_ns = deadline_ns, .part_of = &part_of_});
}

// A peer that missed this rank and gave up knows nothing of the call in which this rank waits
// itself: the two made different calls.
template <class Action>
auto GpuExchange::waiting(Action&& action) {
  try {
    return action();
  } catch (const CollectiveError& error) {
    const Group& group = channel_.group();
    const AbortRecord& theirs = error.record();
    if (theirs.code != Code::kRankAbsent || theirs.blamed != group.rank) throw;
    AbortRecord record{.code = Code::kCallMismatch, .by = group.rank};
    record.text = fmt::format(
        "ranks made different calls and wait for each other: rank {} called {}; rank {} gave up in "
        "{}",
        group.world_rank(group.rank), describe_in(group, part_of_), group.world_rank(theirs.by),
        theirs.text);
    const std::string message = record.text;
    throw CollectiveError(Code::kCallMismatch, -1, std::move(record), message,
                          "make the same calls in the same order on every rank");
  }
}

bool GpuExchange::advance() {
  return waiting([&] { return !work_ || work_->advance(); });
}

void GpuExchange::wait() {
  waiting([&] {
    if (work_) work_->wait();
  });
}

std::span<const std::byte> GpuExchange::block(int peer) const {
  return std::span(blocks_).subspan(block_bytes_ * static_cast<size_t>(peer), block_bytes_);
}

GpuAgreement::GpuAgreement(const ControlSession& session, Backend& channel, const Fingerprint& own,
                           std::span<const std::byte> note, int64_t deadline_ns)
    : session_(session), exchange_(channel, own, fingerprint_and_note(own, note), deadline_ns) {}

bool GpuAgreement::advance() {
  if (!calls_.empty()) return true;
  if (!exchange_.advance()) return false;
  compare();
  return true;
}

void GpuAgreement::wait() {
  if (!calls_.empty()) return;
  exchange_.wait();
  compare();
}

void GpuAgreement::compare() {
  std::vector<Fingerprint> calls(static_cast<size_t>(session_.size()));
  for (size_t peer = 0; peer < calls.size(); ++peer) {
    std::memcpy(&calls[peer], exchange_.block(static_cast<int>(peer)).data(), sizeof(Fingerprint));
  }
  session_.require_agreement(calls);
  calls_ = std::move(calls);
}

GpuControl::GpuControl(Backend& host, int channels, int64_t deadline_ns)
    : GpuControl(split_off(host, channels, deadline_ns)) {}

GpuControl::GpuControl(std::vector<std::unique_ptr<Backend>> channels)
    : channels_(std::move(channels)), session_(channels_.front()->group(), this) {}

Fingerprint GpuControl::number(Fingerprint what, const CallContext& context) {
  what.sequence = session_.next_collective();
  what.set_label(context.label);
  return what;
}

std::unique_ptr<GpuAgreement> GpuControl::agree(const Fingerprint& numbered,
                                                const CallContext& context,
                                                std::span<const std::byte> note) {
  return std::make_unique<GpuAgreement>(session_, channel(0), numbered, note, context.deadline_ns);
}

std::unique_ptr<GpuControl> GpuControl::split(int color, int key, std::string_view group_name,
                                              const Fingerprint& part_of,
                                              const CallContext& context) {
  std::vector<std::unique_ptr<Backend>> parts;
  for (const auto& channel : channels_) {
    parts.push_back(channel->split(color, key, group_name,
                                   {.deadline_ns = context.deadline_ns, .part_of = &part_of}));
  }
  return std::unique_ptr<GpuControl>(new GpuControl(std::move(parts)));
}

void GpuControl::publish(const AbortRecord& record) {
  for (const auto& channel : channels_) {
    if (channel) channel->abort(record);
  }
}

GpuSelfMessages::~GpuSelfMessages() {
  for (const Message& message : messages_) (void)cudaFree(message.bytes);
}

void GpuSelfMessages::send(const ConstBuffer& buffer, int tag, const CallContext& context) {
  Message message;
  message.call = make_message_fingerprint(Operation::kSend, ++sent_, buffer, tag, context.label);
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
  const Fingerprint call =
      make_message_fingerprint(Operation::kRecv, received_ + 1,
                               {buffer.data, buffer.count, buffer.dtype}, tag, context.label);
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
