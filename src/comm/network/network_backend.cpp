#include <fmt/format.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "comm/arguments.hpp"
#include "comm/backend.hpp"
#include "comm/network/network_backend.hpp"
#include "kernels/reduce_kernels.hpp"
#include "lockstep/error.hpp"
#include "lockstep/units.hpp"

namespace lockstep {
namespace {

// How a module is told to combine two elements. The ring combines two ranks' values at a time: F16
// and BF16 are rounded after each, so that n ranks add up to n - 1 roundings where one would do.
struct Reduction {
  Dtype dtype;
  ReduceOp op;
};

void reduce_two(void* user, void* out, const void* a, const void* b, size_t count) {
  const auto* how = static_cast<const Reduction*>(user);
  const std::array inputs = {a, b};
  const std::array outputs = {out};
  reduce(how->dtype, how->op, inputs, {}, outputs, static_cast<int64_t>(count));
}

// This rank's share of a mean.
void scale(const Buffer& buffer, double factor) {
  const std::array<const void*, 1> inputs = {buffer.data};
  const std::array outputs = {buffer.data};
  reduce(buffer.dtype, ReduceOp::kMean, inputs, {&factor, 1}, outputs, buffer.count);
}

class PlainMemory final : public RegisteredMemory {
 public:
  explicit PlainMemory(int64_t bytes) : bytes_(bytes) {
    if (bytes == 0) return;
    data_ = ::mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data_ != MAP_FAILED) return;
    throw Error(Code::kOutOfMemory,
                fmt::format("no {} for a buffer: {}", format_bytes(bytes), std::strerror(errno)),
                "use smaller buckets or fewer ranks on this host");
  }
  ~PlainMemory() override {
    if (data_ != nullptr) ::munmap(data_, static_cast<size_t>(bytes_));
  }
  PlainMemory(const PlainMemory&) = delete;
  PlainMemory& operator=(const PlainMemory&) = delete;

  void* data() const override { return data_; }
  int64_t bytes() const override { return bytes_; }

 private:
  void* data_ = nullptr;
  int64_t bytes_;
};

// What a rank contributes to a split.
struct ColorAndKey {
  int32_t color = 0;
  int32_t key = 0;
};

}  // namespace

NetworkBackend::NetworkBackend(const BackendInfo& info, std::shared_ptr<Store> store, Group group,
                               std::string address, int64_t deadline_ns)
    : store_(std::move(store)),
      address_(std::move(address)),
      core_(std::make_shared<NetworkCore>(std::move(group), *store_, address_, deadline_ns, info)),
      slices_(*core_) {}

std::unique_ptr<Backend::Work> NetworkBackend::begin(const Fingerprint& what,
                                                     const CallContext& context,
                                                     NetworkCore::Body body,
                                                     const ConstBuffer& attached) {
  auto work = std::make_unique<Task>(core_, what, context, std::move(body));
  work->attach(attached.data, attached.bytes());
  core_->begin(*work);
  return work;
}

// Sending values with the fingerprints leaves a single trip between ranks. They go from each
// rank to each, so they must be few.
bool NetworkBackend::can_carry(int64_t bytes) const {
  constexpr int64_t kMostBytes = 4 << 10;
  constexpr int64_t kMostOfAll = 16 << 10;
  return size() > 1 && bytes > 0 && bytes <= kMostBytes && bytes * (size() - 1) <= kMostOfAll;
}

void NetworkBackend::reduce_attached(const Task& task, const Buffer& output, ReduceOp op,
                                     Calls calls) const {
  std::vector<std::byte> aligned(static_cast<size_t>(output.bytes()) * calls.size());
  std::vector<const void*> inputs;
  for (int peer = 0; peer < size(); ++peer) {
    std::byte* values = aligned.data() + peer * output.bytes();
    std::memcpy(values, task.attached_by(peer, output.bytes()),
                static_cast<size_t>(output.bytes()));
    inputs.push_back(values);
  }
  add(inputs, output, op, calls);
}

// In the order of the ranks, and with one rounding.
void NetworkBackend::add(std::span<const void* const> inputs, const Buffer& output, ReduceOp op,
                         Calls calls) const {
  lockstep::reduce(output.dtype, op, inputs, mean_factors(calls), {&output.data, 1}, output.count);
}

std::unique_ptr<Backend::Work> NetworkBackend::begin_message(int peer, const Fingerprint& what,
                                                             const CallContext& context,
                                                             NetworkCore::Body body) {
  auto work = std::make_unique<Task>(core_, what, context, std::move(body));
  work->peer = peer;
  core_->begin_message(*work);
  return work;
}

// It is done when all ranks have told their fingerprints.
void NetworkBackend::barrier(const CallContext& context) {
  call(Fingerprint{}, context, [](const Task&, Calls) {});
}

