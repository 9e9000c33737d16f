#include <fmt/format.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <numeric>

#include "comm/backends.hpp"
#include "comm/check_call.hpp"
#include "comm/gloo/gloo_core.hpp"
#include "comm/make_call.hpp"
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

// [place] -> what that rank's values are multiplied by in a mean; none for other operations.
std::vector<double> factors_of(ReduceOp op, std::span<const Call> calls) {
  if (op != ReduceOp::kMean) return {};
  double total = 0;
  for (const Call& call : calls) total += call.weight;
  if (total == 0) {
    throw Error(Code::kUsage, describe(calls[0]) + ": the weights of all ranks are zero",
                "give at least one rank a weight; a weight is usually its number of samples");
  }
  std::vector<double> factors;
  for (const Call& call : calls) factors.push_back(call.weight / total);
  return factors;
}

class GlooPending final : public Pending {
 public:
  GlooPending(std::shared_ptr<GlooCore> core, std::shared_ptr<GlooCore::Task> task)
      : core_(std::move(core)), task_(std::move(task)) {}

  // The buffer may go with this: no thread may touch it afterwards.
  ~GlooPending() override {
    try {
      if (core_->done(*task_)) return;
      core_->abort("it dropped an all_reduce that was not done");
      core_->finish(*task_);
    } catch (const std::exception&) {
      // It ended, which is all that matters here; later calls tell why.
    }
  }

  bool advance() override { return core_->done(*task_); }
  void wait() override { core_->finish(*task_); }

 private:
  std::shared_ptr<GlooCore> core_;
  std::shared_ptr<GlooCore::Task> task_;
};

class PlainMemory final : public ReachableMemory {
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
struct Choice {
  int32_t colour = 0;
  int32_t key = 0;
};

class GlooBackend final : public Backend {
 public:
  GlooBackend(std::shared_ptr<Store> store, Group group, std::string address, int64_t deadline_ns)
      : store_(std::move(store)),
        address_(std::move(address)),
        core_(std::make_shared<GlooCore>(std::move(group), *store_, address_, deadline_ns)) {}
  ~GlooBackend() override { core_->shut_down(); }

  std::string_view name() const override { return "gloo"; }
  const Group& group() const override { return core_->group(); }

  std::unique_ptr<Pending> all_reduce(const Buffer& buffer, ReduceOp op, double weight,
                                      const CallContext& context) override;
  void broadcast(const Buffer& buffer, int root, const CallContext& context) override;
  void reduce_scatter(const ConstBuffer& input, const Buffer& output, ReduceOp op, double weight,
                      const CallContext& context) override;
  void all_gather(const ConstBuffer& input, const Buffer& output,
                  const CallContext& context) override;
  void send(const ConstBuffer& buffer, int to, int tag, const CallContext& context) override {
    core_->send(buffer, to, tag, context);
  }
  void recv(const Buffer& buffer, int from, int tag, const CallContext& context) override {
    core_->recv(buffer, from, tag, context);
  }
  void barrier(const CallContext& context) override {
    // That all ranks have told their calls is all there is to it.
    call(Call{}, context, [](const GlooCore::Task&, std::span<const Call>) {});
  }
  std::unique_ptr<Backend> split(int colour, int key, std::string_view group_name,
                                 const CallContext& context) override;
  std::shared_ptr<ReachableMemory> allocate(int64_t bytes, const CallContext& context) override;
  void abort(std::string_view reason) noexcept override { core_->abort(reason); }

 private:
  void call(const Call& call, const CallContext& context, GlooCore::Body body) {
    core_->finish(*core_->begin(call, context, std::move(body)));
  }

