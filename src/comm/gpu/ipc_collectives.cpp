#include <algorithm>
#include <array>
#include <memory>
#include <span>

#include "comm/arguments.hpp"
#include "comm/backend.hpp"
#include "comm/gpu/gpu_control.hpp"
#include "comm/gpu/gpu_reduce.hpp"
#include "comm/gpu/ipc_collectives.hpp"
#include "comm/gpu/ipc_core.hpp"
#include "lockstep/error.hpp"

namespace lockstep {

/// A small collective through the host's memory: values come down, the host's backend moves them,
/// and the result goes up. Processes have a GPU in turns, and a wait for another one's event costs
/// a turn, about 2 ms: more than this whole way takes. All happens on the call's own stream, since
/// waits between streams cost too. Results are those of the other ways, to the bit.
class IpcHostStaged final : public Awaited {
 public:
  /// `input` is null if this rank contributes nothing, `output` if it gets nothing.
  IpcHostStaged(IpcCore& core, const Fingerprint& call, const CallContext& context,
                const std::byte* input, std::byte* output);
  IpcHostStaged(const IpcHostStaged&) = delete;
  IpcHostStaged& operator=(const IpcHostStaged&) = delete;

  /// True when the result is on its way up.
  bool advance() override;
  void wait() override;

 private:
  void begin_moving();
  void take_up();

  IpcCore& core_;
  Fingerprint call_;
  int64_t deadline_ns_;
  CudaStream stream_;
  IpcCore::HostArea& area_;
  std::byte* output_;
  int64_t output_bytes_;
  std::byte* below_;   // on the host: what came down, and the result of calls in place
  std::byte* result_;  // on the host
  GpuEvent down_;      // values have come down
  bool moving_ = false;
  bool done_ = false;
  std::unique_ptr<Backend::Work> work_;  // of the host's call
};

IpcHostStaged::IpcHostStaged(IpcCore& core, const Fingerprint& call, const CallContext& context,
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
  if (scatters || gathers) result_ += IpcCore::kHostStagedBytes;
  output_bytes_ = gathers ? all_bytes : bytes;
  area_.free.hold(stream_);
  if (input != nullptr) gpu_copy(below_, input, scatters ? all_bytes : bytes, stream_);
  down_.record(stream_);
  area_.free.record(stream_);  // where this call fails before it takes anything up
}

bool IpcHostStaged::advance() {
  if (done_) return true;
  if (!moving_) {
    if (!IpcCore::reached(down_, call_, deadline_ns_)) return false;
    begin_moving();
  }
  if (!work_->advance()) return false;
  take_up();
  return true;
}

void IpcHostStaged::wait() {
  if (done_) return;
  if (!moving_) {
    core_.await(down_, call_, deadline_ns_);
    begin_moving();
  }
  work_->wait();
  take_up();
}

void IpcHostStaged::begin_moving() {
  moving_ = true;
  Backend& host = core_.control().channel(IpcCore::kSteps);
  const CallContext context{.deadline_ns = deadline_ns_, .part_of = &call_};
  const Buffer block{result_, call_.count, call_.dtype};
  const Buffer blocks{result_, call_.count * core_.size(), call_.dtype};
  switch (call_.operation) {
    case Operation::kAllReduce:
      work_ = host.all_reduce(block, call_.reduce, call_.weight, context);
      return;
    case Operation::kBroadcast:
      work_ = host.broadcast(block, call_.root, context);
      return;
    case Operation::kReduce:
      work_ = host.reduce(block, call_.root, call_.reduce, call_.weight, context);
      return;
    case Operation::kReduceScatter:
      work_ = host.reduce_scatter({below_, blocks.count, call_.dtype}, block, call_.reduce,
                                  call_.weight, context);
      return;
    case Operation::kAllGather:
      work_ = host.all_gather({below_, call_.count, call_.dtype}, blocks, context);
      return;
    default:
      throw Error(Code::kInternal, describe(call_) + " moves no elements");
  }
}

void IpcHostStaged::take_up() {
  work_.reset();
  if (output_ != nullptr) gpu_copy(output_, result_, output_bytes_, stream_);
  area_.free.record(stream_);
  done_ = true;
}

/// Blocks of different counts, through the host's memory.
class IpcHostExchange final : public Awaited {
 public:
  IpcHostExchange(IpcCore& core, const Fingerprint& call, const CallContext& context,
                  const ConstBuffer& input, const Buffer& output, const BlockExchange& blocks)
      : core_(core),
        call_(call),
        deadline_ns_(context.deadline_ns),
        stream_(context.stream),
        output_(output),
        blocks_(blocks),
        below_(std::max<int64_t>(input.bytes(), 1)),
        result_(std::max<int64_t>(output.bytes(), 1)) {
    gpu_copy(below_.data(), input.data, input.bytes(), stream_);
    down_.record(stream_);
    input_ = {below_.data(), input.count, input.dtype};
  }
  IpcHostExchange(const IpcHostExchange&) = delete;
  IpcHostExchange& operator=(const IpcHostExchange&) = delete;