std::unique_ptr<Backend::Work> NetworkBackend::all_reduce(const Buffer& buffer, ReduceOp op,
                                                          double weight,
                                                          const CallContext& context) {
  check_reduce(buffer, op, weight);
  const Fingerprint what =
      make_reduce_fingerprint(Operation::kAllReduce, buffer.dtype, buffer.count, op, weight);
  if (can_carry(buffer.bytes())) {
    return begin(what, context,
                 [this, buffer, op](const Task& task, Calls calls) {
                   reduce_attached(task, buffer, op, calls);
                 },
                 {buffer.data, buffer.count, buffer.dtype});
  }
  auto work = std::make_unique<Task>(core_, what, context);
  work->prepare(
      [this, buffer, op](const Task& task) { return prepare_all_reduce(task, buffer, op); });
  core_->begin(*work);
  return work;
}

NetworkCore::Body NetworkBackend::prepare_all_reduce(const Task&, const Buffer& buffer,
                                                     ReduceOp op) {
  return [this, buffer, op](const Task& task, Calls calls) {
    move_all_reduce(task, buffer, op, calls);
  };
}

void NetworkBackend::move_all_reduce(const Task& task, const Buffer& buffer, ReduceOp op,
                                     Calls calls) {
  const auto factors = mean_factors(calls);
  if (buffer.count == 0 || size() == 1) return;
  if (!core_->reduces()) return slices_.all_reduce(task, buffer, op, factors);
  if (op == ReduceOp::kMean) scale(buffer, factors[static_cast<size_t>(rank())]);
  Reduction how{buffer.dtype, op == ReduceOp::kMean ? ReduceOp::kSum : op};
  core_->transfer(task, [&](const auto& api, auto* connections, const LockstepTransportCall& call) {
    return api.all_reduce(connections, buffer.data, static_cast<size_t>(buffer.count),
                          static_cast<size_t>(dtype_bytes(buffer.dtype)), reduce_two, &how, &call);
  });
}

std::unique_ptr<Backend::Work> NetworkBackend::reduce(const Buffer& buffer, int root, ReduceOp op,
                                                      double weight, const CallContext& context) {
  check_rooted_reduce(group(), buffer, root, op, weight);
  const Fingerprint what = make_rooted_reduce_fingerprint(buffer, root, op, weight);
  if (can_carry(buffer.bytes())) {
    return begin(what, context,
                 [this, buffer, root, op](const Task& task, Calls calls) {
                   if (rank() == root) reduce_attached(task, buffer, op, calls);
                 },
                 {buffer.data, buffer.count, buffer.dtype});
  }
  return begin(what, context, [this, buffer, root, op](const Task& task, Calls calls) {
    move_reduce(task, buffer, root, op, calls);
  });
}

// The others' values must stay: they are reduced in a copy.
void NetworkBackend::move_reduce(const Task& task, const Buffer& buffer, int root, ReduceOp op,
                                 Calls calls) {
  const auto factors = mean_factors(calls);
  if (buffer.count == 0 || size() == 1) return;
  if (!core_->reduces()) return slices_.reduce(task, buffer, root, op, factors);
  std::vector<std::byte> copy;
  void* data = buffer.data;
  if (rank() != root) {
    const auto* first = static_cast<const std::byte*>(buffer.data);
    copy.assign(first, first + buffer.bytes());
    data = copy.data();
  }
  const Buffer reduced{data, buffer.count, buffer.dtype};
  if (op == ReduceOp::kMean) scale(reduced, factors[static_cast<size_t>(rank())]);
  Reduction how{buffer.dtype, op == ReduceOp::kMean ? ReduceOp::kSum : op};
  core_->transfer(task, [&](const auto& api, auto* connections, const LockstepTransportCall& call) {
    return api.reduce(connections, data, static_cast<size_t>(buffer.count),
                      static_cast<size_t>(dtype_bytes(buffer.dtype)), root, reduce_two, &how,
                      &call);
  });
}

std::unique_ptr<Backend::Work> NetworkBackend::exchange(const ConstBuffer& input,
                                                        const Buffer& output,
                                                        const BlockExchange& blocks,
                                                        const CallContext& context) {
  check_exchange(group(), input, output, blocks);
  return begin(make_exchange_fingerprint(input.dtype, blocks), context,
               [this, input, output, blocks](const Task& task, Calls) {
                 compare_counts(task, blocks);
                 move_blocks(task, input, output, blocks);
               });
}

