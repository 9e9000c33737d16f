#include "lockstep/communicator.hpp"

#include <c10/util/accumulate.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <future>
#include <numeric>

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

void require_defined(const char* operation, std::initializer_list<torch::Tensor> tensors) {
  for (const torch::Tensor& tensor : tensors) {
    if (tensor.defined()) continue;
    throw Error(Code::kTensorMismatch, fmt::format("{} was given an undefined tensor", operation),
                "give every rank a tensor of the same count and dtype");
  }
}

int64_t bytes_of(const torch::Tensor& tensor) {
  return static_cast<int64_t>(tensor.nbytes());
}

int64_t bytes_of(int64_t count, const torch::TensorOptions& options) {
  return count * static_cast<int64_t>(options.dtype().itemsize());
}

// A tensor in registered memory, of which `charged` bytes count as this rank's as long as it lives.
torch::Tensor tensor_of(std::shared_ptr<RegisteredMemory> memory, int64_t count,
                        const torch::TensorOptions& options, MemoryAccount* account,
                        int64_t charged) {
  if (count == 0) return torch::zeros({0}, options);
  if (account != nullptr) account->charge(charged);
  void* data = memory->data();
  const auto release = [memory = std::move(memory), charged, account](void*) mutable {
    memory.reset();
    if (account != nullptr) account->release(charged);
  };
  return torch::from_blob(data, {count}, release, options);
}

// Each rank of an all_reduce needs the others' share of the result, and they its own.
TensorCall all_reduce_call(CommState& state, const torch::Tensor& tensor, ReduceOp op,
                           double weight) {
  require_defined("all_reduce", {tensor});
  const int64_t bytes = bytes_of(tensor);
  const int64_t others_bytes = bytes * 2 * (state.size() - 1) / state.size();
  return {.operation = "all_reduce",
          .output = tensor,
          .shown_bytes = bytes,
          .sent_bytes = others_bytes,
          .received_bytes = others_bytes,
          .begin = [op, weight, bytes, &state](Backend& backend, const ConstBuffer&,
                                               const Buffer& buffer, const CallContext& context) {
            auto work = backend.all_reduce(buffer, op, weight, context);
            state.stats.all_reduces += 1;
            state.stats.all_reduce_bytes += bytes;
            return work;
          }};
}

TensorCall broadcast_call(const CommState& state, const torch::Tensor& tensor, int root) {
  require_defined("broadcast", {tensor});
  const int64_t bytes = bytes_of(tensor);
  const bool sends = state.rank() == root;
  return {.operation = "broadcast",
          .input = sends ? tensor : torch::Tensor(),
          .output = sends ? torch::Tensor() : tensor,
          .shown_bytes = bytes,
          .sent_bytes = sends ? bytes * (state.size() - 1) : 0,
          .received_bytes = sends ? 0 : bytes,
          .begin = [root, sends](Backend& backend, const ConstBuffer& input, const Buffer& output,
                                 const CallContext& context) {
            const Buffer root_buffer{const_cast<void*>(input.data), input.count, input.dtype};
            return backend.broadcast(sends ? root_buffer : output, root, context);
          }};
}

TensorCall reduce_scatter_call(const CommState& state, const torch::Tensor& output,
                               const torch::Tensor& input, ReduceOp op, double weight) {
  require_defined("reduce_scatter", {input, output});
  require_blocks("reduce_scatter", input, output, state.size());
  const int64_t others_bytes = bytes_of(output) * (state.size() - 1);
  return {.operation = "reduce_scatter",
          .input = input,
          .output = output,
          .shown_bytes = bytes_of(input),
          .sent_bytes = others_bytes,
          .received_bytes = others_bytes,
          .begin = [op, weight](Backend& backend, const ConstBuffer& from, const Buffer& to,
                                const CallContext& context) {
            return backend.reduce_scatter(from, to, op, weight, context);
          }};
}

