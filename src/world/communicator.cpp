#include "lockstep/communicator.hpp"

#include <fmt/format.h>

#include "comm/backends.hpp"
#include "device/dtype_map.hpp"
#include "lockstep/clock.hpp"
#include "lockstep/error.hpp"
#include "lockstep/memory.hpp"
#include "lockstep/tensor_text.hpp"
#include "world/comm_state.hpp"

namespace lockstep {
namespace {

Dtype require_usable(const char* operation, const torch::Tensor& tensor) {
  if (!tensor.defined()) {
    throw Error(Code::kTensorMismatch, fmt::format("{} was given an undefined tensor", operation),
                "give every rank a tensor of the same count and dtype");
  }
  if (tensor.layout() != torch::kStrided || !tensor.is_contiguous()) {
    throw Error(Code::kTensorMismatch,
                fmt::format("{} was given a tensor of shape {} that is not dense and contiguous",
                            operation, shape_text(tensor.sizes())),
                "pass tensor.contiguous(), and copy the result back");
  }
  const auto dtype = dtype_of(tensor.scalar_type());
  if (!dtype) {
    throw Error(
        Code::kTensorMismatch,
        fmt::format("{} cannot move {} tensors", operation, dtype_text(tensor.scalar_type())),
        "use a real floating-point, integer or bool type");
  }
  return *dtype;
}

// A tensor in memory that the backend can read and write: itself, or a copy of a GPU's on the host.
class OnHost {
 public:
  OnHost(const char* operation, const torch::Tensor& tensor)
      : dtype_(require_usable(operation, tensor)),
        original_(tensor),
        host_(tensor.is_cpu() ? tensor.detach() : tensor.detach().cpu()) {}

  Buffer buffer() const { return {host_.data_ptr(), host_.numel(), dtype_}; }
  ConstBuffer const_buffer() const { return {host_.data_ptr(), host_.numel(), dtype_}; }

  void copy_back() const {
    if (original_.is_cpu()) return;
    const torch::NoGradGuard no_grad;
    original_.copy_(host_);
  }

 private:
  Dtype dtype_;
  torch::Tensor original_;
  torch::Tensor host_;
};

void require_blocks(const char* operation, const torch::Tensor& blocks, const torch::Tensor& block,
                    int ranks) {
  if (blocks.scalar_type() == block.scalar_type() && blocks.numel() == block.numel() * ranks)
    return;
  throw Error(
      Code::kTensorMismatch,
      fmt::format("{} over {} ranks: {} x {} on one side and {} x {} on the other", operation,
                  ranks, blocks.numel(), dtype_text(blocks.scalar_type()), block.numel(),
                  dtype_text(block.scalar_type())),
      fmt::format("the larger tensor must hold {} times the elements of the smaller", ranks));
}

void require_rank(const char* operation, int rank, int size) {
  if (rank >= 0 && rank < size) return;
  throw Error(Code::kUsage, fmt::format("{}: there is no rank {} among {}", operation, rank, size),
              fmt::format("ranks of this communicator are 0 to {}", size - 1));
}

// A call as the board and the statistics see it.
class Counted {
 public:
  Counted(CommState& state, const char* operation, int64_t bytes, int64_t bucket = -1)
      : state_(state), begun_ns_(monotonic_ns()), sequence_(++state.stats.calls) {
    if (state_.page) state_.page->begin_collective(sequence_, operation, bytes, bucket);
  }
  ~Counted() {
    state_.stats.inside_ns += monotonic_ns() - begun_ns_;
    if (state_.page && finished_) state_.page->finish_collective(sequence_);
  }
  Counted(const Counted&) = delete;
  Counted& operator=(const Counted&) = delete;

  CallContext context(const CallOptions& options) const {
    return state_.context(begun_ns_, options);
  }
  void finished() { finished_ = true; }
  void moved(int64_t sent_bytes, int64_t received_bytes) {
    state_.stats.sent_bytes += sent_bytes;
    state_.stats.received_bytes += received_bytes;
    finished();
  }
  int64_t sequence() const { return sequence_; }

 private:
  CommState& state_;
  int64_t begun_ns_;
  int64_t sequence_;
  bool finished_ = false;
};

}  // namespace

CallContext CommState::context(int64_t begun_ns, const CallOptions& options) const {
  const auto limit = options.timeout.value_or(timeout);
  return {begun_ns + std::chrono::duration_cast<std::chrono::nanoseconds>(limit).count(),
          options.label};
}

struct Work::State {
  std::shared_ptr<CommState> comm;
  OnHost tensor;
  int64_t sequence;
  std::unique_ptr<Pending> pending;  // null once done