  std::shared_ptr<Store> store_;
  std::string address_;
  std::shared_ptr<GlooCore> core_;
};

std::unique_ptr<Pending> GlooBackend::all_reduce(const Buffer& buffer, ReduceOp op, double weight,
                                                 const CallContext& context) {
  check_reduce(buffer, op, weight);
  const Call what = make_reduce_call(Operation::kAllReduce, buffer.dtype, buffer.count, op, weight);
  const auto body = [this, buffer, op](const GlooCore::Task& task, std::span<const Call> calls) {
    const auto factors = factors_of(op, calls);
    if (buffer.count == 0 || size() == 1) return;
    if (op == ReduceOp::kMean) {
      const double factor = factors[static_cast<size_t>(rank())];
      const std::array<const void*, 1> inputs = {buffer.data};
      const std::array outputs = {buffer.data};
      reduce(buffer.dtype, op, inputs, {&factor, 1}, outputs, buffer.count);
    }
    Reduction how{buffer.dtype, op == ReduceOp::kMean ? ReduceOp::kSum : op};
    core_->transfer(task, [&](const auto& api, auto* gloo, const LockstepGlooCall& call) {
      return api.all_reduce(gloo, buffer.data, static_cast<size_t>(buffer.count),
                            static_cast<size_t>(dtype_bytes(buffer.dtype)), reduce_two, &how,
                            &call);
    });
  };
  return std::make_unique<GlooPending>(core_, core_->begin(what, context, body));
}

void GlooBackend::broadcast(const Buffer& buffer, int root, const CallContext& context) {
  check_broadcast(group(), buffer, root);
  call(make_broadcast_call(buffer, root), context,
       [&](const GlooCore::Task& task, std::span<const Call>) {
         if (buffer.count == 0) return;
         core_->transfer(task, [&](const auto& api, auto* gloo, const LockstepGlooCall& gloo_call) {
           return api.broadcast(gloo, buffer.data, static_cast<size_t>(buffer.bytes()), root,
                                &gloo_call);
         });
       });
}

// Every rank sends each other one its block, and reduces what it got in the order of the ranks:
// no more bytes than a ring moves, and one rounding.
void GlooBackend::reduce_scatter(const ConstBuffer& input, const Buffer& output, ReduceOp op,
                                 double weight, const CallContext& context) {
  check_reduce_scatter(group(), input, output, op, weight);
  const Call what =
      make_reduce_call(Operation::kReduceScatter, output.dtype, output.count, op, weight);
  call(what, context, [&](const GlooCore::Task& task, std::span<const Call> calls) {
    const auto factors = factors_of(op, calls);
    if (output.count == 0) return;
    const auto block = static_cast<size_t>(output.bytes());
    std::vector<std::byte> blocks(size() == 1 ? 0 : block * static_cast<size_t>(size()));
    core_->transfer(task, [&](const auto& api, auto* gloo, const LockstepGlooCall& gloo_call) {
      return api.all_to_all(gloo, input.data, block, blocks.data(), &gloo_call);
    });
    const auto* first =
        size() == 1 ? static_cast<const std::byte*>(input.data) : std::as_const(blocks).data();
    std::vector<const void*> inputs;
    for (size_t place = 0; place < calls.size(); ++place) inputs.push_back(first + place * block);
    const std::array outputs = {output.data};
    reduce(output.dtype, op, inputs, factors, outputs, output.count);
  });
}

void GlooBackend::all_gather(const ConstBuffer& input, const Buffer& output,
                             const CallContext& context) {
  check_all_gather(group(), input, output);
  const Call what = make_call(Operation::kAllGather, input.dtype, input.count);
  call(what, context, [&](const GlooCore::Task& task, std::span<const Call>) {
    if (input.count == 0) return;
    const auto bytes = static_cast<size_t>(input.bytes());
    if (size() == 1) std::memmove(output.data, input.data, bytes);
    core_->transfer(task, [&](const auto& api, auto* gloo, const LockstepGlooCall& gloo_call) {
      return api.all_gather(gloo, input.data, bytes, output.data, &gloo_call);
    });
  });
}

std::unique_ptr<Backend> GlooBackend::split(int colour, int key, std::string_view group_name,
                                            const CallContext& context) {
  Call what;
  what.operation = Operation::kSplit;
  std::unique_ptr<Backend> part;
  call(what, context, [&](const GlooCore::Task& task, std::span<const Call>) {
    const Choice own{colour, key};
    const auto said = core_->exchange(task, GlooLink::Frame::kNote,
                                      {reinterpret_cast<const char*>(&own), sizeof own});
    std::vector<std::pair<int, int>> members;  // (key, place)
    for (int place = 0; place < size(); ++place) {
      Choice theirs;
      const std::string& bytes = said[static_cast<size_t>(place)];
      std::memcpy(&theirs, bytes.data(), std::min(bytes.size(), sizeof theirs));
      if (theirs.colour == colour) members.emplace_back(theirs.key, place);
    }
    std::sort(members.begin(), members.end());
    Group group_of_colour{0, {}, std::string(group_name)};
    for (size_t i = 0; i < members.size(); ++i) {
      const int place = members[i].second;
      if (place == rank()) group_of_colour.rank = static_cast<int>(i);
      group_of_colour.world_ranks.push_back(group().world_ranks.at(static_cast<size_t>(place)));
    }
    auto part_store =
        make_prefix_store(store_, fmt::format("split {} colour {}", task.call.sequence, colour));
    part = std::make_unique<GlooBackend>(std::move(part_store), std::move(group_of_colour),
                                         address_, context.deadline_ns);
  });
  return part;
}

std::shared_ptr<ReachableMemory> GlooBackend::allocate(int64_t bytes, const CallContext& context) {
  check_allocate(bytes);
  Call what;
  what.operation = Operation::kAllocate;
  what.count = bytes;
  std::shared_ptr<ReachableMemory> memory;
  call(what, context, [&](const GlooCore::Task&, std::span<const Call>) {
    memory = std::make_shared<PlainMemory>(bytes);
  });
  return memory;
}

}  // namespace

std::unique_ptr<Backend> make_gloo_backend(const GlooOptions& options) {
  Group world;
  world.rank = options.rank;
  world.world_ranks.resize(static_cast<size_t>(options.size));
  std::iota(world.world_ranks.begin(), world.world_ranks.end(), 0);
  return std::make_unique<GlooBackend>(options.store, std::move(world), options.address,
                                       options.deadline_ns);
}

}  // namespace lockstep
