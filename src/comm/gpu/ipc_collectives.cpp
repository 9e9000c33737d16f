#include "comm/gpu/ipc_collectives.hpp"

#include <algorithm>
#include <array>
#include <span>

#include "comm/gpu/gpu_reduce.hpp"
#include "comm/gpu/ipc_carried.hpp"
#include "comm/make_call.hpp"

namespace lockstep {
namespace {

// Shares of a reduction begin at multiples of this, so that aligned buffers stay so.
constexpr int64_t kShareBytes = 128;

std::byte* bytes_at(void* data, int64_t bytes) {
  return static_cast<std::byte*>(data) + bytes;
}

// All ranks make staging areas and open each other's.
class StagingShared final : public Awaited {
 public:
  StagingShared(IpcCore& core, const Call& why, int64_t deadline_ns)
      : core_(core),
        why_(why),
        deadline_ns_(deadline_ns),
        own_(IpcCore::make_staging()),
        cards_(core.exchange(why, deadline_ns, own_->card())) {}

  bool advance() override {
    if (!opened_ && !cards_->advance()) return false;
    open();
    return opened_->advance();
  }
  void wait() override {
    cards_->wait();
    open();
    opened_->wait();
  }

 private:
  void open() {
    if (opened_) return;
    core_.set_staging(core_.open(*cards_, own_, IpcCore::kStagingEvents));
    opened_ =
        core_.exchange(why_, deadline_ns_);  // what is opened may otherwise end with its owner
  }

  IpcCore& core_;
  Call why_;
  int64_t deadline_ns_;
  std::shared_ptr<IpcShare> own_;
  std::unique_ptr<GpuExchange> cards_;
  std::unique_ptr<GpuExchange> opened_;  // null until this rank has opened all
};

}  // namespace

// A call that fits into all slots together is one piece: pieces have a price where processes have
// the GPU in turns.
IpcMovement::IpcMovement(IpcCore& core, const Call& what, const CallContext& context,
                         const void* input, int64_t width, const Buffer& output)
    : IpcCollective(core, what, context),
      input_(static_cast<const std::byte*>(input)),
      width_(width),
      output_(output),
      element_bytes_(dtype_bytes(what.dtype)),
      piece_count_(IpcCore::kSlotBytes / (element_bytes_ * width_)) {
  if (call_.count <= IpcCore::kSlots * piece_count_) piece_count_ = call_.count;
}

IpcPlace IpcMovement::place() const {
  return core_.locate(input_, call_.count * width_ * element_bytes_);
}

int64_t IpcMovement::count_of_piece() const {
  return std::min(piece_count_, call_.count - piece_begin());
}

std::unique_ptr<Awaited> IpcMovement::next() {
  switch (state_) {
    case State::kCompared:
      return start();
    case State::kShared:
      return stage_piece();
    case State::kStaged:
      return take_piece();
    case State::kTaken:
    case State::kDirect:
    case State::kCarried:
      break;
  }
  return finish();
}

bool IpcMovement::is_carried() const {
  return core_.carries(std::max(call_.count * width_ * element_bytes_, output_.bytes()));
}

std::unique_ptr<Awaited> IpcMovement::start() {
  factors_ = mean_factors(agreement_->calls());
  if (core_.size() == 1) move_alone();
  if (core_.size() == 1 || call_.count == 0) return nullptr;
  if (is_carried()) {
    state_ = State::kCarried;
    return std::make_unique<IpcCarried>(core_, call_, context_,
                                        contributes(core_.rank()) ? input_ : nullptr,
                                        receives() ? bytes_at(output_.data, 0) : nullptr);
  }
  if (const Contributions direct = direct_contributions(); !direct.empty()) {
    take_direct(direct);
    core_.record_moved();
    state_ = State::kDirect;
    return handshake();
  }
  core_.hold_own_ready(call_.sequence);
  if (core_.has_staging()) return stage_piece();
  state_ = State::kShared;
  return std::make_unique<StagingShared>(core_, call_, context_.deadline_ns);
}

// Empty where peers cannot reach them all.
IpcMovement::Contributions IpcMovement::direct_contributions() const {
  Contributions direct(static_cast<size_t>(core_.size()));
  for (int place = 0; place < core_.size(); ++place) {
    if (!contributes(place)) continue;
    const auto where = agreement_->note<IpcPlace>(place);
    if (where.segment == 0) return {};
    direct[static_cast<size_t>(place)] = core_.address(place, where);
  }
  return direct;
}

// Into the slot that the piece before the last one used, when all have taken that.
std::unique_ptr<Awaited> IpcMovement::stage_piece() {
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

std::unique_ptr<Awaited> IpcMovement::take_piece() {
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
std::unique_ptr<Awaited> IpcMovement::finish() {
  if (state_ == State::kCarried) return nullptr;
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
                  context, buffer.data, 1, buffer) {}

void IpcAllReduce::take(int64_t begin, int64_t count, int64_t /*stride*/,
                        const Contributions& from) {
  const std::vector<const void*> inputs(from.begin(), from.end());
  const std::array<void*, 1> output = {bytes_at(output_.data, begin * element_bytes_)};
  gpu_reduce(output_.dtype, call_.reduce, inputs, factors_, output, count, core_.stream());
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
  gpu_reduce(output_.dtype, call_.reduce, inputs, factors_, outputs, end - begin, core_.stream());
}

IpcBroadcast::IpcBroadcast(IpcCore& core, const Buffer& buffer, int root,
                           const CallContext& context)
    : IpcMovement(core, make_broadcast_call(buffer, root), context, buffer.data, 1, buffer) {}

void IpcBroadcast::take(int64_t begin, int64_t count, int64_t /*stride*/,
                        const Contributions& from) {
  if (!receives()) return;
  gpu_copy(bytes_at(output_.data, begin * element_bytes_), from[static_cast<size_t>(call_.root)],
           count * element_bytes_, core_.stream());
}

IpcReduceScatter::IpcReduceScatter(IpcCore& core, const ConstBuffer& input, const Buffer& output,
                                   ReduceOp op, double weight, const CallContext& context)
    : IpcMovement(
          core, make_reduce_call(Operation::kReduceScatter, output.dtype, output.count, op, weight),
          context, input.data, core.size(), output) {}

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
                  input.data, 1, output) {}

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
