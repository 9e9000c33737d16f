#pragma once

#include <memory>
#include <span>
#include <string>

#include "comm/backend.hpp"
#include "comm/network/network_core.hpp"
#include "comm/network/sliced_reduce.hpp"

namespace lockstep {

/// Ranks on any hosts. All calls are queued, compared and ended here; the functions move_* say how
/// the data of an operation moves once all ranks agree on the call. A backend that moves it in
/// another way overrides them.
class NetworkBackend : public Backend {
 public:
  NetworkBackend(const BackendInfo& info, std::shared_ptr<Store> store, Group group,
                 std::string address, int64_t deadline_ns);
  ~NetworkBackend() override { core_->shut_down(); }

  std::string_view name() const override { return core_->info().name; }
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
  void barrier(const CallContext& context) override;
  std::unique_ptr<Backend> split(int color, int key, std::string_view group_name,
                                 const CallContext& context) override;
  std::shared_ptr<RegisteredMemory> allocate(int64_t bytes, const CallContext& context) override;
  void abort(const AbortRecord& record) noexcept override { core_->session().abort(record); }

 protected:
  using Task = NetworkCore::Task;
  using Calls = std::span<const Fingerprint>;  // [group rank]

  // How data moves. They run in a thread of the core, or in the one that waits, one at a time. An
  // all_reduce may do something while the ranks compare their calls, before it moves anything.
  virtual NetworkCore::Body prepare_all_reduce(const Task& task, const Buffer& buffer, ReduceOp op);
  virtual void move_broadcast(const Task& task, const Buffer& buffer, int root);
  virtual void move_reduce(const Task& task, const Buffer& buffer, int root, ReduceOp op,
                           Calls calls);
  virtual void move_reduce_scatter(const Task& task, const ConstBuffer& input, const Buffer& output,
                                   ReduceOp op, Calls calls);
  virtual void move_all_gather(const Task& task, const ConstBuffer& input, const Buffer& output);
  virtual void move_blocks(const Task& task, const ConstBuffer& input, const Buffer& output,
                           const BlockExchange& blocks);

  /// The ranks of one color in a split.
  struct Part {
    std::shared_ptr<Store> store;
    Group group;
    std::vector<int> members = {};  // [rank in the part] -> group rank here
    int color = 0;
  };
  /// Reduces the values of all ranks, which are here already, to the bits that other calls give.
  virtual void add(std::span<const void* const> inputs, const Buffer& output, ReduceOp op,
                   Calls calls) const;
  virtual std::unique_ptr<Backend> make_part(const Task& task, const Part& part);
  virtual std::shared_ptr<RegisteredMemory> make_memory(const Task& task, int64_t bytes);

  NetworkCore& core() const { return *core_; }
  const std::shared_ptr<NetworkCore>& shared_core() const { return core_; }
  const std::string& address() const { return address_; }

 private:
  /// The body outlives this call: it may refer to the backend, and to nothing of its caller. The
  /// bytes of `attached`, if any, travel with the fingerprint.
  std::unique_ptr<Work> begin(const Fingerprint& what, const CallContext& context,
                              NetworkCore::Body body, const ConstBuffer& attached = {});
  void move_all_reduce(const Task& task, const Buffer& buffer, ReduceOp op, Calls calls);
  bool can_carry(int64_t bytes) const;
  void reduce_attached(const Task& task, const Buffer& output, ReduceOp op, Calls calls) const;
  std::unique_ptr<Work> begin_message(int peer, const Fingerprint& what, const CallContext& context,
                                      NetworkCore::Body body);
  void call(const Fingerprint& what, const CallContext& context, NetworkCore::Body body) {
    CallContext at_once = context;
    at_once.waits_at_once = true;
    begin(what, at_once, std::move(body))->wait();
  }
  void compare_counts(const Task& task, const BlockExchange& blocks);

  std::shared_ptr<Store> store_;
  std::string address_;
  std::shared_ptr<NetworkCore> core_;
  SlicedReduce slices_;
};

}  // namespace lockstep
