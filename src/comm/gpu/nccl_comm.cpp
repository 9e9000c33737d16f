#if LOCKSTEP_NCCL

#include <cuda_runtime_api.h>
#include <fmt/format.h>
#include <array>
#include <chrono>
#include <optional>
#include <thread>
#include <vector>

#include "base/running_clock.hpp"
#include "comm/gpu/gpu_reduce.hpp"
#include "comm/gpu/gpu_runtime.hpp"
#include "comm/gpu/nccl_comm.hpp"
#include "lockstep/error.hpp"

namespace lockstep {

namespace {

constexpr auto kPollPeriod = std::chrono::microseconds(20);
constexpr int64_t kFinalizeNs = 5'000'000'000;  // for peers to leave, too

// Whoever gave it up has recorded why, and that error is the one that callers get.
[[noreturn]] void throw_aborted(std::string_view call) {
  throw Error(Code::kBackend, fmt::format("{}: this rank's NCCL communicator was given up", call),
              "look for the first error of this run");
}

}  // namespace

void check_nccl(ncclResult_t result, ncclComm_t comm, std::string_view call) {
  if (result == ncclSuccess || result == ncclInProgress) return;
  const char* detail = ncclGetLastError(comm);
  const std::string message = fmt::format("{} failed: {}{}{}", call, ncclGetErrorString(result),
                                          detail != nullptr && *detail != '\0' ? ": " : "",
                                          detail != nullptr ? detail : "");
  if (result == ncclRemoteError) {
    throw RankError(Code::kRankFailed, -1, message,
                    "look for the rank that failed first: this one is its victim");
  }
  throw Error(Code::kBackend, message,
              "run with NCCL_DEBUG=WARN to see NCCL's own messages, or use --backend gloo or shm");
}

NcclComm::NcclComm(const ncclUniqueId& id, int rank, int size, int64_t deadline_ns) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  check_nccl(ncclCommInitRankConfig(&comm_, size, id, rank, &config), nullptr,
             "ncclCommInitRankConfig");
  try {
    settle("ncclCommInitRankConfig", deadline_ns);
  } catch (...) {
    abort();
    throw;
  }
}

// Peers may still take data from this rank, so all finish together unless one has failed.
NcclComm::~NcclComm() {
  if (comm_ == nullptr) return;
  try {
    run("ncclCommFinalize", running_ns() + kFinalizeNs, ncclCommFinalize);
    const std::lock_guard lock(mutex_);
    if (comm_ != nullptr) (void)ncclCommDestroy(comm_);
  } catch (const std::exception&) {
    abort();
  }
}

void NcclComm::run(std::string_view what, int64_t deadline_ns,
                   const std::function<ncclResult_t(ncclComm_t)>& call) {
  {
    const std::lock_guard lock(mutex_);
    if (comm_ == nullptr) throw_aborted(what);
    check_nccl(call(comm_), comm_, what);
  }
  settle(what, deadline_ns);
}

void NcclComm::check_health() {
  const std::lock_guard lock(mutex_);
  if (comm_ != nullptr) check_nccl(state(), comm_, "NCCL");
}

void NcclComm::abort() noexcept {
  const std::lock_guard lock(mutex_);
  if (comm_ != nullptr) (void)ncclCommAbort(comm_);
  comm_ = nullptr;
}

// Under the mutex.
ncclResult_t NcclComm::state() {
  ncclResult_t found = ncclSuccess;
  const ncclResult_t asked = ncclCommGetAsyncError(comm_, &found);
  return asked == ncclSuccess ? found : asked;
}

void NcclComm::settle(std::string_view what, int64_t deadline_ns) {
  for (;;) {
    {
      const std::lock_guard lock(mutex_);
      if (comm_ == nullptr) throw_aborted(what);
      const ncclResult_t now = state();
      check_nccl(now, comm_, what);
      if (now != ncclInProgress) return;
    }
    if (running_ns() > deadline_ns) {
      throw RankError(Code::kRankAbsent, -1,
                      fmt::format("{}: NCCL did not reach all ranks before the deadline", what),
                      "run with NCCL_DEBUG=INFO to see which connection it waits for; where the "
                      "ranks are only slow, give them more time with --timeout of `lockstep run`");
    }
    std::this_thread::sleep_for(kPollPeriod);
  }
}

