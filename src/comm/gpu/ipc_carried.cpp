#include "comm/gpu/ipc_carried.hpp"

#include "lockstep/error.hpp"

namespace lockstep {

IpcCarried::IpcCarried(IpcCore& core, const Call& call, const CallContext& context,
                       const std::byte* input, std::byte* output)
    : core_(core),
      call_(call),
      deadline_ns_(context.deadline_ns),
      stream_(context.stream),
      area_(core.host_area()),
      output_(output),
      below_(area_.memory.data()),
      result_(below_) {
  const int64_t bytes = call.count * dtype_bytes(call.dtype);
  const int64_t all_bytes = bytes * core.size();
  const bool scatters = call.operation == Operation::kReduceScatter;
  const bool gathers = call.operation == Operation::kAllGather;
  if (scatters || gathers) result_ += IpcCore::kCarriedBytes;
  output_bytes_ = gathers ? all_bytes : bytes;
  area_.free.hold(stream_);
  if (input != nullptr) gpu_copy(below_, input, scatters ? all_bytes : bytes, stream_);
  down_.record(stream_);
  area_.free.record(stream_);  // where this call fails before it takes anything up
}

bool IpcCarried::advance() {
  if (done_) return true;
  if (!moving_) {
    if (!down_.reached()) return false;
    begin_moving();
  }
  try {
    if (pending_ && !pending_->advance()) return false;
  } catch (const Error&) {
    rethrow_as_part_of(core_.group(), call_);
  }
  take_up();
  return true;
}

void IpcCarried::wait() {
  if (done_) return;
  if (!moving_) {
    core_.await(down_, call_, deadline_ns_);
    begin_moving();
  }
  try {
    if (pending_) pending_->wait();
  } catch (const Error&) {
    rethrow_as_part_of(core_.group(), call_);
  }
  take_up();
}

// Only an all_reduce is begun by one call and ended by another: the others' callers wait, so that
// they may wait here.
void IpcCarried::begin_moving() {
  moving_ = true;
  Backend& host = core_.control().channel(IpcCore::kSteps);
  const CallContext context{.deadline_ns = deadline_ns_, .label = ""};
  const Buffer block{result_, call_.count, call_.dtype};
  const Buffer blocks{result_, call_.count * core_.size(), call_.dtype};
  try {
    switch (call_.operation) {
      case Operation::kAllReduce:
        pending_ = host.all_reduce(block, call_.reduce, call_.weight, context);
        return;
      case Operation::kBroadcast:
        return host.broadcast(block, call_.root, context);
      case Operation::kReduceScatter:
        return host.reduce_scatter({below_, blocks.count, call_.dtype}, block, call_.reduce,
                                   call_.weight, context);
      case Operation::kAllGather:
        return host.all_gather({below_, call_.count, call_.dtype}, blocks, context);
      default:
        throw Error(Code::kInternal, describe(call_) + " moves no elements");
    }
  } catch (const RankError&) {
    rethrow_as_part_of(core_.group(), call_);
  }
}

void IpcCarried::take_up() {
  pending_.reset();
  if (output_ != nullptr) gpu_copy(output_, result_, output_bytes_, stream_);
  area_.free.record(stream_);
  done_ = true;
}

}  // namespace lockstep
