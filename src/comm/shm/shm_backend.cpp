#include <exception>

#include "comm/backends.hpp"
#include "comm/check_call.hpp"
#include "comm/shm/shm_collectives.hpp"
#include "comm/shm/shm_messages.hpp"
#include "comm/shm/shm_sharing.hpp"

namespace lockstep {
namespace {

class ShmPending final : public Pending {
 public:
  ShmPending(std::shared_ptr<ShmEngine> engine, std::shared_ptr<ShmCollective> task)
      : engine_(std::move(engine)), task_(std::move(task)) {}
  ~ShmPending() override {
    if (task_->done()) return;
    engine_->abort(std::uncaught_exceptions() > 0 ? "failed with an exception"
                                                  : "dropped a call before it was done");
  }
  ShmPending(const ShmPending&) = delete;
  ShmPending& operator=(const ShmPending&) = delete;

  bool advance() override { return engine_->advance(*task_); }
  void wait() override { engine_->wait(*task_); }

 private:
  std::shared_ptr<ShmEngine> engine_;
  std::shared_ptr<ShmCollective> task_;
};

class ShmBarrier final : public ShmCollective {
 public:
  using ShmCollective::ShmCollective;
};

class ShmBackend final : public Backend {
 public:
  explicit ShmBackend(ShmMembership membership)
      : engine_(std::make_shared<ShmEngine>(std::move(membership))), messages_(*engine_) {}
  ~ShmBackend() override { engine_->leave(); }
  ShmBackend(const ShmBackend&) = delete;
  ShmBackend& operator=(const ShmBackend&) = delete;

  std::string_view name() const override { return "shm"; }
  const Group& group() const override { return engine_->group(); }

  std::unique_ptr<Pending> all_reduce(const Buffer& buffer, ReduceOp op, double weight,
                                      const CallContext& context) override {
    check_reduce(buffer, op, weight);
    auto task = std::make_shared<ShmAllReduce>(*engine_, buffer, op, weight, context);
    engine_->begin(task);
    return std::make_unique<ShmPending>(engine_, std::move(task));
  }

  void broadcast(const Buffer& buffer, int root, const CallContext& context) override {
    check_broadcast(group(), buffer, root);
    engine_->run(std::make_shared<ShmBroadcast>(*engine_, buffer, root, context));
  }

  void reduce_scatter(const ConstBuffer& input, const Buffer& output, ReduceOp op, double weight,
                      const CallContext& context) override {
    check_reduce_scatter(group(), input, output, op, weight);
    engine_->run(std::make_shared<ShmReduceScatter>(*engine_, input, output, op, weight, context));
  }

  void all_gather(const ConstBuffer& input, const Buffer& output,
                  const CallContext& context) override {
    check_all_gather(group(), input, output);
    engine_->run(std::make_shared<ShmAllGather>(*engine_, input, output, context));
  }

  void send(const ConstBuffer& buffer, int to, int tag, const CallContext& context) override {
    check_message(group(), buffer.count, to);
    messages_.send(buffer, to, tag, context);
  }

  void recv(const Buffer& buffer, int from, int tag, const CallContext& context) override {
    check_message(group(), buffer.count, from);
    messages_.recv(buffer, from, tag, context);
  }

  void barrier(const CallContext& context) override {
    engine_->run(std::make_shared<ShmBarrier>(*engine_, Call{}, context));
  }

  std::unique_ptr<Backend> split(int colour, int key, std::string_view group_name,
                                 const CallContext& context) override {
    auto task = std::make_shared<ShmSplit>(*engine_, colour, key, group_name, context);
    engine_->run(task);
    return std::make_unique<ShmBackend>(task->take_membership());
  }

  std::shared_ptr<ReachableMemory> allocate(int64_t bytes, const CallContext& context) override {
    check_allocate(bytes);
    auto task = std::make_shared<ShmAllocate>(*engine_, bytes, context);
    engine_->run(task);
    return task->memory();
  }

  void abort(std::string_view reason) noexcept override { engine_->abort(reason); }

 private:
  std::shared_ptr<ShmEngine> engine_;
  ShmMessages messages_;
};

}  // namespace

std::unique_ptr<Backend> make_shm_backend(const ShmOptions& options) {
  return std::make_unique<ShmBackend>(meet_processes(options));
}

std::vector<std::unique_ptr<Backend>> make_shm_thread_backends(int size) {
  std::vector<std::unique_ptr<Backend>> backends;
  for (ShmMembership& membership : meet_threads(size)) {
    backends.push_back(std::make_unique<ShmBackend>(std::move(membership)));
  }
  return backends;
}

}  // namespace lockstep