  bool advance() override {
    if (done_) return true;
    if (!work_ && !IpcCore::reached(down_, call_, deadline_ns_)) return false;
    begin_moving();
    if (!work_->advance()) return false;
    take_up();
    return true;
  }
  void wait() override {
    if (done_) return;
    if (!work_) core_.await(down_, call_, deadline_ns_);
    begin_moving();
    work_->wait();
    take_up();
  }

 private:
  void begin_moving() {
    if (work_) return;
    work_ = core_.control()
                .channel(IpcCore::kSteps)
                .exchange(input_, {result_.data(), output_.count, output_.dtype}, blocks_,
                          {.deadline_ns = deadline_ns_, .part_of = &call_});
  }
  // The host waits for the copy: its memory goes with this object.
  void take_up() {
    gpu_copy(output_.data, result_.data(), output_.bytes(), stream_);
    const GpuEvent up;
    up.record(stream_);
    core_.await(up, call_, deadline_ns_);
    done_ = true;
  }

  IpcCore& core_;
  Fingerprint call_;
  int64_t deadline_ns_;
  CudaStream stream_;
  Buffer output_;
  BlockExchange blocks_;
  PinnedMemory below_;
  PinnedMemory result_;
  ConstBuffer input_;
  GpuEvent down_;
  bool done_ = false;
  std::unique_ptr<Backend::Work> work_;  // of the host's call; null until it has begun
};

// How a collective goes on, and those that move no elements.

namespace {

class IpcMemory final : public RegisteredMemory {
 public:
  IpcMemory(std::shared_ptr<IpcShare> share, std::shared_ptr<std::atomic<bool>> dropped)
      : share_(std::move(share)), dropped_(std::move(dropped)) {}
  ~IpcMemory() override { dropped_->store(true); }
  IpcMemory(const IpcMemory&) = delete;
  IpcMemory& operator=(const IpcMemory&) = delete;

  void* data() const override { return share_->memory(); }
  int64_t bytes() const override { return share_->bytes(); }

