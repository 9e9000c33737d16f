#include "lockstep/communicator.hpp"

#include <c10/core/StreamGuard.h>
#include <fmt/format.h>

#include <future>

#include "base/running_clock.hpp"
#include "comm/backend.hpp"
#include "lockstep/clock.hpp"
#include "lockstep/error.hpp"
#include "lockstep/memory.hpp"
#include "lockstep/tensor_text.hpp"
#include "world/comm_state.hpp"
#include "world/gpu_backends.hpp"
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
void put(const Route& route, const torch::Tensor& input, const StagedTensor& to,
         const torch::Tensor& output) {
  if (route.way != Route::Way::kStay) return to.copy_back();
  const torch::NoGradGuard no_grad;
  output.view({-1}).copy_(input.view({-1}));
}

// The rendezvous of ranks that are threads is that of processes: all come at the same time.
std::vector<std::unique_ptr<Backend>> make_gpu_backends_of_threads(
    const std::vector<std::unique_ptr<Backend>>& hosts, int gpu) {
  std::vector<std::unique_ptr<Backend>> gpus(hosts.size());
  const int64_t deadline_ns =
      running_ns() + std::chrono::duration_cast<std::chrono::nanoseconds>(kDefaultTimeout).count();
  std::vector<std::future<void>> ranks;
  for (size_t rank = 0; rank < hosts.size(); ++rank) {
    ranks.push_back(std::async(std::launch::async, [&, rank] {
      try {
        gpus[rank] = make_gpu_backend(
            "ipc", {.host = hosts[rank].get(), .gpu = gpu, .deadline_ns = deadline_ns});
      } catch (const std::exception& error) {
        hosts[rank]->abort(describe(error));
        throw;
      }
    }));
  }
  for (const auto& each : ranks) each.wait();
  for (auto& each : ranks) each.get();
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
  if (!device.is_cpu()) gpus = make_gpu_backends_of_threads(hosts, gpu);
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
  if (capture_of_call(*state_, "all_reduce", {tensor})) {
    return begin_all_reduce(tensor, op, options).wait();
  }
  begin(tensor, op, options, /*on_side=*/false).wait();
}

