#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/shm/shm_engine.hpp"
#include "comm/shm/shm_rendezvous.hpp"

// Collectives in which the leader makes something and sends it to the members by socket.

namespace lockstep {

/// A collective with one message from the leader to every member.
class LeaderBroadcast : public ShmCollective {
 public:
  LeaderBroadcast(ShmEngine& engine, const Fingerprint& what, const CallContext& context,
                  MessageKind kind);

 protected:
  bool move() override;
  std::vector<int> awaited_to_move() const override;

  /// On the leader: the descriptors for every rank, its own included.
  virtual std::vector<std::vector<OwnedDescriptor>> make() = 0;
  /// On every rank: its own.
  virtual void receive(std::vector<OwnedDescriptor> descriptors) = 0;
  /// After receive(); true when the call is done.
  virtual bool settle() { return true; }
  virtual std::vector<int> awaited_to_settle() const { return {}; }

 private:
  bool send_to_members();
  bool look_for_message();

  MessageKind kind_;
  bool received_ = false;
};

/// Memory that all ranks map: a part for each rank, which follows the one before, or one part that
/// is everybody's.
class ShmAllocate final : public LeaderBroadcast {
 public:
  enum class Kind { kOnePerRank, kOneForAll };

  ShmAllocate(ShmEngine& engine, int64_t bytes, Kind kind, const CallContext& context);

  std::shared_ptr<RegisteredMemory> memory() const { return memory_; }

 protected:
  std::vector<std::vector<OwnedDescriptor>> make() override;
  void receive(std::vector<OwnedDescriptor> descriptors) override;
  bool settle() override;
  std::vector<int> awaited_to_settle() const override;

 private:
  void reserve_own(const Mapping& mapping) const;

  int64_t bytes_;
  int64_t part_bytes_;
  int64_t parts_;
  int64_t chunk_ = 0;
  std::shared_ptr<Mapping> mapping_;
  std::shared_ptr<RegisteredMemory> memory_;
};

/// New groups, by color. The parent's leader makes their control blocks and connections.
class ShmSplit final : public LeaderBroadcast {
 public:
  ShmSplit(ShmEngine& engine, int color, int key, std::string_view group_name,
           const CallContext& context);

  ShmMembership take_membership() { return std::move(*membership_); }

 protected:
  void publish(RingEntry& own) override;
  std::vector<std::vector<OwnedDescriptor>> make() override;
  void receive(std::vector<OwnedDescriptor> descriptors) override;

 private:
  struct ColorAndKey {
    int64_t color;
    int64_t key;
  };
  ColorAndKey color_and_key_of(int peer) const;
  std::vector<int> members_of(int64_t color) const;

  ColorAndKey color_and_key_;
  std::string group_name_;
  std::optional<ShmMembership> membership_;
};

}  // namespace lockstep