 private:
  std::shared_ptr<IpcShare> share_;
  std::shared_ptr<std::atomic<bool>> dropped_;
};

}  // namespace

void IpcCollective::begin() {
  call_ = core_.control().number(call_, context_);
  context_.label = {};
  if (is_awaited()) core_.record_ready(call_.sequence, context_.stream);
  const IpcLocation own = peer();
  agreement_ = core_.control().agree(call_, context_, std::as_bytes(std::span(&own, 1)));
}

bool IpcCollective::go_on(Patience patience) {
  const auto over = [&](auto& awaited) {
    if (patience == Patience::kLookOnce) return awaited.advance();
    awaited.wait();
    return true;
  };
  if (done_) return true;
  if (!agreed_) {
    if (!over(*agreement_)) return false;
    agreed_ = true;
  }
  for (;;) {
    if (before_next_ && !over(*before_next_)) return false;
    before_next_ = next();
    if (before_next_) continue;
    done_ = true;
    return true;
  }
}

void IpcCollective::mark_result() {
  result_.emplace();
  result_->record(core_.stream());
}

void IpcCollective::hold_caller() {
  if (!result_) return;
  result_->hold(context_.stream);
  result_.reset();
}

std::unique_ptr<Awaited> IpcBarrier::next() {
  if (held_ || core_.size() == 1) return nullptr;
  core_.hold_all_ready(call_.sequence);
  mark_result();
  held_ = true;
  return handshake();  // all wait for the events of this barrier, not for later ones
}

IpcAllocate::IpcAllocate(IpcCore& core, int64_t bytes, const CallContext& context)
    : IpcCollective(core, make_fingerprint(Operation::kAllocate, Dtype::kU8, bytes), context) {}

std::unique_ptr<Awaited> IpcAllocate::next() {
  free_dropped();
  const auto own = IpcShare::make(call_.count, 0);
  auto dropped = std::make_shared<std::atomic<bool>>(false);
  memory_ = std::make_shared<IpcMemory>(own, dropped);
  if (call_.count == 0) return nullptr;
  const auto handles = core_.exchange(call_, context_.deadline_ns, own->handle());
  handles->wait();
  core_.segments().push_back(
      {core_.next_segment(), call_.count, core_.open(*handles, own, 0), std::move(dropped)});
  handshake()->wait();  // all have opened what may otherwise end with its owner
  return nullptr;
}

// Frees what all ranks have dropped: first nobody uses a peer's memory any more, then each frees
// its own.
void IpcAllocate::free_dropped() {
  auto& segments = core_.segments();
  std::vector<std::byte> own;
  for (const IpcSegment& segment : segments) own.push_back(std::byte{segment.dropped->load()});
  if (own.empty()) return;
  const auto all = core_.exchange(call_, context_.deadline_ns, own);
  all->wait();
  std::vector<IpcSegment> kept;
  std::vector<IpcSegment> freed;
  for (size_t i = 0; i < segments.size(); ++i) {
    bool dropped = true;
    for (int peer = 0; peer < core_.size(); ++peer) {
      dropped = dropped && all->block(peer)[i] != std::byte{0};
    }
    (dropped ? freed : kept).push_back(std::move(segments[i]));
  }
  segments = std::move(kept);
  if (freed.empty()) return;
  core_.wait_until_idle(call_, context_.deadline_ns);
  for (IpcSegment& segment : freed) {
    for (int peer = 0; peer < core_.size(); ++peer) {
      if (peer != core_.rank()) segment.shares[static_cast<size_t>(peer)].reset();
    }
  }
  handshake()->wait();
}

IpcSplit::IpcSplit(IpcCore& core, int color, int key, std::string_view group_name,
                   const CallContext& context)
    : IpcCollective(core, make_fingerprint(Operation::kSplit, Dtype::kU8, 0), context),
      color_(color),
      key_(key),
      group_name_(group_name) {}

std::unique_ptr<Awaited> IpcSplit::next() {
  part_ = core_.control().split(color_, key_, group_name_, call_, context_);
  return nullptr;
}

namespace {

// Shares of a reduction begin at multiples of this, so that aligned buffers stay so.
constexpr int64_t kShareBytes = 128;

std::byte* bytes_at(void* data, int64_t bytes) {
  return static_cast<std::byte*>(data) + bytes;
}

// All ranks make staging areas and open each other's.
class StagingShared final : public Awaited {
 public:
  StagingShared(IpcCore& core, const Fingerprint& why, int64_t deadline_ns)
      : core_(core),
        why_(why),
        deadline_ns_(deadline_ns),
        own_(IpcCore::make_staging()),
        handles_(core.exchange(why, deadline_ns, own_->handle())) {}

  bool advance() override {
    if (!opened_ && !handles_->advance()) return false;
    open();
    return opened_->advance();
  }
  void wait() override {
    handles_->wait();
    open();
    opened_->wait();
  }