// Every rank sees the counts of all, and so finds the same mismatch by itself.
void NetworkBackend::compare_counts(const Task& task, const BlockExchange& blocks) {
  std::vector<int64_t> own = blocks.given;
  own.insert(own.end(), blocks.taken.begin(), blocks.taken.end());
  const std::string_view bytes(reinterpret_cast<const char*>(own.data()),
                               own.size() * sizeof(int64_t));
  ExchangedCounts given;
  ExchangedCounts taken;
  for (const std::string& reply : core_->exchange(task, TcpControl::Frame::kNote, bytes)) {
    std::vector<int64_t> counts(own.size());
    std::memcpy(counts.data(), reply.data(), std::min(reply.size(), bytes.size()));
    const auto middle = counts.begin() + static_cast<ptrdiff_t>(blocks.given.size());
    given.emplace_back(counts.begin(), middle);
    taken.emplace_back(middle, counts.end());
  }
  require_same_counts(group(), task.reported(), given, taken);
}

void NetworkBackend::move_blocks(const Task& task, const ConstBuffer& input, const Buffer& output,
                                 const BlockExchange& blocks) {
  const int64_t element_bytes = dtype_bytes(input.dtype);
  const auto block_of = [&](int64_t offset, int64_t count) {
    return LockstepTransportBlock{static_cast<size_t>(offset * element_bytes),
                                  static_cast<size_t>(count * element_bytes)};
  };
  std::vector<LockstepTransportBlock> given;
  std::vector<LockstepTransportBlock> taken;
  for (int peer = 0; peer < size(); ++peer) {
    const auto at = static_cast<size_t>(peer);
    given.push_back(block_of(blocks.given_offset(peer), blocks.given[at]));
    taken.push_back(block_of(blocks.taken_offset(peer), blocks.taken[at]));
  }
  const auto own = static_cast<size_t>(rank());
  if (given[own].bytes > 0) {
    std::memcpy(static_cast<std::byte*>(output.data) + taken[own].offset,
                static_cast<const std::byte*>(input.data) + given[own].offset, given[own].bytes);
  }
  core_->transfer(task, [&](const auto& api, auto* connections, const LockstepTransportCall& call) {
    return api.exchange(connections, input.data, given.data(), output.data, taken.data(), &call);
  });
}

std::unique_ptr<Backend::Work> NetworkBackend::send(const ConstBuffer& buffer, int to, int tag,
                                                    const CallContext& context) {
  check_message(group(), buffer.count, to);
  if (to == rank()) {
    core_->session().guarded([&] { core_->own_messages().send(buffer, tag, context); });
    return make_done_work();
  }
  return begin_message(
      to, make_message_fingerprint(Operation::kSend, 0, buffer, tag, context.label), context,
      [this, buffer](const Task& task, Calls) { core_->send(task, buffer); });
}

std::unique_ptr<Backend::Work> NetworkBackend::recv(const Buffer& buffer, int from, int tag,
                                                    const CallContext& context) {
  check_message(group(), buffer.count, from);
  if (from == rank()) {
    core_->session().guarded([&] { core_->own_messages().recv(buffer, tag, context); });
    return make_done_work();
  }
  const ConstBuffer expected{buffer.data, buffer.count, buffer.dtype};
  return begin_message(
      from, make_message_fingerprint(Operation::kRecv, 0, expected, tag, context.label), context,
      [this, buffer](const Task& task, Calls) { core_->recv(task, buffer); });
}

std::unique_ptr<Backend::Work> NetworkBackend::broadcast(const Buffer& buffer, int root,
                                                         const CallContext& context) {
  check_broadcast(group(), buffer, root);
  const Fingerprint what = make_broadcast_fingerprint(buffer, root);
  if (can_carry(buffer.bytes())) {
    return begin(
        what, context,
        [this, buffer, root](const Task& task, Calls) {
          if (rank() == root) return;
          const auto bytes = static_cast<size_t>(buffer.bytes());
          std::memcpy(buffer.data, task.attached_by(root, buffer.bytes()), bytes);
        },
        rank() == root ? ConstBuffer{buffer.data, buffer.count, buffer.dtype} : ConstBuffer{});
  }
  return begin(what, context, [this, buffer, root](const Task& task, Calls) {
    if (buffer.count > 0) move_broadcast(task, buffer, root);
  });
}

void NetworkBackend::move_broadcast(const Task& task, const Buffer& buffer, int root) {
  core_->transfer(task, [&](const auto& api, auto* connections, const LockstepTransportCall& call) {
    return api.broadcast(connections, buffer.data, static_cast<size_t>(buffer.bytes()), root,
                         &call);
  });
}

std::unique_ptr<Backend::Work> NetworkBackend::reduce_scatter(const ConstBuffer& input,
                                                              const Buffer& output, ReduceOp op,
                                                              double weight,
                                                              const CallContext& context) {
  check_reduce_scatter(group(), input, output, op, weight);
  const Fingerprint what =
      make_reduce_fingerprint(Operation::kReduceScatter, output.dtype, output.count, op, weight);
  return begin(what, context, [this, input, output, op](const Task& task, Calls calls) {
    move_reduce_scatter(task, input, output, op, calls);
  });
}