namespace {

// Memory for one call, given back when its stream has passed.
class Scratch {
 public:
  Scratch(int64_t bytes, CudaStream stream) : stream_(stream) {
    check_cuda(cudaMallocAsync(&data_, static_cast<size_t>(bytes), stream_), "cudaMallocAsync");
  }
  ~Scratch() { (void)cudaFreeAsync(data_, stream_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  std::byte* data() const { return static_cast<std::byte*>(data_); }

 private:
  void* data_ = nullptr;
  CudaStream stream_;
};

std::optional<ncclDataType_t> type_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::kBool:
    case Dtype::kU8:
      return ncclUint8;
    case Dtype::kI8:
      return ncclInt8;
    case Dtype::kI32:
      return ncclInt32;
    case Dtype::kI64:
      return ncclInt64;
    case Dtype::kF16:
      return ncclFloat16;
    case Dtype::kBF16:
      return ncclBfloat16;
    case Dtype::kF32:
      return ncclFloat32;
    case Dtype::kF64:
      return ncclFloat64;
    case Dtype::kI16:
      break;
  }
  return std::nullopt;
}

bool is_floating(Dtype dtype) {
  return dtype == Dtype::kF16 || dtype == Dtype::kBF16 || dtype == Dtype::kF32 ||
         dtype == Dtype::kF64;
}

// "Or" of BOOL is the maximum of its bytes, 0 and 1.
ncclRedOp_t op_of(Dtype dtype, ReduceOp op) {
  switch (op) {
    case ReduceOp::kMax:
      return ncclMax;
    case ReduceOp::kMin:
      return ncclMin;
    case ReduceOp::kSum:
    case ReduceOp::kMean:
      break;
  }
  return dtype == Dtype::kBool ? ncclMax : ncclSum;
}

// NCCL adds no I16, and does not promise that the maximum of anything with a NaN is NaN.
bool nccl_reduces(Dtype dtype, ReduceOp op) {
  const bool extreme = op == ReduceOp::kMax || op == ReduceOp::kMin;
  return type_of(dtype) && !(extreme && is_floating(dtype));
}

}  // namespace

/// How NCCL is told to reduce.
struct NcclTransfer::Reduction {
  ncclDataType_t type;
  ncclRedOp_t op;
};

void NcclTransfer::all_reduce(const Buffer& buffer, ReduceOp op,
                              std::span<const double> factors) const {
  reduce({buffer.data, buffer.count, buffer.dtype}, buffer, op, {}, factors);
}

void NcclTransfer::reduce_scatter(const ConstBuffer& input, const Buffer& output, ReduceOp op,
                                  std::span<const double> factors) const {
  reduce(input, output, op, {.scattered = true}, factors);
}

void NcclTransfer::reduce(const Buffer& buffer, int root, ReduceOp op,
                          std::span<const double> factors) const {
  reduce({buffer.data, buffer.count, buffer.dtype}, buffer, op, {.root = root}, factors);
}

void NcclTransfer::reduce(const ConstBuffer& input, const Buffer& output, ReduceOp op,
                          Result result, std::span<const double> factors) const {
  if (output.count == 0) return;
  if (!nccl_reduces(output.dtype, op)) return reduce_gathered(input, output, op, result);
  const Reduction how{*type_of(output.dtype), op_of(output.dtype, op)};
  if (op != ReduceOp::kMean) return queue(how, input.data, output, result);
  reduce_scaled(how, input, output, result, factors[static_cast<size_t>(group_.rank)]);
}

// The sum of each rank's values times its factor. NCCL multiplies as it goes, but with a factor of
// the elements' type: that of F16 or BF16 would be off by a thousandth, so those are multiplied in
// F32 before.
void NcclTransfer::reduce_scaled(const Reduction& how, const ConstBuffer& input,
                                 const Buffer& output, Result result, double factor) const {
  if (input.dtype == Dtype::kF16 || input.dtype == Dtype::kBF16) {
    const Scratch scaled(input.bytes(), stream_);
    const std::array inputs = {input.data};
    const std::array outputs = {static_cast<void*>(scaled.data())};
    gpu_reduce(input.dtype, ReduceOp::kMean, inputs, {&factor, 1}, outputs, input.count, stream_);
    return queue(how, scaled.data(), output, result);
  }
  ncclRedOp_t scaled_sum = ncclSum;
  comm_.run("ncclRedOpCreatePreMulSum", deadline_ns_, [&](ncclComm_t comm) {
    auto narrow = static_cast<float>(factor);
    void* scalar = how.type == ncclFloat32 ? static_cast<void*>(&narrow) : &factor;
    return ncclRedOpCreatePreMulSum(&scaled_sum, scalar, how.type, ncclScalarHostImmediate, comm);
  });
  queue({how.type, scaled_sum}, input.data, output, result);
  comm_.run("ncclRedOpDestroy", deadline_ns_,
            [&](ncclComm_t comm) { return ncclRedOpDestroy(scaled_sum, comm); });
}