 private:
  void open() {
    if (opened_) return;
    core_.set_staging(core_.open(*handles_, own_, IpcCore::kStagingEvents));
    opened_ =
        core_.exchange(why_, deadline_ns_);  // what is opened may otherwise end with its owner
  }

  IpcCore& core_;
  Fingerprint why_;
  int64_t deadline_ns_;
  std::shared_ptr<IpcShare> own_;
  std::unique_ptr<GpuExchange> handles_;
  std::unique_ptr<GpuExchange> opened_;  // null until this rank has opened all
};

}  // namespace

// A call that fits into all slots together is one chunk: each chunk costs a turn if processes share
// the GPU.
IpcMovement::IpcMovement(IpcCore& core, const Fingerprint& what, const CallContext& context,
                         const void* input, int64_t width, const Buffer& output)
    : IpcCollective(core, what, context),
      input_(static_cast<const std::byte*>(input)),
      width_(width),
      output_(output),
      element_bytes_(dtype_bytes(what.dtype)),
      chunk_count_(IpcCore::kSlotBytes / (element_bytes_ * width_)) {
  if (call_.count <= IpcCore::kSlots * chunk_count_) chunk_count_ = call_.count;
}

IpcLocation IpcMovement::peer() const {
  return core_.locate(input_, call_.count * width_ * element_bytes_);
}

int64_t IpcMovement::count_of_chunk() const {
  return std::min(chunk_count_, call_.count - chunk_begin());
}

std::unique_ptr<Awaited> IpcMovement::next() {
  switch (state_) {
    case State::kCompared:
      return start();
    case State::kShared:
      return stage_chunk();
    case State::kStaged:
      return take_chunk();
    case State::kTaken:
    case State::kDirect:
    case State::kHostStaged:
      break;
  }
  return finish();
}

bool IpcMovement::is_host_staged() const {
  return core_.stages_on_host(std::max(call_.count * width_ * element_bytes_, output_.bytes()));
}

std::unique_ptr<Awaited> IpcMovement::start() {
  factors_ = mean_factors(agreement_->calls());
  if (core_.size() == 1) move_alone();
  if (core_.size() == 1 || call_.count == 0) return nullptr;
  if (is_host_staged()) {
    state_ = State::kHostStaged;
    return std::make_unique<IpcHostStaged>(core_, call_, context_,
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
  if (core_.has_staging()) return stage_chunk();
  state_ = State::kShared;
  return std::make_unique<StagingShared>(core_, call_, context_.deadline_ns);
}

// Empty if peers cannot reach them all.
IpcMovement::Contributions IpcMovement::direct_contributions() const {
  Contributions direct(static_cast<size_t>(core_.size()));
  for (int peer = 0; peer < core_.size(); ++peer) {
    if (!contributes(peer)) continue;
    const auto where = agreement_->note<IpcLocation>(peer);
    if (where.segment == 0) return {};
    direct[static_cast<size_t>(peer)] = core_.address(peer, where);
  }
  return direct;
}

// Into the slot that the chunk before the last one used, when all have taken that.
std::unique_ptr<Awaited> IpcMovement::stage_chunk() {
  if (chunk_ >= 2) core_.hold_all_taken(chunk_);
  if (contributes(core_.rank())) {
    const int64_t bytes = count_of_chunk() * element_bytes_;
    for (int64_t block = 0; block < width_; ++block) {
      const int64_t from = (block * call_.count + chunk_begin()) * element_bytes_;
      gpu_copy(core_.slot(core_.rank(), chunk_) + block * bytes, input_ + from, bytes,
               core_.stream());
    }
  }
  core_.record_staged(chunk_);
  state_ = State::kStaged;
  return handshake();
}

std::unique_ptr<Awaited> IpcMovement::take_chunk() {
  core_.hold_all_staged(chunk_);
  Contributions from(static_cast<size_t>(core_.size()));
  for (int peer = 0; peer < core_.size(); ++peer) {
    if (contributes(peer)) from[static_cast<size_t>(peer)] = core_.slot(peer, chunk_);
  }
  take(chunk_begin(), count_of_chunk(), count_of_chunk(), from);
  core_.record_taken(chunk_);
  ++chunk_;
  if (chunk_begin() < call_.count) return stage_chunk();
  state_ = State::kTaken;
  return handshake();
}

// All have queued their part: this rank's memory is its own again when they are over.
std::unique_ptr<Awaited> IpcMovement::finish() {
  if (state_ == State::kHostStaged) return nullptr;
  if (state_ == State::kDirect) {
    core_.hold_all_moved();
  } else {
    core_.hold_all_taken(chunk_ - 1);
    if (chunk_ >= 2) core_.hold_all_taken(chunk_ - 2);
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
    : IpcMovement(
          core,
          make_reduce_fingerprint(Operation::kAllReduce, buffer.dtype, buffer.count, op, weight),
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
    : IpcMovement(core, make_broadcast_fingerprint(buffer, root), context, buffer.data, 1, buffer) {
}

void IpcBroadcast::take(int64_t begin, int64_t count, int64_t /*stride*/,
                        const Contributions& from) {
  if (!receives()) return;
  gpu_copy(bytes_at(output_.data, begin * element_bytes_), from[static_cast<size_t>(call_.root)],
           count * element_bytes_, core_.stream());
}

IpcReduceScatter::IpcReduceScatter(IpcCore& core, const ConstBuffer& input, const Buffer& output,
                                   ReduceOp op, double weight, const CallContext& context)
    : IpcMovement(core,
                  make_reduce_fingerprint(Operation::kReduceScatter, output.dtype, output.count, op,
                                          weight),
                  context, input.data, core.size(), output) {}

void IpcReduceScatter::move_alone() {
  if (output_.data != input_) gpu_copy(output_.data, input_, output_.bytes(), caller_stream());
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
    : IpcMovement(core, make_fingerprint(Operation::kAllGather, input.dtype, input.count), context,
                  input.data, 1, output) {}

void IpcAllGather::move_alone() {
  if (output_.data != input_) gpu_copy(output_.data, input_, output_.bytes(), caller_stream());
}

void IpcAllGather::take(int64_t begin, int64_t count, int64_t /*stride*/,
                        const Contributions& from) {
  for (int peer = 0; peer < core_.size(); ++peer) {
    std::byte* to = bytes_at(output_.data, (peer * call_.count + begin) * element_bytes_);
    const std::byte* block = from[static_cast<size_t>(peer)];
    if (to != block) gpu_copy(to, block, count * element_bytes_, core_.stream());
  }
}

IpcReduce::IpcReduce(IpcCore& core, const Buffer& buffer, int root, ReduceOp op, double weight,
                     const CallContext& context)
    : IpcMovement(core, make_rooted_reduce_fingerprint(buffer, root, op, weight), context,
                  buffer.data, 1, buffer) {}

void IpcReduce::take(int64_t begin, int64_t count, int64_t /*stride*/, const Contributions& from) {
  if (!receives()) return;
  const std::vector<const void*> inputs(from.begin(), from.end());
  const std::array<void*, 1> output = {bytes_at(output_.data, begin * element_bytes_)};
  gpu_reduce(output_.dtype, call_.reduce, inputs, factors_, output, count, core_.stream());
}

IpcExchange::IpcExchange(IpcCore& core, const ConstBuffer& input, const Buffer& output,
                         const BlockExchange& blocks, const CallContext& context)
    : IpcCollective(core, make_exchange_fingerprint(input.dtype, blocks), context),
      input_(input),
      output_(output),
      blocks_(blocks) {}

std::unique_ptr<Awaited> IpcExchange::next() {
  if (moved_) return nullptr;
  moved_ = true;
  return std::make_unique<IpcHostExchange>(core_, call_, context_, input_, output_, blocks_);
}

}  // namespace lockstep
