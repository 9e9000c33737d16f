#include <fmt/format.h>
#include <exception>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "comm/arguments.hpp"
#include "comm/backend.hpp"
#include "comm/gpu/gpu_control.hpp"
#include "comm/gpu/gpu_reduce.hpp"
#include "comm/gpu/ipc_collectives.hpp"
#include "comm/gpu/ipc_core.hpp"
#include "comm/gpu/ipc_messages.hpp"
#include "lockstep/error.hpp"

namespace lockstep {

namespace {

class IpcWork final : public Backend::Work {
 public:
  IpcWork(std::shared_ptr<IpcCore> core, std::shared_ptr<IpcCollective> task)
      : core_(std::move(core)), task_(std::move(task)) {}
  ~IpcWork() override {
    if (task_->done()) {
      hold_caller();
    } else {
      core_->session().abort(std::uncaught_exceptions() > 0 ? "failed with an exception"
                                                            : "dropped a call before it was done");
    }
  }
  IpcWork(const IpcWork&) = delete;
  IpcWork& operator=(const IpcWork&) = delete;

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
      : core_(std::make_shared<IpcCore>(std::move(control), gpu, deadline_ns)),
        messages_(std::make_shared<IpcMessages>(core_)) {}
  ~IpcBackend() override {
    if (std::uncaught_exceptions() > 0) core_->session().abort("failed with an exception");
    messages_->drain();
    core_->leave();
  }
  IpcBackend(const IpcBackend&) = delete;
  IpcBackend& operator=(const IpcBackend&) = delete;

  std::string_view name() const override { return "ipc"; }
  bool on_gpu() const override { return true; }
  const Group& group() const override { return core_->group(); }

  std::unique_ptr<Work> all_reduce(const Buffer& buffer, ReduceOp op, double weight,
                                   const CallContext& context) override {
    check_reduce(buffer, op, weight);
    return begin<IpcAllReduce>("all_reduce of ipc", context, buffer, op, weight);
  }

  std::unique_ptr<Work> broadcast(const Buffer& buffer, int root,
                                  const CallContext& context) override {
    check_broadcast(group(), buffer, root);
    return begin<IpcBroadcast>("broadcast of ipc", context, buffer, root);
  }

  std::unique_ptr<Work> reduce_scatter(const ConstBuffer& input, const Buffer& output, ReduceOp op,
                                       double weight, const CallContext& context) override {
    check_reduce_scatter(group(), input, output, op, weight);
    return begin<IpcReduceScatter>("reduce_scatter of ipc", context, input, output, op, weight);
  }

  std::unique_ptr<Work> all_gather(const ConstBuffer& input, const Buffer& output,
                                   const CallContext& context) override {
    check_all_gather(group(), input, output);
    return begin<IpcAllGather>("all_gather of ipc", context, input, output);
  }

  std::unique_ptr<Work> reduce(const Buffer& buffer, int root, ReduceOp op, double weight,
                               const CallContext& context) override {
    check_rooted_reduce(group(), buffer, root, op, weight);
    return begin<IpcReduce>("reduce of ipc", context, buffer, root, op, weight);
  }

  std::unique_ptr<Work> exchange(const ConstBuffer& input, const Buffer& output,
                                 const BlockExchange& blocks, const CallContext& context) override {
    check_exchange(group(), input, output, blocks);
    return begin<IpcExchange>("exchange of ipc", context, input, output, blocks);
  }

  std::unique_ptr<Work> send(const ConstBuffer& buffer, int to, int tag,
                             const CallContext& context) override {
    check_message(group(), buffer.count, to);
    const GpuGuard guard(core_->gpu());
    check_not_captured(context.stream, "send of ipc");
    return messages_->send(buffer, to, tag, context);
  }

  std::unique_ptr<Work> recv(const Buffer& buffer, int from, int tag,
                             const CallContext& context) override {
    check_message(group(), buffer.count, from);
    const GpuGuard guard(core_->gpu());
    check_not_captured(context.stream, "recv of ipc");
    return messages_->recv(buffer, from, tag, context);
  }

  bool progress() noexcept override {
    try {
      if (!messages_->in_flight() || core_->session().broken()) return false;
      const GpuGuard guard(core_->gpu());
      core_->control().guarded([&] { core_->progress(); });
      return messages_->in_flight();
    } catch (const std::exception&) {
      return false;  // the session has it
    }
  }

  void barrier(const CallContext& context) override { run<IpcBarrier>("barrier of ipc", context); }

  std::unique_ptr<Backend> split(int color, int key, std::string_view group_name,
                                 const CallContext& context) override {
    auto task = run<IpcSplit>("split of ipc", context, color, key, group_name);
    return std::make_unique<IpcBackend>(task->take_control(), core_->gpu(), context.deadline_ns);
  }

  std::shared_ptr<RegisteredMemory> allocate(int64_t bytes, const CallContext& context) override {
    check_allocate(bytes);
    return run<IpcAllocate>("allocate of ipc", context, bytes)->memory();
  }

  void abort(const AbortRecord& record) noexcept override { core_->session().abort(record); }

 private:
  template <class Collective, class... Arguments>
  std::unique_ptr<Work> begin(std::string_view what, const CallContext& context,
                              const Arguments&... arguments) {
    const GpuGuard guard(core_->gpu());
    check_not_captured(context.stream, what);
    auto task = std::make_shared<Collective>(*core_, arguments..., context);
    core_->begin(task);
    return std::make_unique<IpcWork>(core_, std::move(task));
  }

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
  std::shared_ptr<IpcMessages> messages_;
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
