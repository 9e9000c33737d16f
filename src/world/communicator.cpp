#include "lockstep/communicator.hpp"

#include <fmt/format.h>

#include <future>

#include "base/running_clock.hpp"
#include "comm/backends.hpp"
#include "lockstep/clock.hpp"
#include "lockstep/error.hpp"
#include "lockstep/memory.hpp"
#include "lockstep/tensor_text.hpp"
#include "world/captured_call.hpp"
#include "world/comm_state.hpp"
#include "world/gpu_backends.hpp"
#include "world/passage.hpp"
#include "world/work.hpp"

namespace lockstep {
namespace {

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

// After a call with an output of its own. A rank alone on a GPU: its block is the result.
void put(const Route& route, const torch::Tensor& input, const Passage& to,
         const torch::Tensor& output) {
  if (route.way != Route::Way::kStay) return to.copy_back();
  const torch::NoGradGuard no_grad;
  output.view({-1}).copy_(input.view({-1}));
}

// Ranks that are threads meet as processes do: all at the same time.
std::vector<std::unique_ptr<Backend>> meet_threads_on_gpu(
    const std::vector<std::unique_ptr<Backend>>& hosts, int gpu) {
  std::vector<std::unique_ptr<Backend>> gpus(hosts.size());
  const int64_t deadline_ns =
      running_ns() + std::chrono::duration_cast<std::chrono::nanoseconds>(kDefaultTimeout).count();
  std::vector<std::future<void>> meeting;
  for (size_t rank = 0; rank < hosts.size(); ++rank) {
    meeting.push_back(std::async(std::launch::async, [&, rank] {
      try {
        gpus[rank] = make_gpu_backend(
            "ipc", {.host = hosts[rank].get(), .gpu = gpu, .deadline_ns = deadline_ns});
      } catch (const std::exception& error) {
        hosts[rank]->abort(describe(error));
        throw;
      }
    }));
  }
  for (const auto& each : meeting) each.wait();
  for (auto& each : meeting) each.get();
  return gpus;
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

  CallContext context(const Backend& backend, const CallOptions& options) const {
    return state_.context(backend, options);
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

CallContext CommState::context(const Backend& backend, const CallOptions& options) const {
  const auto limit = options.timeout.value_or(timeout);
  return {running_ns() + std::chrono::duration_cast<std::chrono::nanoseconds>(limit).count(),
          options.label, backend.on_gpu() ? current_cuda_stream(gpu_index) : nullptr};
}

Communicator::Communicator(std::unique_ptr<Backend> backend, std::chrono::milliseconds timeout)
    : Communicator(std::make_shared<CommState>(std::move(backend), timeout)) {}

Communicator::Communicator(std::shared_ptr<CommState> state) : state_(std::move(state)) {}

Communicator Communicator::self() {
  return {make_self_backend(), kDefaultTimeout};
}

std::vector<Communicator> Communicator::threads(int size, torch::Device device) {
  auto hosts = make_shm_thread_backends(size);
  std::vector<std::unique_ptr<Backend>> gpus(hosts.size());
  const int gpu = device.has_index() ? device.index() : 0;
  if (!device.is_cpu()) gpus = meet_threads_on_gpu(hosts, gpu);
  std::vector<Communicator> ranks;
  for (size_t rank = 0; rank < hosts.size(); ++rank) {
    ranks.push_back(Communicator(std::make_shared<CommState>(
        std::move(hosts[rank]), std::move(gpus[rank]), gpu, kDefaultTimeout)));
  }
  return ranks;
}

int Communicator::rank() const {
  return state_->host->rank();
}

int Communicator::size() const {
  return state_->host->size();
}

std::string_view Communicator::backend() const {
  return state_->gpu ? state_->gpu->name() : state_->host->name();
}

std::vector<int> Communicator::world_ranks() const {
  return state_->host->group().world_ranks;
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
  if (captures("all_reduce", {tensor})) return begin_all_reduce(tensor, op, options).wait();
  begin(tensor, op, options, /*on_side=*/false).wait();
}

Work Communicator::begin_all_reduce(const torch::Tensor& tensor, ReduceOp op,
                                    const CallOptions& options) const {
  if (Capture* capture = captures("all_reduce", {tensor})) {
    return Work(std::make_unique<CapturedWork>(*capture, *this, tensor, op, options));
  }
  if (!tensor.defined() || !state_->reaches(tensor.device())) {
    return begin(tensor, op, options, /*on_side=*/false);
  }
  if (!state_->side) state_->side.emplace(state_->gpu_index);
  state_->side->follow_current();
  const c10::StreamGuard on_side(state_->side->stream());
  return begin(tensor, op, options, /*on_side=*/true);
}

std::optional<c10::Stream> Communicator::side_stream() const {
  return state_->side ? std::optional(state_->side->stream()) : std::nullopt;
}

// Each rank of an all_reduce needs the others' share of the result, and they its own.
Work Communicator::begin(const torch::Tensor& tensor, ReduceOp op, const CallOptions& options,
                         bool on_side) const {
  const Route route = Route::of(*state_, {tensor});
  Passage passage("all_reduce", tensor, route.way);
  const int64_t bytes = passage.bytes();
  Counted call(*state_, "all_reduce", bytes, options.bucket);
  auto pending = route.backend.all_reduce(passage.buffer(), op, options.weight,
                                          call.context(route.backend, options));
  state_->stats.all_reduces += 1;
  state_->stats.all_reduce_bytes += bytes;
  const int64_t others_bytes = bytes * 2 * (size() - 1) / size();
  state_->stats.sent_bytes += others_bytes;
  state_->stats.received_bytes += others_bytes;
  return Work(std::make_unique<BegunWork>(state_, std::move(passage), call.sequence(), on_side,
                                          std::move(pending)));
}

void Communicator::broadcast(const torch::Tensor& tensor, int root,
                             const CallOptions& options) const {
  require_rank("broadcast", root, size());
  if (Capture* capture = captures("broadcast", {tensor})) {
    return capture->between_graphs([comm = *this, tensor, root, kept = KeptOptions(options)] {
      comm.broadcast(tensor, root, kept.get());
    });
  }
  const Route route = Route::of(*state_, {tensor});
  const Passage passage("broadcast", tensor, route.way);
  const int64_t bytes = passage.bytes();
  Counted call(*state_, "broadcast", bytes, options.bucket);
  route.backend.broadcast(passage.buffer(), root, call.context(route.backend, options));
  if (rank() != root) passage.copy_back();
  call.moved(rank() == root ? bytes * (size() - 1) : 0, rank() == root ? 0 : bytes);
}

void Communicator::reduce_scatter(const torch::Tensor& output, const torch::Tensor& input,
                                  ReduceOp op, const CallOptions& options) const {
  if (Capture* capture = captures("reduce_scatter", {input, output})) {
    return capture->between_graphs([comm = *this, input, output, op, kept = KeptOptions(options)] {
      comm.reduce_scatter(output, input, op, kept.get());
    });
  }
  const Route route = Route::of(*state_, {input, output});
  const Passage from("reduce_scatter", input, route.way);
  const Passage to("reduce_scatter", output, route.way);
  require_blocks("reduce_scatter", input, output, size());
  const int64_t others_bytes = to.bytes() * (size() - 1);
  Counted call(*state_, "reduce_scatter", from.bytes(), options.bucket);
  route.backend.reduce_scatter(from.const_buffer(), to.buffer(), op, options.weight,
                               call.context(route.backend, options));
  put(route, input, to, output);
  call.moved(others_bytes, others_bytes);
}

void Communicator::all_gather(const torch::Tensor& output, const torch::Tensor& input,
                              const CallOptions& options) const {
  if (Capture* capture = captures("all_gather", {input, output})) {
    return capture->between_graphs([comm = *this, input, output, kept = KeptOptions(options)] {
      comm.all_gather(output, input, kept.get());
    });
  }
  const Route route = Route::of(*state_, {input, output});
  const Passage from("all_gather", input, route.way);
  const Passage to("all_gather", output, route.way);
  require_blocks("all_gather", output, input, size());
  const int64_t others_bytes = from.bytes() * (size() - 1);
  Counted call(*state_, "all_gather", to.bytes(), options.bucket);
  route.backend.all_gather(from.const_buffer(), to.buffer(), call.context(route.backend, options));
  put(route, input, to, output);
  call.moved(others_bytes, others_bytes);
}

void Communicator::send(const torch::Tensor& tensor, int to, const CallOptions& options) const {
  require_rank("send", to, size());
  if (Capture* capture = captures("send", {tensor})) {
    return capture->between_graphs([comm = *this, tensor, to, kept = KeptOptions(options)] {
      comm.send(tensor, to, kept.get());
    });
  }
  const Route route = Route::of_message(*state_, tensor);
  const Passage passage("send", tensor, route.way);
  Counted call(*state_, "send", passage.bytes(), options.bucket);
  route.backend.send(passage.const_buffer(), to, options.tag, call.context(route.backend, options));
  call.moved(passage.bytes(), 0);
}

void Communicator::recv(const torch::Tensor& tensor, int from, const CallOptions& options) const {
  require_rank("recv", from, size());
  if (Capture* capture = captures("recv", {tensor})) {
    return capture->between_graphs([comm = *this, tensor, from, kept = KeptOptions(options)] {
      comm.recv(tensor, from, kept.get());
    });
  }
  const Route route = Route::of_message(*state_, tensor);
  const Passage passage("recv", tensor, route.way);
  Counted call(*state_, "recv", passage.bytes(), options.bucket);
  route.backend.recv(passage.buffer(), from, options.tag, call.context(route.backend, options));
  passage.copy_back();
  call.moved(0, passage.bytes());
}

void Communicator::barrier(const CallOptions& options) const {
  if (Capture* capture = captures("barrier", {})) {
    return capture->between_graphs(
        [comm = *this, kept = KeptOptions(options)] { comm.barrier(kept.get()); });
  }
  Counted call(*state_, "barrier", 0);
  state_->host->barrier(call.context(*state_->host, options));
  call.finished();
}

Communicator Communicator::split(int colour, int key, std::string_view name) const {
  require_not_capturing("the split of a communicator", "split it before the step is captured");
  Counted call(*state_, "split", 0);
  auto host = state_->host->split(colour, key, name, call.context(*state_->host, {}));
  std::unique_ptr<Backend> gpu;
  if (state_->gpu) {
    gpu = state_->gpu->split(colour, key, name, call.context(*state_->gpu, {}));
  }
  Communicator part(std::make_shared<CommState>(std::move(host), std::move(gpu), state_->gpu_index,
                                                state_->timeout));
  part.state_->page = state_->page;
  call.finished();
  return part;
}

torch::Tensor Communicator::allocate(int64_t count, const torch::TensorOptions& options) const {
  const torch::Device device = options.device();
  if (!device.is_cpu() && !state_->reaches(device)) return torch::zeros({count}, options);
  require_not_capturing("memory that ranks reach", "let the step run once before it is captured");
  Backend& backend = device.is_cpu() ? *state_->host : *state_->gpu;
  const int64_t bytes = count * static_cast<int64_t>(options.dtype().itemsize());
  Counted call(*state_, "allocate", bytes);
  auto memory = backend.allocate(bytes, call.context(backend, {}));
  call.finished();
  if (count == 0) return torch::zeros({0}, options);
  MemoryAccount* account =
      device.is_cpu() ? &current_memory_account() : current_gpu_account(state_->gpu_index);
  if (account != nullptr) account->charge(bytes);
  return torch::from_blob(
      memory->data(), {count},
      [memory, bytes, account](void*) mutable {
        memory.reset();
        if (account != nullptr) account->release(bytes);
      },
      options);
}

void Communicator::abort(std::string_view reason) const {
  if (state_->gpu) state_->gpu->abort(reason);
  state_->host->abort(reason);
}

// A rank alone has nobody to wait for: what it does is recorded like any other work.
Capture* Communicator::captures(const char* operation,
                                std::initializer_list<torch::Tensor> tensors) const {
  if (size() == 1 && !state_->gpu) return nullptr;
  return capture_of_call(operation, tensors);
}

}  // namespace lockstep
