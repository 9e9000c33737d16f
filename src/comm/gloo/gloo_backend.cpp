#include <fmt/format.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "comm/arguments.hpp"
#include "comm/backend.hpp"
#include "comm/gloo/gloo_core.hpp"
#include "comm/gloo/sliced_reduce.hpp"
#include "kernels/reduce_kernels.hpp"
#include "lockstep/error.hpp"
#include "lockstep/units.hpp"

namespace lockstep {
namespace {

// How Gloo is told to combine two elements. The ring combines two ranks' values at a time: F16 and
// BF16 are rounded after each, so that n ranks add up to n - 1 roundings where one would do.
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

// What a rank says in a split.
struct ColorAndKey {
  int32_t color = 0;
  int32_t key = 0;
};

class GlooBackend final : public Backend {
 public:
  GlooBackend(TransportModule module, std::shared_ptr<Store> store, Group group,
              std::string address, int64_t deadline_ns)
      : store_(std::move(store)),
        address_(std::move(address)),
        core_(std::make_shared<GlooCore>(std::move(group), *store_, address_, deadline_ns, module)),
        slices_(*core_) {}
  ~GlooBackend() override { core_->shut_down(); }

  std::string_view name() const override { return transport_name(core_->module()); }
  const Group& group() const override { return core_->group(); }

  std::unique_ptr<Work> all_reduce(const Buffer& buffer, ReduceOp op, double weight,
                                   const CallContext& context) override;
  std::unique_ptr<Work> broadcast(const Buffer& buffer, int root,
                                  const CallContext& context) override;
  std::unique_ptr<Work> reduce_scatter(const ConstBuffer& input, const Buffer& output, ReduceOp op,
                                       double weight, const CallContext& context) override;
  std::unique_ptr<Work> all_gather(const ConstBuffer& input, const Buffer& output,
                                   const CallContext& context) override;
  std::unique_ptr<Work> reduce(const Buffer& buffer, int root, ReduceOp op, double weight,
                               const CallContext& context) override;
  std::unique_ptr<Work> exchange(const ConstBuffer& input, const Buffer& output,
                                 const BlockExchange& blocks, const CallContext& context) override;
  std::unique_ptr<Work> send(const ConstBuffer& buffer, int to, int tag,
                             const CallContext& context) override;
  std::unique_ptr<Work> recv(const Buffer& buffer, int from, int tag,
                             const CallContext& context) override;
  void barrier(const CallContext& context) override {
    // It is done when all ranks have told their fingerprints.
    call(Fingerprint{}, context, [](const GlooCore::Task&, std::span<const Fingerprint>) {});
  }
  std::unique_ptr<Backend> split(int color, int key, std::string_view group_name,
                                 const CallContext& context) override;
  std::shared_ptr<RegisteredMemory> allocate(int64_t bytes, const CallContext& context) override;
  void abort(const AbortRecord& record) noexcept override { core_->session().abort(record); }

 private:
  /// The body outlives this call: it may refer to the backend, and to nothing of its caller.
  std::unique_ptr<Work> begin(const Fingerprint& what, const CallContext& context,
                              GlooCore::Body body) {
    auto work = std::make_unique<GlooCore::Task>(core_, what, context, std::move(body));
    core_->begin(*work);
    return work;
  }

  std::unique_ptr<Work> begin_message(int peer, const Fingerprint& what, const CallContext& context,
                                      GlooCore::Body body) {
    auto work = std::make_unique<GlooCore::Task>(core_, what, context, std::move(body));
    work->peer = peer;
    core_->begin_message(*work);
    return work;
  }

  void compare_counts(const GlooCore::Task& task, const BlockExchange& blocks);
  void move_blocks(const GlooCore::Task& task, const ConstBuffer& input, const Buffer& output,
                   const BlockExchange& blocks);

  void call(const Fingerprint& what, const CallContext& context, GlooCore::Body body) {
    begin(what, context, std::move(body))->wait();
  }