Work Communicator::begin_all_reduce(const torch::Tensor& tensor, ReduceOp op,
                                    const CallOptions& options) const {
  if (Capture* capture = capture_of_call(*state_, "all_reduce", {tensor})) {
    return begin_in_replays(*capture, [comm = *this, tensor, op, kept = KeptOptions(options)] {
      return comm.begin_all_reduce(tensor, op, kept.get());
    });
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
  auto begun = std::make_unique<Work::State>();
  begun->comm = state_;
  begun->on_side = on_side;
  const StagedTensor& staged = begun->tensor.emplace("all_reduce", tensor, route.way);
  const int64_t bytes = staged.bytes();
  Counted call(*state_, "all_reduce", bytes, options.bucket);
  begun->sequence = call.sequence();
  begun->work = route.backend.all_reduce(staged.buffer(), op, options.weight,
                                         call.context(route.backend, options));
  state_->stats.all_reduces += 1;
  state_->stats.all_reduce_bytes += bytes;
  const int64_t others_bytes = bytes * 2 * (size() - 1) / size();
  state_->stats.sent_bytes += others_bytes;
  state_->stats.received_bytes += others_bytes;
  return Work(std::move(begun));
}

void Communicator::broadcast(const torch::Tensor& tensor, int root,
                             const CallOptions& options) const {
  require_rank("broadcast", root, size());
  run_or_capture(state_, "broadcast", {tensor}, options,
                 [tensor, root](CommState& state, const CallOptions& given) {
                   const Route route = Route::of(state, {tensor});
                   const StagedTensor staged("broadcast", tensor, route.way);
                   const int64_t bytes = staged.bytes();
                   Counted call(state, "broadcast", bytes, given.bucket);
                   route.backend.broadcast(staged.buffer(), root,
                                           call.context(route.backend, given));
                   const bool sends = state.rank() == root;
                   if (!sends) staged.copy_back();
                   call.moved(sends ? bytes * (state.size() - 1) : 0, sends ? 0 : bytes);
                 });
}

void Communicator::reduce_scatter(const torch::Tensor& output, const torch::Tensor& input,
                                  ReduceOp op, const CallOptions& options) const {
  run_or_capture(state_, "reduce_scatter", {input, output}, options,
                 [input, output, op](CommState& state, const CallOptions& given) {
                   const Route route = Route::of(state, {input, output});
                   const StagedTensor from("reduce_scatter", input, route.way);
                   const StagedTensor to("reduce_scatter", output, route.way);
                   require_blocks("reduce_scatter", input, output, state.size());
                   const int64_t others_bytes = to.bytes() * (state.size() - 1);
                   Counted call(state, "reduce_scatter", from.bytes(), given.bucket);
                   route.backend.reduce_scatter(from.const_buffer(), to.buffer(), op, given.weight,
                                                call.context(route.backend, given));
                   put(route, input, to, output);
                   call.moved(others_bytes, others_bytes);
                 });
}

void Communicator::all_gather(const torch::Tensor& output, const torch::Tensor& input,
                              const CallOptions& options) const {
  run_or_capture(state_, "all_gather", {input, output}, options,
                 [input, output](CommState& state, const CallOptions& given) {
                   const Route route = Route::of(state, {input, output});
                   const StagedTensor from("all_gather", input, route.way);
                   const StagedTensor to("all_gather", output, route.way);
                   require_blocks("all_gather", output, input, state.size());
                   const int64_t others_bytes = from.bytes() * (state.size() - 1);
                   Counted call(state, "all_gather", to.bytes(), given.bucket);
                   route.backend.all_gather(from.const_buffer(), to.buffer(),
                                            call.context(route.backend, given));
                   put(route, input, to, output);
                   call.moved(others_bytes, others_bytes);
                 });
}

void Communicator::send(const torch::Tensor& tensor, int to, const CallOptions& options) const {
  require_rank("send", to, size());
  run_or_capture(state_, "send", {tensor}, options,
                 [tensor, to](CommState& state, const CallOptions& given) {
                   const Route route = Route::of_message(state, tensor);
                   const StagedTensor staged("send", tensor, route.way);
                   Counted call(state, "send", staged.bytes(), given.bucket);
                   route.backend.send(staged.const_buffer(), to, given.tag,
                                      call.context(route.backend, given));
                   call.moved(staged.bytes(), 0);
                 });
}

void Communicator::recv(const torch::Tensor& tensor, int from, const CallOptions& options) const {
  require_rank("recv", from, size());
  run_or_capture(state_, "recv", {tensor}, options,
                 [tensor, from](CommState& state, const CallOptions& given) {
                   const Route route = Route::of_message(state, tensor);
                   const StagedTensor staged("recv", tensor, route.way);
                   Counted call(state, "recv", staged.bytes(), given.bucket);
                   route.backend.recv(staged.buffer(), from, given.tag,
                                      call.context(route.backend, given));
                   staged.copy_back();
                   call.moved(0, staged.bytes());
                 });
}

void Communicator::barrier(const CallOptions& options) const {
  run_or_capture(state_, "barrier", {}, options, [](CommState& state, const CallOptions& given) {
    Counted call(state, "barrier", 0);
    state.host->barrier(call.context(*state.host, given));
    call.finished();
  });
}

Communicator Communicator::split(int color, int key, std::string_view name) const {
  require_not_capturing("the split of a communicator", "split it before the step is captured");
  Counted call(*state_, "split", 0);
  auto host = state_->host->split(color, key, name, call.context(*state_->host, {}));
  std::unique_ptr<Backend> gpu;
  if (state_->gpu) {
    gpu = state_->gpu->split(color, key, name, call.context(*state_->gpu, {}));
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
  MemoryAccount* account =
      device.is_cpu() ? &current_memory_account() : current_gpu_account(state_->gpu_index);
  if (account != nullptr) account->require(bytes);
  Counted call(*state_, "allocate", bytes);
  auto memory = backend.allocate(bytes, call.context(backend, {}));
  call.finished();
  if (count == 0) return torch::zeros({0}, options);
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

}  // namespace lockstep
