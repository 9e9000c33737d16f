#include <fmt/format.h>

#include <exception>

#include "comm/backends.hpp"
#include "comm/check_call.hpp"
#include "comm/gpu/gpu_reduce.hpp"
#include "comm/gpu/ipc_collectives.hpp"
#include "comm/gpu/ipc_core.hpp"
#include "comm/gpu/ipc_messages.hpp"
#include "lockstep/error.hpp"

namespace lockstep {
namespace {

class IpcPending final : public Pending {
 public:
  IpcPending(std::shared_ptr<IpcCore> core, std::shared_ptr<IpcCollective> task)
      : core_(std::move(core)), task_(std::move(task)) {}
  ~IpcPending() override {
    if (task_->done()) {
      hold_caller();
    } else {
      core_->abort(std::uncaught_exceptions() > 0 ? "failed with an exception"
                                                  : "dropped a call before it was done");
    }
  }
  IpcPending(const IpcPending&) = delete;
  IpcPending& operator=(const IpcPending&) = delete;

  bool advance() override {
    const GpuGuard guard(core_->gpu());
    if (!core_->advance(*task_)) return false;
    task_->hold_caller();
    return true;
  }

  void wait() override {
    const GpuGuard guard(core_->gpu());
    core_->wait(*task_);
    task_->hold_caller();
  }

 private:
  // Done by another call's progress and dropped: its buffer is freed in the order of its stream.
  void hold_caller() noexcept {
    try {
      const GpuGuard guard(core_->gpu());
      task_->hold_caller();
    } catch (const std::exception&) {
      // The GPU itself has failed: nothing runs there any more.
    }
  }

  std::shared_ptr<IpcCore> core_;
  std::shared_ptr<IpcCollective> task_;
};

class IpcBackend final : public Backend {
 public:
  IpcBackend(std::unique_ptr<GpuControl> control, int gpu, int64_t deadline_ns)
      : core_(std::make_shared<IpcCore>(std::move(control), gpu, deadline_ns)), messages_(*core_) {}
  ~IpcBackend() override {
    if (std::uncaught_exceptions() > 0) core_->abort("failed with an exception");
    messages_.drain();
    core_->leave();
  }
  IpcBackend(const IpcBackend&) = delete;
  IpcBackend& operator=(const IpcBackend&) = delete;

  std::string_view name() const override { return "ipc"; }
  bool on_gpu() const override { return true; }
  const Group& group() const override { return core_->group(); }

  std::unique_ptr<Pending> all_reduce(const Buffer& buffer, ReduceOp op, double weight,
                                      const CallContext& context) override {
    check_reduce(buffer, op, weight);
    const GpuGuard guard(core_->gpu());
    check_not_captured(context.stream, "all_reduce of ipc");
    auto task = std::make_shared<IpcAllReduce>(*core_, buffer, op, weight, context);
    core_->begin(task);
    return std::make_unique<IpcPending>(core_, std::move(task));
  }

  void broadcast(const Buffer& buffer, int root, const CallContext& context) override {
    check_broadcast(group(), buffer, root);
    run<IpcBroadcast>("broadcast of ipc", context, buffer, root);
  }

  void reduce_scatter(const ConstBuffer& input, const Buffer& output, ReduceOp op, double weight,
                      const CallContext& context) override {
    check_reduce_scatter(group(), input, output, op, weight);
    run<IpcReduceScatter>("reduce_scatter of ipc", context, input, output, op, weight);
  }

  void all_gather(const ConstBuffer& input, const Buffer& output,
                  const CallContext& context) override {
    check_all_gather(group(), input, output);
    run<IpcAllGather>("all_gather of ipc", context, input, output);
  }

  void send(const ConstBuffer& buffer, int to, int tag, const CallContext& context) override {
    check_message(group(), buffer.count, to);
    const GpuGuard guard(core_->gpu());
    check_not_captured(context.stream, "send of ipc");
    messages_.send(buffer, to, tag, context);
  }

  void recv(const Buffer& buffer, int from, int tag, const CallContext& context) override {
    check_message(group(), buffer.count, from);
    const GpuGuard guard(core_->gpu());
    check_not_captured(context.stream, "recv of ipc");
    messages_.recv(buffer, from, tag, context);
  }

  void barrier(const CallContext& context) override { run<IpcBarrier>("barrier of ipc", context); }

  std::unique_ptr<Backend> split(int colour, int key, std::string_view group_name,
                                 const CallContext& context) override {
    auto task = run<IpcSplit>("split of ipc", context, colour, key, group_name);
    return std::make_unique<IpcBackend>(task->take_control(), core_->gpu(), context.deadline_ns);
  }

  std::shared_ptr<ReachableMemory> allocate(int64_t bytes, const CallContext& context) override {
    check_allocate(bytes);
    return run<IpcAllocate>("allocate of ipc", context, bytes)->memory();
  }

  void abort(std::string_view reason) noexcept override { core_->abort(reason); }

 private:
  template <class Collective, class... Arguments>
  std::shared_ptr<Collective> run(std::string_view what, const CallContext& context,
                                  const Arguments&... arguments) {
    const GpuGuard guard(core_->gpu());
    check_not_captured(context.stream, what);
    auto task = std::make_shared<Collective>(*core_, arguments..., context);
    core_->run(task);
    return task;
  }

  std::shared_ptr<IpcCore> core_;
  IpcMessages messages_;
};

}  // namespace

std::unique_ptr<Backend> make_ipc_backend(const GpuBackendOptions& options) {
  if (options.host->size() > kMostGpuReduceRanks) {
    throw Error(Code::kBackend, fmt::format("ipc for {} ranks", options.host->size()),
                fmt::format("it serves up to {}: use --backend nccl with a GPU for each rank",
                            kMostGpuReduceRanks));
  }
  auto control =
      std::make_unique<GpuControl>(*options.host, IpcCore::kChannels, options.deadline_ns);
  return std::make_unique<IpcBackend>(std::move(control), options.gpu, options.deadline_ns);
}

}  // namespace lockstep
