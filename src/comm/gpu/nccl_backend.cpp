#include "comm/backend.hpp"

#include "comm/arguments.hpp"
#include "lockstep/error.hpp"

#if LOCKSTEP_NCCL
#include <cstring>
#include <span>

#include "comm/gpu/nccl_core.hpp"

namespace lockstep {
namespace {

// The work of a collective or of a message.
template <class Task>
class NcclWork final : public Backend::Work {
 public:
  NcclWork(std::shared_ptr<NcclCore> core, std::shared_ptr<Task> task)
      : core_(std::move(core)), task_(std::move(task)) {}
  ~NcclWork() override {
    if (!done_) core_->session().abort("it dropped a call that was not done");
  }
  NcclWork(const NcclWork&) = delete;
  NcclWork& operator=(const NcclWork&) = delete;

  bool advance() override {
    if (!done_ && core_->advance(*task_)) wait();
    return done_;
  }
  void wait() override {
    if (done_) return;
    core_->finish(*task_);
    done_ = true;
  }

 private:
  std::shared_ptr<NcclCore> core_;
  std::shared_ptr<Task> task_;
  bool done_ = false;
};

class NcclMemory final : public RegisteredMemory {
 public:
  explicit NcclMemory(int64_t bytes) : memory_(bytes) {}

  void* data() const override { return memory_.data(); }
  int64_t bytes() const override { return memory_.bytes(); }

 private:
  GpuMemory memory_;
};

class NcclBackend final : public Backend {
 public:
  explicit NcclBackend(std::shared_ptr<NcclCore> core) : core_(std::move(core)) {}

  std::string_view name() const override { return "nccl"; }
  bool on_gpu() const override { return true; }
  const Group& group() const override { return core_->group(); }

  std::unique_ptr<Work> all_reduce(const Buffer& buffer, ReduceOp op, double weight,
                                   const CallContext& context) override {
    check_reduce(buffer, op, weight);
    const Fingerprint what =
        make_reduce_fingerprint(Operation::kAllReduce, buffer.dtype, buffer.count, op, weight);
    return begin(what, context, [buffer, op](const NcclTransfer& to, auto calls) {
      to.all_reduce(buffer, op, mean_factors(calls));
    });
  }

  std::unique_ptr<Work> broadcast(const Buffer& buffer, int root,
                                  const CallContext& context) override {
    check_broadcast(group(), buffer, root);
    return begin(make_broadcast_fingerprint(buffer, root), context,
                 [buffer, root](const NcclTransfer& to, auto) { to.broadcast(buffer, root); });
  }

  std::unique_ptr<Work> reduce_scatter(const ConstBuffer& input, const Buffer& output, ReduceOp op,
                                       double weight, const CallContext& context) override {
    check_reduce_scatter(group(), input, output, op, weight);
    const Fingerprint what =
        make_reduce_fingerprint(Operation::kReduceScatter, output.dtype, output.count, op, weight);
    return begin(what, context, [input, output, op](const NcclTransfer& to, auto calls) {
      to.reduce_scatter(input, output, op, mean_factors(calls));
    });
  }

  std::unique_ptr<Work> all_gather(const ConstBuffer& input, const Buffer& output,
                                   const CallContext& context) override {
    check_all_gather(group(), input, output);
    return begin(make_fingerprint(Operation::kAllGather, input.dtype, input.count), context,
                 [input, output](const NcclTransfer& to, auto) { to.all_gather(input, output); });
  }

  std::unique_ptr<Work> reduce(const Buffer& buffer, int root, ReduceOp op, double weight,
                               const CallContext& context) override {
    check_rooted_reduce(group(), buffer, root, op, weight);
    return begin(make_rooted_reduce_fingerprint(buffer, root, op, weight), context,
                 [buffer, root, op](const NcclTransfer& to, auto calls) {
                   to.reduce(buffer, root, op, mean_factors(calls));
                 });
  }