  std::shared_ptr<Store> store_;
  std::string address_;
  std::shared_ptr<GlooCore> core_;
  SlicedReduce slices_;
};

std::unique_ptr<Backend::Work> GlooBackend::all_reduce(const Buffer& buffer, ReduceOp op,
                                                       double weight, const CallContext& context) {
  check_reduce(buffer, op, weight);
  const Fingerprint what =
      make_reduce_fingerprint(Operation::kAllReduce, buffer.dtype, buffer.count, op, weight);
  return begin(what, context,
               [this, buffer, op](const GlooCore::Task& task, std::span<const Fingerprint> calls) {
                 const auto factors = mean_factors(calls);
                 if (buffer.count == 0 || size() == 1) return;
                 if (!core_->reduces()) return slices_.all_reduce(task, buffer, op, factors);
                 if (op == ReduceOp::kMean) scale(buffer, factors[static_cast<size_t>(rank())]);
                 Reduction how{buffer.dtype, op == ReduceOp::kMean ? ReduceOp::kSum : op};
                 core_->transfer(
                     task, [&](const auto& api, auto* gloo, const LockstepGlooCall& call) {
                       return api.all_reduce(gloo, buffer.data, static_cast<size_t>(buffer.count),
                                             static_cast<size_t>(dtype_bytes(buffer.dtype)),
                                             reduce_two, &how, &call);
                     });
               });
}

// The others' values must stay: they are reduced in a copy.
std::unique_ptr<Backend::Work> GlooBackend::reduce(const Buffer& buffer, int root, ReduceOp op,
                                                   double weight, const CallContext& context) {
  check_rooted_reduce(group(), buffer, root, op, weight);
  return begin(
      make_rooted_reduce_fingerprint(buffer, root, op, weight), context,
      [this, buffer, root, op](const GlooCore::Task& task, std::span<const Fingerprint> calls) {
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
        core_->transfer(task, [&](const auto& api, auto* gloo, const LockstepGlooCall& call) {
          return api.reduce(gloo, data, static_cast<size_t>(buffer.count),
                            static_cast<size_t>(dtype_bytes(buffer.dtype)), root, reduce_two, &how,
                            &call);
        });
      });
}

std::unique_ptr<Backend::Work> GlooBackend::exchange(const ConstBuffer& input, const Buffer& output,
                                                     const BlockExchange& blocks,
                                                     const CallContext& context) {
  check_exchange(group(), input, output, blocks);
  return begin(
      make_exchange_fingerprint(input.dtype, blocks), context,
      [this, input, output, blocks](const GlooCore::Task& task, std::span<const Fingerprint>) {
        compare_counts(task, blocks);
        move_blocks(task, input, output, blocks);
      });
}

// Every rank sees the counts of all, and so finds the same mismatch by itself.
void GlooBackend::compare_counts(const GlooCore::Task& task, const BlockExchange& blocks) {
  std::vector<int64_t> own = blocks.given;
  own.insert(own.end(), blocks.taken.begin(), blocks.taken.end());
  const std::string_view bytes(reinterpret_cast<const char*>(own.data()),
                               own.size() * sizeof(int64_t));
  ExchangedCounts given;
  ExchangedCounts taken;
  for (const std::string& said : core_->exchange(task, GlooLink::Frame::kNote, bytes)) {
    std::vector<int64_t> counts(own.size());
    std::memcpy(counts.data(), said.data(), std::min(said.size(), bytes.size()));
    const auto middle = counts.begin() + static_cast<ptrdiff_t>(blocks.given.size());
    given.emplace_back(counts.begin(), middle);
    taken.emplace_back(middle, counts.end());
  }
  require_same_counts(group(), task.spoken_of(), given, taken);
}

void GlooBackend::move_blocks(const GlooCore::Task& task, const ConstBuffer& input,
                              const Buffer& output, const BlockExchange& blocks) {
  const int64_t element_bytes = dtype_bytes(input.dtype);
  const auto block_of = [&](int64_t offset, int64_t count) {
    return LockstepGlooBlock{static_cast<size_t>(offset * element_bytes),
                             static_cast<size_t>(count * element_bytes)};
  };
  std::vector<LockstepGlooBlock> given;
  std::vector<LockstepGlooBlock> taken;
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
  core_->transfer(task, [&](const auto& api, auto* gloo, const LockstepGlooCall& call) {
    return api.exchange(gloo, input.data, given.data(), output.data, taken.data(), &call);
  });
}

std::unique_ptr<Backend::Work> GlooBackend::send(const ConstBuffer& buffer, int to, int tag,
                                                 const CallContext& context) {
  check_message(group(), buffer.count, to);
  if (to == rank()) {
    core_->session().guarded([&] { core_->own_messages().send(buffer, tag, context); });
    return make_done_work();
  }
  return begin_message(
      to, make_message_fingerprint(Operation::kSend, 0, buffer, tag, context.label), context,
      [this, buffer](const GlooCore::Task& task, auto) { core_->send(task, buffer); });
}

std::unique_ptr<Backend::Work> GlooBackend::recv(const Buffer& buffer, int from, int tag,
                                                 const CallContext& context) {
  check_message(group(), buffer.count, from);
  if (from == rank()) {
    core_->session().guarded([&] { core_->own_messages().recv(buffer, tag, context); });
    return make_done_work();
  }
  const ConstBuffer expected{buffer.data, buffer.count, buffer.dtype};
  return begin_message(
      from, make_message_fingerprint(Operation::kRecv, 0, expected, tag, context.label), context,
      [this, buffer](const GlooCore::Task& task, auto) { core_->recv(task, buffer); });
}

std::unique_ptr<Backend::Work> GlooBackend::broadcast(const Buffer& buffer, int root,
                                                      const CallContext& context) {
  check_broadcast(group(), buffer, root);
  return begin(
      make_broadcast_fingerprint(buffer, root), context,
      [this, buffer, root](const GlooCore::Task& task, std::span<const Fingerprint>) {
        if (buffer.count == 0) return;
        core_->transfer(task, [&](const auto& api, auto* gloo, const LockstepGlooCall& call) {
          return api.broadcast(gloo, buffer.data, static_cast<size_t>(buffer.bytes()), root, &call);
        });
      });
}

// Every rank sends each other one its block, and reduces what it got in the order of the ranks:
// no more bytes than a ring moves, and one rounding.
std::unique_ptr<Backend::Work> GlooBackend::reduce_scatter(const ConstBuffer& input,
                                                           const Buffer& output, ReduceOp op,
                                                           double weight,
                                                           const CallContext& context) {
  check_reduce_scatter(group(), input, output, op, weight);
  const Fingerprint what =
      make_reduce_fingerprint(Operation::kReduceScatter, output.dtype, output.count, op, weight);
  return begin(
      what, context,
      [this, input, output, op](const GlooCore::Task& task, std::span<const Fingerprint> calls) {
        const auto factors = mean_factors(calls);
        if (output.count == 0) return;
        const auto block = static_cast<size_t>(output.bytes());
        std::vector<std::byte> blocks(block * calls.size());
        move_blocks(task, input, {blocks.data(), input.count, input.dtype},
                    BlockExchange::all_to_all(group(), output.count));
        std::vector<const void*> inputs;
        for (size_t peer = 0; peer < calls.size(); ++peer) inputs.push_back(&blocks[peer * block]);
        const std::array outputs = {output.data};
        lockstep::reduce(output.dtype, op, inputs, factors, outputs, output.count);
      });
}

std::unique_ptr<Backend::Work> GlooBackend::all_gather(const ConstBuffer& input,
                                                       const Buffer& output,
                                                       const CallContext& context) {
  check_all_gather(group(), input, output);
  return begin(make_fingerprint(Operation::kAllGather, input.dtype, input.count), context,
               [this, input, output](const GlooCore::Task& task, std::span<const Fingerprint>) {
                 if (input.count == 0) return;
                 const auto bytes = static_cast<size_t>(input.bytes());
                 if (size() == 1) std::memmove(output.data, input.data, bytes);
                 core_->transfer(
                     task, [&](const auto& api, auto* gloo, const LockstepGlooCall& call) {
                       return api.all_gather(gloo, input.data, bytes, output.data, &call);
                     });
               });
}

std::unique_ptr<Backend> GlooBackend::split(int color, int key, std::string_view group_name,
                                            const CallContext& context) {
  Fingerprint what;
  what.operation = Operation::kSplit;
  std::unique_ptr<Backend> part;
  call(what, context, [&](const GlooCore::Task& task, std::span<const Fingerprint>) {
    const ColorAndKey own{color, key};
    const auto said = core_->exchange(task, GlooLink::Frame::kNote,
                                      {reinterpret_cast<const char*>(&own), sizeof own});
    std::vector<std::pair<int, int>> members;  // (key, group rank)
    for (int peer = 0; peer < size(); ++peer) {
      ColorAndKey theirs;
      const std::string& bytes = said[static_cast<size_t>(peer)];
      std::memcpy(&theirs, bytes.data(), std::min(bytes.size(), sizeof theirs));
      if (theirs.color == color) members.emplace_back(theirs.key, peer);
    }
    std::sort(members.begin(), members.end());
    Group group_of_color{0, {}, std::string(group_name)};
    for (size_t i = 0; i < members.size(); ++i) {
      const int peer = members[i].second;
      if (peer == rank()) group_of_color.rank = static_cast<int>(i);
      group_of_color.world_ranks.push_back(group().world_ranks.at(static_cast<size_t>(peer)));
    }
    auto part_store =
        make_prefix_store(store_, fmt::format("split {} color {}", task.call.sequence, color));
    part = std::make_unique<GlooBackend>(core_->module(), std::move(part_store),
                                         std::move(group_of_color), address_, context.deadline_ns);
  });
  return part;
}

std::shared_ptr<RegisteredMemory> GlooBackend::allocate(int64_t bytes, const CallContext& context) {
  check_allocate(bytes);
  Fingerprint what;
  what.operation = Operation::kAllocate;
  what.count = bytes;
  std::shared_ptr<RegisteredMemory> memory;
  call(what, context, [&](const GlooCore::Task&, std::span<const Fingerprint>) {
    memory = std::make_shared<PlainMemory>(bytes);
  });
  return memory;
}

}  // namespace

std::unique_ptr<Backend> make_gloo_backend(const NetworkOptions& options) {
  return std::make_unique<GlooBackend>(TransportModule::kGloo, options.store,
                                       Group::world(options.rank, options.size), options.address,
                                       options.deadline_ns);
}

std::unique_ptr<Backend> make_mpi_backend(const NetworkOptions& options) {
  return std::make_unique<GlooBackend>(TransportModule::kMpi, options.store,
                                       Group::world(options.rank, options.size), options.address,
                                       options.deadline_ns);
}

}  // namespace lockstep
