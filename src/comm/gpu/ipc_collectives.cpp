#include "comm/gpu/ipc_collectives.hpp"

#include <algorithm>
#include <array>
#include <span>

#include "comm/gpu/gpu_reduce.hpp"
#include "comm/make_call.hpp"

namespace lockstep {
namespace {

// Shares of a reduction begin at multiples of this, so that aligned buffers stay so.
constexpr int64_t kShareBytes = 128;

std::byte* bytes_at(void* data, int64_t bytes) {
  return static_cast<std::byte*>(data) + bytes;
}

}  // namespace

IpcMovement::IpcMovement(IpcCore& core, const Call& what, const CallContext& context,
                         const void* input, int64_t width)
    : IpcCollective(core, what, context),
      input_(static_cast<const std::byte*>(input)),
      width_(width),
      element_bytes_(dtype_bytes(what.dtype)),
      piece_count_(IpcCore::kSlotBytes / (element_bytes_ * width_)) {}

IpcPlace IpcMovement::place() const {
  return core_.locate(input_, call_.count * width_ * element_bytes_);
}

int64_t IpcMovement::count_of_piece() const {
  return std::min(piece_count_, call_.count - piece_begin());
}

std::unique_ptr<GpuExchange> IpcMovement::next() {
  switch (state_) {
    case State::kCompared:
      return start();
    case State::kSharing:
      core_.set_staging(core_.open(*exchange_, own_staging_, IpcCore::kStagingEvents));
      own_staging_.reset();
      state_ = State::kShared;
      return handshake();  // all have opened what may otherwise end with its owner
    case State::kShared:
      return stage_piece();
    case State::kStaged:
      return take_piece();
    case State::kTaken:
    case State::kDirect:
      break;
  }
  return finish();
}

std::unique_ptr<GpuExchange> IpcMovement::start() {
  factors_ = mean_factors(agreement_->calls());
  if (core_.size() == 1) move_alone();
  if (core_.size() == 1 || call_.count == 0) return nullptr;
  Contributions direct(static_cast<size_t>(core_.size()));
  bool all_direct = true;
  for (int place = 0; place < core_.size(); ++place) {
    if (!contributes(place)) continue;
    const auto where = agreement_->note<IpcPlace>(place);
    all_direct = all_direct && where.segment != 0;
    if (all_direct) direct[static_cast<size_t>(place)] = core_.address(place, where);
  }
  if (all_direct) {
    take_direct(direct);
    core_.record_moved();
    state_ = State::kDirect;
    return handshake();
  }
  core_.hold_own_ready(call_.sequence);
  if (core_.has_staging()) return stage_piece();
  own_staging_ = IpcCore::make_staging();
  state_ = State::kSharing;
  return core_.exchange(call_, context_.deadline_ns, own_staging_->card());
}

// Into the slot that the piece before the last one used, when all have taken that.
std::unique_ptr<GpuExchange> IpcMovement::stage_piece() {
  if (piece_ >= 2) core_.hold_all_taken(piece_);
  if (contributes(core_.rank())) {
    const int64_t bytes = count_of_piece() * element_bytes_;
    for (int64_t block = 0; block < width_; ++block) {
      const int64_t from = (block * call_.count + piece_begin()) * element_bytes_;
      gpu_copy(core_.slot(core_.rank(), piece_) + block * bytes, input_ + from, bytes,
               core_.stream());
    }
  }
  core_.record_staged(piece_);
  state_ = State::kStaged;
  return handshake();
}

std::unique_ptr<GpuExchange> IpcMovement::take_piece() {
  core_.hold_all_staged(piece_);
  Contributions from(static_cast<size_t>(core_.size()));
  for (int place = 0; place < core_.size(); ++place) {
    if (contributes(place)) from[static_cast<size_t>(place)] = core_.slot(place, piece_);
  }
  take(piece_begin(), count_of_piece(), count_of_piece(), from);
  core_.record_taken(piece_);
  ++piece_;
  if (piece_begin() < call_.count) return stage_piece();
  state_ = State::kTaken;
  return handshake();
}

// All have queued their part: this rank's memory is its own again when they are over.
std::unique_ptr<GpuExchange> IpcMovement::finish() {
  if (state_ == State::kDirect) {
    core_.hold_all_moved();
  } else {
    core_.hold_all_taken(piece_ - 1);
    if (piece_ >= 2) core_.hold_all_taken(piece_ - 2);
  }
  mark_result();
  return nullptr;
}

void IpcMovement::take_direct(const Contributions& from) {
  core_.hold_all_ready(call_.sequence);
  take(0, call_.count, call_.count, from);
}

IpcAllReduce::IpcAllReduce(IpcCore& core, const Buffer& buffer, ReduceOp op, double weight,
                           const CallContext& context)
    : IpcMovement(core,
                  make_reduce_call(Operation::kAllReduce, buffer.dtype, buffer.count, op, weight),
                  context, buffer.data, 1),
      buffer_(buffer) {}

void IpcAllReduce::take(int64_t begin, int64_t count, int64_t /*stride*/,
                        const Contributions& from) {
  const std::vector<const void*> inputs(from.begin(), from.end());
  const std::array<void*, 1> output = {bytes_at(buffer_.data, begin * element_bytes_)};
  gpu_reduce(buffer_.dtype, call_.reduce, inputs, factors_, output, count, core_.stream());
}

// GPUs reduce a share each. Processes have one GPU in turns, so that shares would only add turns:
// there, one rank after the other does a whole call for all.
void IpcAllReduce::take_direct(const Contributions& from) {
  int64_t begin = 0;
  int64_t end = call_.count;
  if (core_.one_gpu()) {
    if (call_.sequence % core_.size() != core_.rank()) return;
  } else {
    const int64_t unit = kShareBytes / element_bytes_;
    const int64_t units = (call_.count + unit - 1) / unit;
    const int64_t share = (units + core_.size() - 1) / core_.size() * unit;
    begin = std::min(core_.rank() * share, call_.count);
    end = std::min(begin + share, call_.count);
  }
  core_.hold_all_ready(call_.sequence);
  std::vector<const void*> inputs;
  std::vector<void*> outputs;
  for (const std::byte* buffer : from) {
    inputs.push_back(buffer + begin * element_bytes_);
    outputs.push_back(bytes_at(const_cast<std::byte*>(buffer), begin * element_bytes_));
  }
  gpu_reduce(buffer_.dtype, call_.reduce, inputs, factors_, outputs, end - begin, core_.stream());
}

IpcBroadcast::IpcBroadcast(IpcCore& core, const Buffer& buffer, int root,
                           const CallContext& context)
    : IpcMovement(core, make_broadcast_call(buffer, root), context, buffer.data, 1),
      buffer_(buffer) {}

void IpcBroadcast::take(int64_t begin, int64_t count, int64_t /*stride*/,
                        const Contributions& from) {
  if (core_.rank() == call_.root) return;
  gpu_copy(bytes_at(buffer_.data, begin * element_bytes_), from[static_cast<size_t>(call_.root)],
           count * element_bytes_, core_.stream());
}

IpcReduceScatter::IpcReduceScatter(IpcCore& core, const ConstBuffer& input, const Buffer& output,
                                   ReduceOp op, double weight, const CallContext& context)
    : IpcMovement(
          core, make_reduce_call(Operation::kReduceScatter, output.dtype, output.count, op, weight),
          context, input.data, core.size()),
      output_(output) {}

void IpcReduceScatter::move_alone() {
  gpu_copy(output_.data, input_, output_.bytes(), caller_stream());
}

void IpcReduceScatter::take(int64_t begin, int64_t count, int64_t stride,
                            const Contributions& from) {
  std::vector<const void*> inputs;
  for (const std::byte* blocks : from) {
    inputs.push_back(blocks + core_.rank() * stride * element_bytes_);
  }
  const std::array<void*, 1> output = {bytes_at(output_.data, begin * element_bytes_)};
  gpu_reduce(output_.dtype, call_.reduce, inputs, factors_, output, count, core_.stream());
}

IpcAllGather::IpcAllGather(IpcCore& core, const ConstBuffer& input, const Buffer& output,
                           const CallContext& context)
    : IpcMovement(core, make_call(Operation::kAllGather, input.dtype, input.count), context,
                  input.data, 1),
      output_(output) {}

void IpcAllGather::move_alone() {
  gpu_copy(output_.data, input_, output_.bytes(), caller_stream());
}

void IpcAllGather::take(int64_t begin, int64_t count, int64_t /*stride*/,
                        const Contributions& from) {
  for (int place = 0; place < core_.size(); ++place) {
    const int64_t to = (place * call_.count + begin) * element_bytes_;
    gpu_copy(bytes_at(output_.data, to), from[static_cast<size_t>(place)], count * element_bytes_,
             core_.stream());
  }
}

}  // namespace lockstep