  std::unique_ptr<Work> exchange(const ConstBuffer& input, const Buffer& output,
                                 const BlockExchange& blocks, const CallContext& context) override {
    check_exchange(group(), input, output, blocks);
    std::vector<int64_t> counts = blocks.given;
    counts.insert(counts.end(), blocks.taken.begin(), blocks.taken.end());
    const Fingerprint what = make_exchange_fingerprint(input.dtype, blocks);
    const auto compare = [this](const GpuAgreement& agreement) {
      ExchangedCounts given;
      ExchangedCounts taken;
      for (int peer = 0; peer < size(); ++peer) {
        const auto bytes = agreement.note_bytes(peer);
        std::vector<int64_t> theirs(bytes.size() / sizeof(int64_t));
        std::memcpy(theirs.data(), bytes.data(), bytes.size());
        given.emplace_back(theirs.begin(), theirs.begin() + size());
        taken.emplace_back(theirs.begin() + size(), theirs.end());
      }
      require_same_counts(group(), agreement.calls().front(), given, taken);
    };
    auto task = core_->begin(
        what, context,
        [input, output, blocks](const NcclTransfer& to, auto) {
          to.exchange(input, output, blocks);
        },
        std::as_bytes(std::span(counts)), compare);
    return std::make_unique<NcclWork<NcclCore::Task>>(core_, std::move(task));
  }

  std::unique_ptr<Work> send(const ConstBuffer& buffer, int to, int tag,
                             const CallContext& context) override {
    check_message(group(), buffer.count, to);
    if (to == rank()) {
      core_->guarded([&] { core_->own_messages().send(buffer, tag, context); });
      return make_done_work();
    }
    return std::make_unique<NcclWork<NcclCore::MessageTask>>(
        core_, core_->begin_send(buffer, to, tag, context));
  }

  std::unique_ptr<Work> recv(const Buffer& buffer, int from, int tag,
                             const CallContext& context) override {
    check_message(group(), buffer.count, from);
    if (from == rank()) {
      core_->guarded([&] { core_->own_messages().recv(buffer, tag, context); });
      return make_done_work();
    }
    return std::make_unique<NcclWork<NcclCore::MessageTask>>(
        core_, core_->begin_recv(buffer, from, tag, context));
  }

  // A barrier is only the exchange of fingerprints.
  void barrier(const CallContext& context) override {
    core_->call(make_fingerprint(Operation::kBarrier, Dtype::kU8, 0), context, nullptr);
  }

  std::unique_ptr<Backend> split(int color, int key, std::string_view group_name,
                                 const CallContext& context) override {
    auto control = core_->split(color, key, group_name, context);
    const GpuGuard on_gpu(core_->gpu());
    return std::make_unique<NcclBackend>(
        std::make_shared<NcclCore>(std::move(control), core_->gpu(), context.deadline_ns));
  }

  std::shared_ptr<RegisteredMemory> allocate(int64_t bytes, const CallContext& context) override {
    check_allocate(bytes);
    core_->call(make_fingerprint(Operation::kAllocate, Dtype::kU8, bytes), context, nullptr);
    const GpuGuard on_gpu(core_->gpu());
    return std::make_shared<NcclMemory>(bytes);
  }

  void abort(const AbortRecord& record) noexcept override { core_->session().abort(record); }

 private:
  std::unique_ptr<Work> begin(const Fingerprint& what, const CallContext& context,
                              NcclCore::Body body) {
    return std::make_unique<NcclWork<NcclCore::Task>>(core_,
                                                      core_->begin(what, context, std::move(body)));
  }

  std::shared_ptr<NcclCore> core_;
};

}  // namespace

bool nccl_is_built() {
  return true;
}

std::unique_ptr<Backend> make_nccl_backend(const GpuBackendOptions& options) {
  auto control =
      std::make_unique<GpuControl>(*options.host, NcclCore::kChannels, options.deadline_ns);
  const GpuGuard on_gpu(options.gpu);
  return std::make_unique<NcclBackend>(
      std::make_shared<NcclCore>(std::move(control), options.gpu, options.deadline_ns));
}

}  // namespace lockstep

#else

namespace lockstep {

bool nccl_is_built() {
  return false;
}

std::unique_ptr<Backend> make_nccl_backend(const GpuBackendOptions&) {
  throw Error(Code::kBackend, "this build of lockstep has no NCCL",
              "configure it with a libtorch that nccl.h and libnccl.so lie beside, or use auto");
}

}  // namespace lockstep

#endif