  bool finish_if(bool done) {
    if (!done) return false;
    pending.reset();
    tensor.copy_back();
    if (comm->page) comm->page->finish_collective(sequence);
    return true;
  }
};

Work::Work(std::unique_ptr<State> state) : state_(std::move(state)) {}
Work::~Work() = default;
Work::Work(Work&&) noexcept = default;
Work& Work::operator=(Work&&) noexcept = default;

bool Work::advance() {
  if (!state_->pending) return true;
  const int64_t begun_ns = monotonic_ns();
  const bool done = state_->pending->advance();
  state_->finish_if(done);
  state_->comm->stats.inside_ns += monotonic_ns() - begun_ns;
  return done;
}

void Work::wait() {
  if (!state_->pending) return;
  const int64_t begun_ns = monotonic_ns();
  state_->pending->wait();
  state_->finish_if(true);
  state_->comm->stats.inside_ns += monotonic_ns() - begun_ns;
}

Communicator::Communicator(std::unique_ptr<Backend> backend, std::chrono::milliseconds timeout)
    : state_(std::make_shared<CommState>(std::move(backend), timeout)) {}

Communicator Communicator::self() {
  return {make_self_backend(), kDefaultTimeout};
}

std::vector<Communicator> Communicator::threads(int size) {
  std::vector<Communicator> ranks;
  for (auto& backend : make_shm_thread_backends(size)) {
    ranks.emplace_back(std::move(backend), kDefaultTimeout);
  }
  return ranks;
}

int Communicator::rank() const {
  return state_->backend->rank();
}

int Communicator::size() const {
  return state_->backend->size();
}

std::string_view Communicator::backend() const {
  return state_->backend->name();
}

std::vector<int> Communicator::world_ranks() const {
  return state_->backend->group().world_ranks;
}

std::chrono::milliseconds Communicator::timeout() const {
  return state_->timeout;
}

CommStats Communicator::stats() const {
  return state_->stats;
}

void Communicator::show_on(const BoardPage& page) {
  state_->page = page;
}

void Communicator::hide() {
  state_->page.reset();
}

void Communicator::all_reduce(const torch::Tensor& tensor, ReduceOp op,
                              const CallOptions& options) const {
  begin_all_reduce(tensor, op, options).wait();
}

// Each rank of an all_reduce needs the others' share of the result, and they its own.
Work Communicator::begin_all_reduce(const torch::Tensor& tensor, ReduceOp op,
                                    const CallOptions& options) const {
  OnHost host("all_reduce", tensor);
  const int64_t bytes = host.buffer().bytes();
  Counted call(*state_, "all_reduce", bytes, options.bucket);
  auto pending =
      state_->backend->all_reduce(host.buffer(), op, options.weight, call.context(options));
  state_->stats.all_reduces += 1;
  state_->stats.all_reduce_bytes += bytes;
  const int64_t others_bytes = bytes * 2 * (size() - 1) / size();
  state_->stats.sent_bytes += others_bytes;
  state_->stats.received_bytes += others_bytes;
  return Work(std::make_unique<Work::State>(
      Work::State{state_, std::move(host), call.sequence(), std::move(pending)}));
}

void Communicator::broadcast(const torch::Tensor& tensor, int root,
                             const CallOptions& options) const {
  require_rank("broadcast", root, size());
  const OnHost host("broadcast", tensor);
  const int64_t bytes = host.buffer().bytes();
  Counted call(*state_, "broadcast", bytes, options.bucket);
  state_->backend->broadcast(host.buffer(), root, call.context(options));
  if (rank() != root) host.copy_back();
  call.moved(rank() == root ? bytes * (size() - 1) : 0, rank() == root ? 0 : bytes);
}

void Communicator::reduce_scatter(const torch::Tensor& input, const torch::Tensor& output,
                                  ReduceOp op, const CallOptions& options) const {
  const OnHost from("reduce_scatter", input);
  const OnHost to("reduce_scatter", output);
  require_blocks("reduce_scatter", input, output, size());
  const int64_t others_bytes = to.buffer().bytes() * (size() - 1);
  Counted call(*state_, "reduce_scatter", from.buffer().bytes(), options.bucket);
  state_->backend->reduce_scatter(from.const_buffer(), to.buffer(), op, options.weight,
                                  call.context(options));
  to.copy_back();
  call.moved(others_bytes, others_bytes);
}

void Communicator::all_gather(const torch::Tensor& input, const torch::Tensor& output,
                              const CallOptions& options) const {
  const OnHost from("all_gather", input);
  const OnHost to("all_gather", output);
  require_blocks("all_gather", output, input, size());
  const int64_t others_bytes = from.buffer().bytes() * (size() - 1);
  Counted call(*state_, "all_gather", to.buffer().bytes(), options.bucket);
  state_->backend->all_gather(from.const_buffer(), to.buffer(), call.context(options));
  to.copy_back();
  call.moved(others_bytes, others_bytes);
}

void Communicator::send(const torch::Tensor& tensor, int to, const CallOptions& options) const {
  require_rank("send", to, size());
  const OnHost host("send", tensor);
  Counted call(*state_, "send", host.buffer().bytes(), options.bucket);
  state_->backend->send(host.const_buffer(), to, options.tag, call.context(options));
  call.moved(host.buffer().bytes(), 0);
}

void Communicator::recv(const torch::Tensor& tensor, int from, const CallOptions& options) const {
  require_rank("recv", from, size());
  const OnHost host("recv", tensor);
  Counted call(*state_, "recv", host.buffer().bytes(), options.bucket);
  state_->backend->recv(host.buffer(), from, options.tag, call.context(options));
  host.copy_back();
  call.moved(0, host.buffer().bytes());
}

void Communicator::barrier(const CallOptions& options) const {
  Counted call(*state_, "barrier", 0);
  state_->backend->barrier(call.context(options));
  call.finished();
}

Communicator Communicator::split(int colour, int key, std::string_view name) const {
  Counted call(*state_, "split", 0);
  Communicator part(state_->backend->split(colour, key, name, call.context({})), state_->timeout);
  part.state_->page = state_->page;
  call.finished();
  return part;
}

torch::Tensor Communicator::allocate(int64_t count, const torch::TensorOptions& options) const {
  if (!options.device().is_cpu()) return torch::zeros({count}, options);
  const int64_t bytes = count * static_cast<int64_t>(options.dtype().itemsize());
  Counted call(*state_, "allocate", bytes);
  auto memory = state_->backend->allocate(bytes, call.context({}));
  call.finished();
  MemoryAccount& account = current_memory_account();
  account.charge(bytes);
  return torch::from_blob(
      memory->data(), {count},
      [memory, bytes, &account](void*) mutable {
        memory.reset();
        account.release(bytes);
      },
      options);
}

void Communicator::abort(std::string_view reason) const {
  state_->backend->abort(reason);
}

}  // namespace lockstep
