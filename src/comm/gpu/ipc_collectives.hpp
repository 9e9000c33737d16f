#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/backend.hpp"
#include "comm/gpu/gpu_control.hpp"
#include "comm/gpu/ipc_core.hpp"

namespace lockstep {

/// A call that all ranks make, in progress on this one: its calls are compared, then its parts
/// follow each other, with something to wait for between two of them.
class IpcCollective {
 public:
  IpcCollective(IpcCore& core, const Fingerprint& what, const CallContext& context)
      : core_(core), call_(what), context_(context) {}
  virtual ~IpcCollective() = default;
  IpcCollective(const IpcCollective&) = delete;
  IpcCollective& operator=(const IpcCollective&) = delete;

  /// Numbers the call, marks where its stream is now, and tells the others.
  void begin();
  /// Does what can be done without waiting; true when done.
  bool advance() { return go_on(Patience::kLookOnce); }
  void wait() { go_on(Patience::kUntilDone); }
  bool done() const { return done_; }

  CudaStream caller_stream() const { return context_.stream; }
  /// Makes work queued on the call's stream from now on find the result. When done; the first
  /// time only.
  void hold_caller();

 protected:
  /// Whether peers wait for this rank's stream to come to the call.
  virtual bool is_awaited() const { return true; }
  /// Where peers find this rank's input.
  virtual IpcLocation peer() const { return {}; }
  /// The next part, and what must be over before the one after it; null: the call is done.
  virtual std::unique_ptr<Awaited> next() = 0;

  std::unique_ptr<Awaited> handshake() const { return core_.exchange(call_, context_.deadline_ns); }
  /// The result is there when the core's stream comes to this point.
  void mark_result();

  IpcCore& core_;
  Fingerprint call_;
  CallContext context_;  // its label is in the call
  std::unique_ptr<GpuAgreement> agreement_;

 private:
  enum class Patience { kLookOnce, kUntilDone };
  bool go_on(Patience patience);

  bool agreed_ = false;
  bool done_ = false;
  std::unique_ptr<Awaited> before_next_;
  std::optional<GpuEvent> result_;
};

/// A call that moves elements. Small ones go through the host's memory where processes share a
/// GPU. Others, where every rank that contributes has registered memory, are taken from there,
/// whole; else chunk by chunk through the staging areas.
class IpcMovement : public IpcCollective {
 public:
  /// `input` is what this rank contributes: `width` blocks of the call's count.
  IpcMovement(IpcCore& core, const Fingerprint& what, const CallContext& context, const void* input,
              int64_t width, const Buffer& output);

 protected:
  using Contributions = std::vector<const std::byte*>;  // [rank]; null if it has none

  virtual bool contributes(int /*peer*/) const { return true; }
  virtual bool receives() const { return true; }
  /// In a group of one.
  virtual void move_alone() {}
  /// Takes elements [begin, begin + count) of what all contribute, whose blocks lie `stride`
  /// elements apart.
  virtual void take(int64_t begin, int64_t count, int64_t stride, const Contributions& from) = 0;
  /// Moves all elements, in registered memory.
  virtual void take_direct(const Contributions& from);

  bool is_awaited() const final { return !is_host_staged(); }
  IpcLocation peer() const final;
  std::unique_ptr<Awaited> next() final;

  const std::byte* input_;
  int64_t width_;
  Buffer output_;
  int64_t element_bytes_;
  std::vector<double> factors_;  // of a mean

 private:
  enum class State { kCompared, kShared, kStaged, kTaken, kDirect, kHostStaged };

  bool is_host_staged() const;
  std::unique_ptr<Awaited> start();
  std::unique_ptr<Awaited> stage_chunk();
  std::unique_ptr<Awaited> take_chunk();
  std::unique_ptr<Awaited> finish();
  Contributions direct_contributions() const;
  int64_t chunk_begin() const { return chunk_ * chunk_count_; }
  int64_t count_of_chunk() const;

  State state_ = State::kCompared;
  int64_t chunk_count_;  // elements of a chunk, of one block
  int64_t chunk_ = 0;
};

class IpcAllReduce final : public IpcMovement {
 public:
  IpcAllReduce(IpcCore& core, const Buffer& buffer, ReduceOp op, double weight,
               const CallContext& context);

 private:
  void take(int64_t begin, int64_t count, int64_t stride, const Contributions& from) override;
  void take_direct(const Contributions& from) override;
};

class IpcBroadcast final : public IpcMovement {
 public:
  IpcBroadcast(IpcCore& core, const Buffer& buffer, int root, const CallContext& context);

 private:
  bool contributes(int peer) const override { return peer == call_.root; }
  bool receives() const override { return core_.rank() != call_.root; }
  void take(int64_t begin, int64_t count, int64_t stride, const Contributions& from) override;
};

class IpcReduceScatter final : public IpcMovement {
 public:
  IpcReduceScatter(IpcCore& core, const ConstBuffer& input, const Buffer& output, ReduceOp op,
                   double weight, const CallContext& context);

 private:
  void move_alone() override;
  void take(int64_t begin, int64_t count, int64_t stride, const Contributions& from) override;
};

class IpcAllGather final : public IpcMovement {
 public:
  IpcAllGather(IpcCore& core, const ConstBuffer& input, const Buffer& output,
               const CallContext& context);

 private:
  void move_alone() override;
  void take(int64_t begin, int64_t count, int64_t stride, const Contributions& from) override;
};

/// The root's buffer gets the reduction.
class IpcReduce final : public IpcMovement {
 public:
  IpcReduce(IpcCore& core, const Buffer& buffer, int root, ReduceOp op, double weight,
            const CallContext& context);

 private:
  bool receives() const override { return core_.rank() == call_.root; }
  void take(int64_t begin, int64_t count, int64_t stride, const Contributions& from) override;
};

/// Blocks of different counts. They go through the host's memory and its backend, which compares
/// the counts: ranks that share a GPU are not there for speed.
class IpcExchange final : public IpcCollective {
 public:
  IpcExchange(IpcCore& core, const ConstBuffer& input, const Buffer& output,
              const BlockExchange& blocks, const CallContext& context);

 private:
  bool is_awaited() const override { return false; }
  std::unique_ptr<Awaited> next() override;

  ConstBuffer input_;
  Buffer output_;
  BlockExchange blocks_;
  bool moved_ = false;
};

/// After it, on every rank's stream: all that any rank had queued before it is over.
class IpcBarrier final : public IpcCollective {
 public:
  IpcBarrier(IpcCore& core, const CallContext& context)
      : IpcCollective(core, Fingerprint{}, context) {}

 private:
  std::unique_ptr<Awaited> next() override;
  bool held_ = false;
};

class IpcAllocate final : public IpcCollective {
 public:
  IpcAllocate(IpcCore& core, int64_t bytes, const CallContext& context);
  std::shared_ptr<RegisteredMemory> memory() { return std::move(memory_); }

 private:
  std::unique_ptr<Awaited> next() override;
  void free_dropped();

  std::shared_ptr<RegisteredMemory> memory_;
};

class IpcSplit final : public IpcCollective {
 public:
  IpcSplit(IpcCore& core, int color, int key, std::string_view group_name,
           const CallContext& context);
  std::unique_ptr<GpuControl> take_control() { return std::move(part_); }

 private:
  std::unique_ptr<Awaited> next() override;

  int color_;
  int key_;
  std::string group_name_;
  std::unique_ptr<GpuControl> part_;
};

}  // namespace lockstep
