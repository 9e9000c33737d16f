#pragma once

#include <vector>

#include "comm/shm/shm_engine.hpp"

namespace lockstep {

/// A collective in which ranks contribute elements and every rank makes something of all
/// contributions. How the contributions get from rank to rank depends on where they lie:
///
///   inline   small: each travels in its rank's ring entry, and one meeting is all it takes
///   direct   in memory that peers can reach: read where it is; its owner waits for the readers
///   staged   elsewhere: copied, piece by piece, through the ranks' staging slots
///
/// All ranks choose the same way, from what all have published.
class ShmPieces : public ShmCollective {
 public:
  /// `source` is the only place that contributes; -1: all do. A contribution is `width` blocks of
  /// the call's count.
  ShmPieces(ShmEngine& engine, const Call& what, const CallContext& context, int source,
            int64_t width);

 protected:
  using Contributions = std::vector<const std::byte*>;  // [place]

  /// What this rank contributes, all of it.
  virtual const void* contribution() const = 0;
  /// Copies its elements begin to begin + count into a slot.
  virtual void put(int64_t begin, int64_t count, std::byte* slot) const = 0;
  /// Uses elements begin to begin + count of all contributions. `stride` is the distance in
  /// elements between blocks of a contribution that has several.
  virtual void take(int64_t begin, int64_t count, int64_t stride, const Contributions& from) = 0;
  /// The direct way, where a call has a better one than each rank for itself.
  virtual bool move_direct();
  virtual std::vector<int> awaited_direct() const;

  void publish(RingCall& own) override;
  void arrived() override;
  bool move() override;
  std::vector<int> awaited_to_move() const override;

  /// The ranks' weights over their sum, for kMean; empty otherwise.
  std::vector<double> factors() const;
  Contributions direct_contributions() const;
  bool contributes() const { return source_ < 0 || source_ == engine_.rank(); }

  const int64_t element_bytes_;
  const int64_t width_;  // blocks of a contribution

 private:
  enum class Way { kInline, kDirect, kStaged };

  Way choose() const;
  bool move_staged();
  int64_t begin_of(int64_t piece) const { return piece * piece_count_; }
  int64_t count_of(int64_t piece) const;
  bool all_staged(int64_t target) const;

  const int source_;
  Way way_ = Way::kInline;
  int64_t piece_count_ = 0;  // elements of a piece
  int64_t pieces_ = 0;
  int64_t first_piece_ = 0;  // its number among all pieces of the group
  int64_t put_ = 0;
  int64_t taken_ = 0;
};

}  // namespace lockstep