TensorCall all_gather_call(const CommState& state, const torch::Tensor& output,
                           const torch::Tensor& input) {
  require_defined("all_gather", {input, output});
  require_blocks("all_gather", output, input, state.size());
  const int64_t others_bytes = bytes_of(input) * (state.size() - 1);
  return {
      .operation = "all_gather",
      .input = input,
      .output = output,
      .shown_bytes = bytes_of(output),
      .sent_bytes = others_bytes,
      .received_bytes = others_bytes,
      .begin = [](Backend& backend, const ConstBuffer& from, const Buffer& to,
                  const CallContext& context) { return backend.all_gather(from, to, context); }};
}

// Threads rendezvous like processes: all of them call at the same time.
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

TensorCall send_call(const torch::Tensor& tensor, int to, int tag) {
  require_defined("send", {tensor});
  return {.operation = "send",
          .input = tensor,
          .shown_bytes = bytes_of(tensor),
          .sent_bytes = bytes_of(tensor),
          .is_message = true,
          .begin = [to, tag](Backend& backend, const ConstBuffer& input, const Buffer&,
                             const CallContext& context) {
            return backend.send(input, to, tag, context);
          }};
}

TensorCall recv_call(const torch::Tensor& tensor, int from, int tag) {
  require_defined("recv", {tensor});
  return {.operation = "recv",
          .output = tensor,
          .shown_bytes = bytes_of(tensor),
          .received_bytes = bytes_of(tensor),
          .is_message = true,
          .begin = [from, tag](Backend& backend, const ConstBuffer&, const Buffer& output,
                               const CallContext& context) {
            return backend.recv(output, from, tag, context);
          }};
}

// The root alone gets what it needs of the others.
TensorCall reduce_call(const CommState& state, const torch::Tensor& tensor, int root, ReduceOp op,
                       double weight) {
  require_defined("reduce", {tensor});
  const int64_t bytes = bytes_of(tensor);
  const bool receives = state.rank() == root;
  return {.operation = "reduce",
          .input = receives ? torch::Tensor() : tensor,
          .output = receives ? tensor : torch::Tensor(),
          .shown_bytes = bytes,
          .sent_bytes = receives ? 0 : bytes,
          .received_bytes = receives ? bytes * (state.size() - 1) : 0,
          .begin = [root, op, weight, receives](Backend& backend, const ConstBuffer& input,
                                                const Buffer& output, const CallContext& context) {
            const Buffer only_read{const_cast<void*>(input.data), input.count, input.dtype};
            return backend.reduce(receives ? output : only_read, root, op, weight, context);
          }};
}

// Blocks of any counts. A side that this rank has none of is an empty tensor.
TensorCall exchange_call(const CommState& state, const char* operation, const torch::Tensor& output,
                         const torch::Tensor& input, const BlockExchange& blocks) {
  const auto rank = static_cast<size_t>(state.rank());
  const int64_t element_bytes = static_cast<int64_t>(input.element_size());
  const int64_t given =
      std::accumulate(blocks.given.begin(), blocks.given.end(), int64_t{0}) - blocks.given[rank];
  const int64_t taken = blocks.taken_count() - blocks.taken[rank];
  return {.operation = operation,
          .input = input,
          .output = output,
          .shown_bytes = std::max(bytes_of(input), bytes_of(output)),
          .sent_bytes = given * element_bytes,
          .received_bytes = taken * element_bytes,
          .begin = [blocks](Backend& backend, const ConstBuffer& from, const Buffer& to,
                            const CallContext& context) {
            return backend.exchange(from, to, blocks, context);
          }};
}

torch::Tensor none_like(const torch::Tensor& tensor) {
  return torch::empty({0}, tensor.options().requires_grad(false));
}

// Rows of dimension 0 per peer, as elements per peer.
std::vector<int64_t> counts_of_rows(const torch::Tensor& tensor, const std::vector<int64_t>& rows,
                                    int ranks) {
  if (tensor.dim() == 0 || rows.size() != static_cast<size_t>(ranks) ||
      std::accumulate(rows.begin(), rows.end(), int64_t{0}) != tensor.size(0) ||
      std::any_of(rows.begin(), rows.end(), [](int64_t each) { return each < 0; })) {
    throw Error(Code::kTensorMismatch,
                fmt::format("all_to_all over {} ranks: rows [{}] of a tensor of shape {}", ranks,
                            fmt::join(rows, ", "), shape_text(tensor.sizes())),
                "give one number of rows for each rank; together they are the tensor's rows");
  }
  const int64_t row = c10::multiply_integers(tensor.sizes().slice(1));
  std::vector<int64_t> counts;
  for (const int64_t each : rows) counts.push_back(each * row);
  return counts;
}