void NcclTransfer::queue(const Reduction& how, const void* input, const Buffer& output,
                         Result result) const {
  const auto count = static_cast<size_t>(output.count);
  if (result.root >= 0) {
    return comm_.run("ncclReduce", deadline_ns_, [&](ncclComm_t comm) {
      return ncclReduce(input, output.data, count, how.type, how.op, result.root, comm, stream_);
    });
  }
  if (result.scattered) {
    return comm_.run("ncclReduceScatter", deadline_ns_, [&](ncclComm_t comm) {
      return ncclReduceScatter(input, output.data, count, how.type, how.op, comm, stream_);
    });
  }
  comm_.run("ncclAllReduce", deadline_ns_, [&](ncclComm_t comm) {
    return ncclAllReduce(input, output.data, count, how.type, how.op, comm, stream_);
  });
}

// For the few that NCCL cannot: every rank gets all ranks' values, and reduces them itself.
void NcclTransfer::reduce_gathered(const ConstBuffer& input, const Buffer& output, ReduceOp op,
                                   Result result) const {
  if (group_.size() > kMostGpuReduceRanks) {
    throw Error(Code::kUsage,
                fmt::format("nccl reduces {} with this operation among up to {} ranks only",
                            dtype_name(output.dtype), kMostGpuReduceRanks),
                "convert to another dtype first, or reduce a tensor on the CPU");
  }
  const Scratch all(input.bytes() * group_.size(), stream_);
  all_gather(input, {all.data(), input.count * group_.size(), input.dtype});
  if (result.root >= 0 && result.root != group_.rank) return;
  const int64_t own_block = result.scattered ? group_.rank * output.bytes() : 0;
  std::vector<const void*> inputs;
  for (int peer = 0; peer < group_.size(); ++peer) {
    inputs.push_back(all.data() + peer * input.bytes() + own_block);
  }
  const std::array outputs = {output.data};
  gpu_reduce(output.dtype, op, inputs, {}, outputs, output.count, stream_);
}

// What is only moved goes as bytes, so that every dtype does.
void NcclTransfer::broadcast(const Buffer& buffer, int root) const {
  if (buffer.count == 0) return;
  comm_.run("ncclBroadcast", deadline_ns_, [&](ncclComm_t comm) {
    return ncclBroadcast(buffer.data, buffer.data, static_cast<size_t>(buffer.bytes()), ncclUint8,
                         root, comm, stream_);
  });
}

void NcclTransfer::all_gather(const ConstBuffer& input, const Buffer& output) const {
  if (input.count == 0) return;
  comm_.run("ncclAllGather", deadline_ns_, [&](ncclComm_t comm) {
    return ncclAllGather(input.data, output.data, static_cast<size_t>(input.bytes()), ncclUint8,
                         comm, stream_);
  });
}

void NcclTransfer::exchange(const ConstBuffer& input, const Buffer& output,
                            const BlockExchange& blocks) const {
  const int64_t element_bytes = dtype_bytes(input.dtype);
  std::vector<Message> all;
  for (int peer = 0; peer < group_.size(); ++peer) {
    const auto at = static_cast<size_t>(peer);
    auto* from = static_cast<std::byte*>(const_cast<void*>(input.data));
    auto* to = static_cast<std::byte*>(output.data);
    from += blocks.given_offset(peer) * element_bytes;
    to += blocks.taken_offset(peer) * element_bytes;
    if (peer == group_.rank) {
      gpu_copy(to, from, blocks.given[at] * element_bytes, stream_);
      continue;
    }
    all.push_back(
        {.sends = true, .data = from, .bytes = blocks.given[at] * element_bytes, .peer = peer});
    all.push_back(
        {.sends = false, .data = to, .bytes = blocks.taken[at] * element_bytes, .peer = peer});
  }
  messages(all);
}

void NcclTransfer::messages(std::span<const Message> messages) const {
  const bool any = std::any_of(messages.begin(), messages.end(),
                               [](const Message& message) { return message.bytes > 0; });
  if (!any) return;
  comm_.run("ncclGroupEnd of messages", deadline_ns_, [&](ncclComm_t comm) {
    ncclResult_t result = ncclGroupStart();
    for (const Message& message : messages) {
      const auto bytes = static_cast<size_t>(message.bytes);
      if (bytes == 0 || result != ncclSuccess) continue;
      result = message.sends
                   ? ncclSend(message.data, bytes, ncclUint8, message.peer, comm, stream_)
                   : ncclRecv(message.data, bytes, ncclUint8, message.peer, comm, stream_);
    }
    const ncclResult_t ended = ncclGroupEnd();
    return result == ncclSuccess ? ended : result;
  });
}

}  // namespace lockstep

#endif
