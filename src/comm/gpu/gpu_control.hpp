#pragma once

#include <cstddef>
#include <cstring>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "comm/backend.hpp"
#include "comm/control_session.hpp"
#include "comm/gpu/gpu_runtime.hpp"

namespace lockstep {

/// A part of a call that others must take part in.
class Awaited {
 public:
  virtual ~Awaited() = default;
  /// Does what can be done without waiting; true when over.
  virtual bool advance() = 0;
  virtual void wait() = 0;
};

/// A small block of bytes from every rank, over a communicator of the host. Blocks of one exchange
/// have one size; ranks begin the exchanges of a communicator in one order. Destroyed before it is
/// done, it aborts that communicator.
class GpuExchange final : public Awaited {
 public:
  /// `part_of` is the GPU call that this belongs to: errors speak of it, not of the host's call.
  GpuExchange(Backend& channel, const Fingerprint& part_of, std::span<const std::byte> own,
              int64_t deadline_ns);
  GpuExchange(const GpuExchange&) = delete;
  GpuExchange& operator=(const GpuExchange&) = delete;

  bool advance() override;
  void wait() override;

  /// When over.
  std::span<const std::byte> block(int peer) const;

 private:
  template <class Action>
  auto waiting(Action&& action);

  Backend& channel_;
  Fingerprint part_of_;
  size_t block_bytes_;
  std::vector<std::byte> blocks_;  // [rank], of block_bytes_; zeros until a rank has filled it
  std::unique_ptr<Backend::Work> work_;  // null in a group of one; goes before the blocks
};

/// All ranks' fingerprints, compared. `note` may carry what else ranks must know of each other.
class GpuAgreement final : public Awaited {
 public:
  GpuAgreement(const ControlSession& session, Backend& channel, const Fingerprint& own,
               std::span<const std::byte> note, int64_t deadline_ns);

  /// kCallMismatch if a rank made another call.
  bool advance() override;
  void wait() override;

  std::span<const Fingerprint> calls() const { return calls_; }  ///< [rank], when done
  std::span<const std::byte> note_bytes(int peer) const {
    return exchange_.block(peer).subspan(sizeof(Fingerprint));
  }
  template <class Note>
  Note note(int peer) const {
    Note value;
    std::memcpy(&value, note_bytes(peer).data(), sizeof value);
    return value;
  }

 private:
  void compare();

  const ControlSession& session_;
  GpuExchange exchange_;
  std::vector<Fingerprint> calls_;
};

/// The host's side of a GPU communicator: its control session, and the communicators of the host
/// over which the session works. They are the channels, split off the host's communicator, so that
/// their traffic is separate from all other. Channel 0 compares the fingerprints, in the order of
/// the calls; what happens at other times needs another channel, since each wants the same order on
/// all ranks. Used by one thread at a time.
class GpuControl final : private ControlLink {
 public:
  /// Collective over `host`, which may go afterwards.
  GpuControl(Backend& host, int channels, int64_t deadline_ns);

  ControlSession& session() { return session_; }
  const Group& group() const { return session_.group(); }
  int rank() const { return session_.rank(); }
  int size() const { return session_.size(); }
  bool broken() const { return session_.broken(); }
  Backend& channel(int index) { return *channels_.at(static_cast<size_t>(index)); }

  /// Peers that wait for this rank there learn that it has left. No call may follow.
  void close(int index) { channels_.at(static_cast<size_t>(index)).reset(); }

  /// Does a part of a call: see ControlSession::guarded(). kUsage of arguments is thrown before.
  template <class Action>
  void guarded(Action&& action) {
    session_.guarded(std::forward<Action>(action));
  }

  /// Gives a collective its number and label and begins to compare it. In guarded() only.
  Fingerprint number(Fingerprint what, const CallContext& context);
  std::unique_ptr<GpuAgreement> agree(const Fingerprint& numbered, const CallContext& context,
                                      std::span<const std::byte> note = {});

  /// Collective: the controls of the groups. After the split was agreed on, in guarded() only.
  std::unique_ptr<GpuControl> split(int color, int key, std::string_view group_name,
                                    const Fingerprint& part_of, const CallContext& context);

 private:
  explicit GpuControl(std::vector<std::unique_ptr<Backend>> channels);

  void publish(const AbortRecord& record) override;
  /// The channels end every wait at its deadline, and survey the ranks themselves.
  StallReport survey(const StalledCall&) override { return {}; }

  std::vector<std::unique_ptr<Backend>> channels_;  // null if closed
  ControlSession session_;
};

/// Messages of a rank to itself: copies on its GPU, kept until it receives them.
class GpuSelfMessages {
 public:
  explicit GpuSelfMessages(const Group& group) : group_(group) {}
  ~GpuSelfMessages();
  GpuSelfMessages(const GpuSelfMessages&) = delete;
  GpuSelfMessages& operator=(const GpuSelfMessages&) = delete;

  /// In the order of context.stream; the current GPU is this rank's.
  void send(const ConstBuffer& buffer, int tag, const CallContext& context);
  void recv(const Buffer& buffer, int tag, const CallContext& context);
  bool empty() const { return messages_.empty(); }

 private:
  struct Message {
    Fingerprint call;
    void* bytes = nullptr;
    GpuEvent filled;
  };

  Group group_;
  int64_t sent_ = 0;
  int64_t received_ = 0;
  std::deque<Message> messages_;
};

}  // namespace lockstep