// A shape as numbers of a fixed count, so that ranks can tell each other theirs.
constexpr int64_t kMostDimensions = 15;

torch::Tensor shape_as_tensor(const torch::Tensor& tensor) {
  if (tensor.dim() > kMostDimensions) {
    throw Error(Code::kTensorMismatch, fmt::format("all_gather of {} dimensions", tensor.dim()),
                fmt::format("reshape it to at most {}", kMostDimensions));
  }
  const auto shape = torch::zeros({kMostDimensions + 1}, torch::kInt64);
  auto* numbers = shape.data_ptr<int64_t>();
  numbers[0] = tensor.dim();
  std::copy(tensor.sizes().begin(), tensor.sizes().end(), numbers + 1);
  return shape;
}

torch::Tensor text_as_tensor(std::string_view text) {
  return torch::from_blob(const_cast<char*>(text.data()), {static_cast<int64_t>(text.size())},
                          torch::kUInt8);
}

std::string tensor_as_text(const torch::Tensor& tensor) {
  if (tensor.numel() == 0) return {};
  return {static_cast<const char*>(tensor.data_ptr()), static_cast<size_t>(tensor.numel())};
}

// A call without tensors, as the board and the statistics see it.
class Counted {
 public:
  Counted(CommState& state, const char* operation, int64_t bytes)
      : state_(state), begun_ns_(monotonic_ns()), sequence_(++state.stats.calls) {
    if (state_.page) state_.page->begin_collective(sequence_, operation, bytes, -1);
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
  run_call(state_, all_reduce_call(*state_, tensor, op, options.weight), options);
}

Work Communicator::begin_all_reduce(const torch::Tensor& tensor, ReduceOp op,
                                    const CallOptions& options) const {
  return begin_call(state_, all_reduce_call(*state_, tensor, op, options.weight), options);
}

std::optional<c10::Stream> Communicator::side_stream() const {
  return state_->side ? std::optional(state_->side->stream()) : std::nullopt;
}

void Communicator::broadcast(const torch::Tensor& tensor, int root,
                             const CallOptions& options) const {
  require_rank("broadcast", root, size());
  run_call(state_, broadcast_call(*state_, tensor, root), options);
}

void Communicator::reduce_scatter(const torch::Tensor& output, const torch::Tensor& input,
                                  ReduceOp op, const CallOptions& options) const {
  run_call(state_, reduce_scatter_call(*state_, output, input, op, options.weight), options);
}

Work Communicator::begin_reduce_scatter(const torch::Tensor& output, const torch::Tensor& input,
                                        ReduceOp op, const CallOptions& options) const {
  return begin_call(state_, reduce_scatter_call(*state_, output, input, op, options.weight),
                    options);
}

void Communicator::all_gather(const torch::Tensor& output, const torch::Tensor& input,
                              const CallOptions& options) const {
  run_call(state_, all_gather_call(*state_, output, input), options);
}

Work Communicator::begin_all_gather(const torch::Tensor& output, const torch::Tensor& input,
                                    const CallOptions& options) const {
  return begin_call(state_, all_gather_call(*state_, output, input), options);
}

void Communicator::reduce(const torch::Tensor& tensor, int root, ReduceOp op,
                          const CallOptions& options) const {
  require_rank("reduce", root, size());
  run_call(state_, reduce_call(*state_, tensor, root, op, options.weight), options);
}

// The shapes first, through the host: every rank makes room for what the others have.
std::vector<torch::Tensor> Communicator::all_gather(const torch::Tensor& input,
                                                    const CallOptions& options) const {
  require_defined("all_gather", {input});
  const auto shapes = torch::empty({size(), kMostDimensions + 1}, torch::kInt64);
  all_gather(shapes, shape_as_tensor(input), options);
  std::vector<torch::Tensor> parts;
  std::vector<int64_t> counts;
  for (int peer = 0; peer < size(); ++peer) {
    const auto* numbers = shapes.data_ptr<int64_t>() + peer * (kMostDimensions + 1);
    counts.push_back(c10::multiply_integers(torch::IntArrayRef(numbers + 1, numbers[0])));
  }
  const int64_t total = std::accumulate(counts.begin(), counts.end(), int64_t{0});
  const auto all = torch::empty({total}, input.options().requires_grad(false));
  const auto blocks = BlockExchange::all_gather(state_->host->group(), counts);
  run_call(state_, exchange_call(*state_, "all_gather", all, input, blocks), options);
  int64_t offset = 0;
  for (int peer = 0; peer < size(); ++peer) {
    const auto* numbers = shapes.data_ptr<int64_t>() + peer * (kMostDimensions + 1);
    const int64_t count = counts[static_cast<size_t>(peer)];
    parts.push_back(all.narrow(0, offset, count).view(torch::IntArrayRef(numbers + 1, numbers[0])));
    offset += count;
  }
  return parts;
}

void Communicator::gather(const torch::Tensor& output, const torch::Tensor& input, int root,
                          const CallOptions& options) const {
  require_rank("gather", root, size());
  require_defined("gather", {input});
  const bool is_root = rank() == root;
  if (is_root) {
    require_defined("gather", {output});
    require_blocks("gather", output, input, size());
  }
  const auto blocks = BlockExchange::gather(state_->host->group(), input.numel(), root);
  run_call(state_,
           exchange_call(*state_, "gather", is_root ? output : none_like(input), input, blocks),
           options);
}

void Communicator::scatter(const torch::Tensor& output, const torch::Tensor& input, int root,
                           const CallOptions& options) const {
  require_rank("scatter", root, size());
  require_defined("scatter", {output});
  const bool is_root = rank() == root;
  if (is_root) {
    require_defined("scatter", {input});
    require_blocks("scatter", input, output, size());
  }
  const auto blocks = BlockExchange::scatter(state_->host->group(), output.numel(), root);
  run_call(state_,
           exchange_call(*state_, "scatter", output, is_root ? input : none_like(output), blocks),
           options);
}

void Communicator::all_to_all(const torch::Tensor& output, const torch::Tensor& input,
                              const CallOptions& options) const {
  require_defined("all_to_all", {output, input});
  if (input.numel() != output.numel() || input.scalar_type() != output.scalar_type() ||
      input.numel() % size() != 0) {
    throw Error(Code::kTensorMismatch,
                fmt::format("all_to_all over {} ranks: {} x {} to give and {} x {} to take", size(),
                            input.numel(), dtype_text(input.scalar_type()), output.numel(),
                            dtype_text(output.scalar_type())),
                fmt::format("both tensors hold {} blocks of the same size and dtype", size()));
  }
  const auto blocks = BlockExchange::all_to_all(state_->host->group(), input.numel() / size());
  run_call(state_, exchange_call(*state_, "all_to_all", output, input, blocks), options);
}

void Communicator::all_to_all(const torch::Tensor& output, const torch::Tensor& input,
                              const std::vector<int64_t>& output_rows,
                              const std::vector<int64_t>& input_rows,
                              const CallOptions& options) const {
  require_defined("all_to_all", {output, input});
  const auto blocks = BlockExchange::all_to_all(counts_of_rows(input, input_rows, size()),
                                                counts_of_rows(output, output_rows, size()));
  run_call(state_, exchange_call(*state_, "all_to_all", output, input, blocks), options);
}

void Communicator::send(const torch::Tensor& tensor, int to, const CallOptions& options) const {
  require_rank("send", to, size());
  run_call(state_, send_call(tensor, to, options.tag), options);
}

Work Communicator::begin_send(const torch::Tensor& tensor, int to,
                              const CallOptions& options) const {
  require_rank("send", to, size());
  return begin_call(state_, send_call(tensor, to, options.tag), options);
}

void Communicator::recv(const torch::Tensor& tensor, int from, const CallOptions& options) const {
  require_rank("recv", from, size());
  run_call(state_, recv_call(tensor, from, options.tag), options);
}

Work Communicator::begin_recv(const torch::Tensor& tensor, int from,
                              const CallOptions& options) const {
  require_rank("recv", from, size());
  return begin_call(state_, recv_call(tensor, from, options.tag), options);
}

// The length first, then the bytes.
std::string Communicator::broadcast_text(std::string_view text, int root,
                                         const CallOptions& options) const {
  require_rank("broadcast", root, size());
  if (size() == 1) return std::string(text);
  const ChargeHost host;
  const auto length = torch::full({1}, static_cast<int64_t>(text.size()), torch::kInt64);
  broadcast(length, root, options);
  std::string bytes(rank() == root ? text : std::string_view());
  bytes.resize(static_cast<size_t>(length.item<int64_t>()));
  if (!bytes.empty()) broadcast(text_as_tensor(bytes), root, options);
  return bytes;
}

std::vector<std::string> Communicator::all_gather_text(std::string_view text,
                                                       const CallOptions& options) const {
  if (size() == 1) return {std::string(text)};
  const ChargeHost host;
  std::vector<std::string> texts;
  for (const auto& part : all_gather(text_as_tensor(text), options)) {
    texts.push_back(tensor_as_text(part));
  }
  return texts;
}

// Only the root makes room for the texts.
std::vector<std::string> Communicator::gather_text(std::string_view text, int root,
                                                   const CallOptions& options) const {
  require_rank("gather", root, size());
  if (size() == 1) return {std::string(text)};
  const ChargeHost host;
  const auto own = torch::full({1}, static_cast<int64_t>(text.size()), torch::kInt64);
  const auto lengths = torch::empty({size()}, torch::kInt64);
  all_gather(lengths, own, options);
  std::vector<int64_t> given(static_cast<size_t>(size()));
  std::vector<int64_t> taken(static_cast<size_t>(size()));
  given[static_cast<size_t>(root)] = own.item<int64_t>();
  if (rank() == root) std::copy_n(lengths.data_ptr<int64_t>(), size(), taken.begin());
  BlockExchange blocks = BlockExchange::all_to_all(given, taken);
  blocks.operation = Operation::kGather;
  blocks.root = root;
  const auto all = torch::empty({blocks.taken_count()}, torch::kUInt8);
  run_call(state_, exchange_call(*state_, "gather", all, text_as_tensor(text), blocks), options);
  std::vector<std::string> texts;
  for (int peer = 0; rank() == root && peer < size(); ++peer) {
    texts.push_back(
        tensor_as_text(all.narrow(0, blocks.taken_offset(peer), taken[static_cast<size_t>(peer)])));
  }
  return texts;
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
  const int64_t bytes = bytes_of(count, options);
  MemoryAccount* account =
      device.is_cpu() ? &current_memory_account() : current_gpu_account(state_->gpu_index);
  if (account != nullptr) account->require(bytes);
  Counted call(*state_, "allocate", bytes);
  auto memory = backend.allocate(bytes, call.context(backend, {}));
  call.finished();
  return tensor_of(std::move(memory), count, options, account, bytes);
}

bool Communicator::can_share() const {
  return state_->host->can_share();
}

torch::Tensor Communicator::allocate_shared(int64_t count,
                                            const torch::TensorOptions& options) const {
  if (!options.device().is_cpu() || !can_share()) {
    throw Error(Code::kBackend,
                fmt::format("the {} ranks of backend {} cannot have one tensor on {} in common",
                            size(), backend(), options.device().str()),
                "ask can_share() first, and give each rank a tensor of its own, on the CPU or GPU");
  }
  require_not_capturing("memory that ranks share", "make it before the step is captured");
  const int64_t bytes = bytes_of(count, options);
  const int64_t share = (rank() + 1) * bytes / size() - rank() * bytes / size();
  current_memory_account().require(share);
  Counted call(*state_, "allocate_shared", bytes);
  auto memory = state_->host->allocate_shared(bytes, call.context(*state_->host, {}));
  call.finished();
  return tensor_of(std::move(memory), count, options, &current_memory_account(), share);
}

void Communicator::abort(std::string_view reason) const {
  if (state_->gpu) state_->gpu->abort(reason);
  state_->host->abort(reason);
}

}  // namespace lockstep