// Every rank sends each other one its block, and reduces what it got in the order of the ranks:
// no more bytes than a ring moves, and one rounding.
void NetworkBackend::move_reduce_scatter(const Task& task, const ConstBuffer& input,
                                         const Buffer& output, ReduceOp op, Calls calls) {
  const auto block = static_cast<size_t>(output.bytes());
  std::vector<std::byte> blocks(block * calls.size());
  if (output.count > 0) {
    NetworkBackend::move_blocks(task, input, {blocks.data(), input.count, input.dtype},
                                BlockExchange::all_to_all(group(), output.count));
  }
  std::vector<const void*> inputs;
  for (size_t peer = 0; peer < calls.size(); ++peer) inputs.push_back(blocks.data() + peer * block);
  add(inputs, output, op, calls);
}

std::unique_ptr<Backend::Work> NetworkBackend::all_gather(const ConstBuffer& input,
                                                          const Buffer& output,
                                                          const CallContext& context) {
  check_all_gather(group(), input, output);
  const Fingerprint what = make_fingerprint(Operation::kAllGather, input.dtype, input.count);
  if (can_carry(input.bytes())) {
    return begin(
        what, context,
        [this, input, output](const Task& task, Calls) {
          for (int peer = 0; peer < size(); ++peer) {
            std::memcpy(static_cast<std::byte*>(output.data) + peer * input.bytes(),
                        task.attached_by(peer, input.bytes()), static_cast<size_t>(input.bytes()));
          }
        },
        input);
  }
  return begin(what, context, [this, input, output](const Task& task, Calls) {
    if (input.count > 0) move_all_gather(task, input, output);
  });
}

void NetworkBackend::move_all_gather(const Task& task, const ConstBuffer& input,
                                     const Buffer& output) {
  const auto bytes = static_cast<size_t>(input.bytes());
  if (size() == 1) std::memmove(output.data, input.data, bytes);
  core_->transfer(task, [&](const auto& api, auto* connections, const LockstepTransportCall& call) {
    return api.all_gather(connections, input.data, bytes, output.data, &call);
  });
}

std::unique_ptr<Backend> NetworkBackend::split(int color, int key, std::string_view group_name,
                                               const CallContext& context) {
  Fingerprint what;
  what.operation = Operation::kSplit;
  std::unique_ptr<Backend> made;
  call(what, context, [&](const Task& task, Calls) {
    const ColorAndKey own{color, key};
    const auto replies = core_->exchange(task, TcpControl::Frame::kNote,
                                         {reinterpret_cast<const char*>(&own), sizeof own});
    std::vector<std::pair<int, int>> members;  // (key, group rank)
    for (int peer = 0; peer < size(); ++peer) {
      ColorAndKey theirs;
      const std::string& bytes = replies[static_cast<size_t>(peer)];
      std::memcpy(&theirs, bytes.data(), std::min(bytes.size(), sizeof theirs));
      if (theirs.color == color) members.emplace_back(theirs.key, peer);
    }
    std::sort(members.begin(), members.end());
    Part part{.store = nullptr, .group = {0, {}, std::string(group_name)}, .color = color};
    for (size_t i = 0; i < members.size(); ++i) {
      const int peer = members[i].second;
      if (peer == rank()) part.group.rank = static_cast<int>(i);
      part.group.world_ranks.push_back(group().world_rank(peer));
      part.members.push_back(peer);
    }
    part.store =
        make_prefix_store(store_, fmt::format("split {} color {}", task.call.sequence, color));
    made = make_part(task, part);
  });
  return made;
}

std::unique_ptr<Backend> NetworkBackend::make_part(const Task& task, const Part& part) {
  return std::make_unique<NetworkBackend>(core_->info(), part.store, part.group, address_,
                                          task.deadline_ns);
}

std::shared_ptr<RegisteredMemory> NetworkBackend::allocate(int64_t bytes,
                                                           const CallContext& context) {
  check_allocate(bytes);
  Fingerprint what;
  what.operation = Operation::kAllocate;
  what.count = bytes;
  std::shared_ptr<RegisteredMemory> memory;
  call(what, context, [&](const Task& task, Calls) { memory = make_memory(task, bytes); });
  return memory;
}

std::shared_ptr<RegisteredMemory> NetworkBackend::make_memory(const Task&, int64_t bytes) {
  return std::make_shared<PlainMemory>(bytes);
}

std::unique_ptr<Backend> make_network_backend(std::string_view name,
                                              const NetworkOptions& options) {
  return std::make_unique<NetworkBackend>(*find_backend(name), options.store,
                                          Group::world(options.rank, options.size), options.address,
                                          options.deadline_ns);
}

}  // namespace lockstep
