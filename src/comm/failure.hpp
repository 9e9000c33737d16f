#pragma once

#include <cstdint>
#include <exception>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "comm/fingerprint.hpp"
#include "lockstep/error.hpp"

// How calls fail: the errors that ranks throw, and what they tell their peers about them.

namespace lockstep {

/// Why a rank ended its communicator, as its peers learn of it. Every control link carries this
/// record, and nothing in it is ever recovered from a text. Ranks are group ranks.
struct AbortRecord {
  Code code = Code::kRankFailed;
  int32_t by = 0;                   ///< the rank that gave up first
  int32_t blamed = -1;              ///< the rank at fault: `by` if it failed by itself; -1: unknown
  std::vector<int32_t> ranks = {};  ///< of a mismatch, if known: who called something
  std::vector<Fingerprint> fingerprints = {};  ///< [i]: what ranks[i] called
  std::string text = {};  ///< kRankFailed of a peer: continues "rank 2 …"; otherwise what happened

  /// Converts this rank's own exception into a record. An exception that a peer's record caused
  /// passes that record on, so that all ranks blame the same one.
  static AbortRecord of(const std::exception_ptr& error, const Group& group);

  std::string encode() const;
  static std::optional<AbortRecord> decode(std::string_view bytes);
  /// The most that encode() gives for a group of `size` ranks.
  static size_t max_bytes(int size);
};

/// An error of a call that concerns other ranks, with the record that tells peers of it.
class CollectiveError final : public RankError {
 public:
  CollectiveError(Code code, int blamed_world_rank, AbortRecord record, std::string message,
                  std::string help, std::vector<std::string> notes = {})
      : RankError(code, blamed_world_rank, std::move(message), std::move(help), std::move(notes)),
        record_(std::move(record)) {}

  const AbortRecord& record() const { return record_; }

 private:
  AbortRecord record_;
};

/// What is known about a rank that did not come.
struct MissingRank {
  int rank = 0;       ///< in the group
  std::string state;  ///< "process 1234 is stopped by a signal", or ""
};

/// kCallMismatch: says what each rank called. calls[i] is that of ranks[i], or of rank i if
/// `ranks` is empty; not all agree. Blames the rank that differs from a majority.
[[noreturn]] void throw_mismatch(const Group& group, std::span<const Fingerprint> calls,
                                 std::span<const int32_t> ranks = {});

/// The same for the two sides of a message, where they differ.
void require_same_message(const Group& group, int sender, const Fingerprint& sent, int receiver,
                          const Fingerprint& received);

/// kRankAbsent: "all_reduce #17 (bucket 3) …: rank 2 of 4 absent after 30 s".
[[noreturn]] void throw_absent(const Group& group, const Fingerprint& call,
                               std::span<const MissingRank> missing, int64_t waited_ns);

/// kRankFailed: a peer died, left or gave up; `reason` continues "rank 2 …".
[[noreturn]] void throw_rank_failed(const Group& group, const Fingerprint& call, int rank,
                                    std::string_view reason);

/// The error of a call that cannot be made because a peer gave up with this record. `state` is
/// what is known about the rank that the record blames.
[[noreturn]] void throw_recorded(const Group& group, const Fingerprint& call,
                                 const AbortRecord& record, std::string_view state,
                                 int64_t waited_ns);

/// What one rank of a group does while others wait for it, as far as they can tell.
struct RankActivity {
  struct Waiting {
    Fingerprint call;
    int peer = -1;  ///< of a message: the group rank of its other side; -1: a collective
  };

  bool silent = false;           ///< its process is stopped, or does not answer
  int64_t arrived = 0;           ///< the last collective to which it has come
  int64_t finished = 0;          ///< the last collective with which it is done
  std::vector<Waiting> waiting;  ///< the calls in which it waits; none: it does something else
  std::string state;             ///< for a note: "process 1234 is stopped by a signal", or ""
};

/// The error of a call that was not done at its deadline. It follows which rank waits for which,
/// from the ranks that the call awaits to the cause, so that every rank of the group names the same
/// one: a rank that is silent or waits in no call is absent (kRankAbsent), and ranks that wait for
/// each other made different calls (kCallMismatch). A rank that only waits in an earlier call,
/// because of another one, is not to blame. `awaited` empty: as this rank's own activity tells.
/// activities[group rank].
[[noreturn]] void throw_stalled(const Group& group, const Fingerprint& call,
                                std::span<const int> awaited,
                                std::span<const RankActivity> activities, int64_t waited_ns);

}  // namespace lockstep
