#pragma once

#include <vector>

#include "comm/arguments.hpp"
#include "comm/shm/shm_engine.hpp"

namespace lockstep {

/// A collective in which ranks contribute elements and every rank makes something of all
/// contributions. How the contributions get from rank to rank depends on where they lie:
///
///   inline   small: each travels in its rank's ring entry, next to the fingerprint
///   direct   in memory that peers can reach: read where it is; its owner waits for the readers
///   staged   elsewhere: copied, chunk by chunk, through the ranks' staging slots
///
/// All ranks choose the same way, from what all have published.
class ChunkedCollective : public ShmCollective {
 public:
  /// A contribution is `width` blocks of the call's count.
  ChunkedCollective(ShmEngine& engine, const Fingerprint& what, const CallContext& context,
                    int64_t width);

 protected:
  using Contributions = std::vector<const std::byte*>;  // [rank]; null if it has none
  enum class Way { kInline, kDirect, kStaged };

  /// Whether a rank contributes.
  virtual bool contributes(int /*peer*/) const { return true; }
  /// What this rank contributes, all of it.
  virtual const void* contribution() const = 0;
  /// Copies its elements begin to begin + count into a slot.
  virtual void put(int64_t begin, int64_t count, std::byte* slot) const = 0;
  /// Uses elements begin to begin + count of all contributions. `stride` is the distance in
  /// elements between blocks of a contribution that has several.
  virtual void take(int64_t begin, int64_t count, int64_t stride, const Contributions& from) = 0;
  /// The direct way, if a call has a better one than each rank for itself.
  virtual bool move_direct();
  virtual std::vector<int> awaited_direct() const;

  void publish(RingEntry& own) override;
  void arrived() override;
  bool move() override;
  std::vector<int> awaited_to_move() const override;

  /// The ranks' weights over their sum, for kMean; empty otherwise.
  std::vector<double> factors() const;
  Contributions direct_contributions() const;
  /// In the direct way: this rank has read all that it reads of the others' memory. True when they
  /// have done so with its own.
  bool end_of_direct_reads();
  bool is_own(int peer) const { return peer == engine_.rank(); }
  /// Whether contributions of this many elements in each block travel in the ring entries.
  virtual bool fits_inline(int64_t count) const {
    return count * width_ * element_bytes_ <= kInlineBytes;
  }

  const int64_t element_bytes_;
  const int64_t width_;  // blocks of a contribution
  int64_t extent_;       // elements of the largest block of all contributions
  Way way_ = Way::kInline;

 private:
  Way choose() const;
  bool move_staged();
  int64_t begin_of(int64_t chunk) const { return chunk * chunk_count_; }
  int64_t count_of(int64_t chunk) const;
  bool all_staged(int64_t target) const;

  int64_t chunk_count_ = 0;  // elements of a chunk
  int64_t chunks_ = 0;
  int64_t first_chunk_ = 0;  // its number among all chunks of the group
  int64_t put_ = 0;
  int64_t taken_ = 0;
};

/// Reduces in place. In memory that peers can reach, the elements are cut into slices; a rank reads
/// a slice from all ranks in their order and writes the result to all. It claims the slices of its
/// own region first, and then helps with those of ranks that have less time. The bits do not
/// depend on which rank reduces a slice.
class ShmAllReduce final : public ChunkedCollective {
 public:
  ShmAllReduce(ShmEngine& engine, const Buffer& buffer, ReduceOp op, double weight,
               const CallContext& context);

 protected:
  const void* contribution() const override { return buffer_.data; }
  void put(int64_t begin, int64_t count, std::byte* slot) const override;
  void take(int64_t begin, int64_t count, int64_t stride, const Contributions& from) override;
  void publish(RingEntry& own) override;
  void arrived() override;
  bool move() override;
  bool move_direct() override;
  std::vector<int> awaited_direct() const override;

 private:
  void cut_into_slices();
  void reduce_region(int peer);
  void reduce_slice(int64_t slice);

  Buffer buffer_;
  std::vector<double> factors_;
  int64_t slice_count_ = 0;  // elements of a slice
  int64_t slices_ = 0;
  std::vector<std::byte*> buffers_;  // [rank]
  std::vector<const void*> inputs_;  // [rank], of one slice
  std::vector<void*> outputs_;       // [rank]
};

class ShmBroadcast final : public ChunkedCollective {
 public:
  ShmBroadcast(ShmEngine& engine, const Buffer& buffer, int root, const CallContext& context);

 protected:
  bool contributes(int peer) const override { return peer == root_; }
  const void* contribution() const override { return buffer_.data; }
  void put(int64_t begin, int64_t count, std::byte* slot) const override;
  void take(int64_t begin, int64_t count, int64_t stride, const Contributions& from) override;

 private:
  Buffer buffer_;
  int root_;
};

class ShmReduceScatter final : public ChunkedCollective {
 public:
  ShmReduceScatter(ShmEngine& engine, const ConstBuffer& input, const Buffer& output, ReduceOp op,
                   double weight, const CallContext& context);

 protected:
  const void* contribution() const override { return input_.data; }
  void put(int64_t begin, int64_t count, std::byte* slot) const override;
  void take(int64_t begin, int64_t count, int64_t stride, const Contributions& from) override;
  void arrived() override;

 private:
  ConstBuffer input_;
  Buffer output_;
  std::vector<double> factors_;
};

class ShmAllGather final : public ChunkedCollective {
 public:
  ShmAllGather(ShmEngine& engine, const ConstBuffer& input, const Buffer& output,
               const CallContext& context);

 protected:
  const void* contribution() const override { return input_.data; }
  void put(int64_t begin, int64_t count, std::byte* slot) const override;
  void take(int64_t begin, int64_t count, int64_t stride, const Contributions& from) override;

 private:
  ConstBuffer input_;
  Buffer output_;
};

/// The root reads what all contribute.
class ShmReduce final : public ChunkedCollective {
 public:
  ShmReduce(ShmEngine& engine, const Buffer& buffer, int root, ReduceOp op, double weight,
            const CallContext& context);

 protected:
  const void* contribution() const override { return buffer_.data; }
  void put(int64_t begin, int64_t count, std::byte* slot) const override;
  void take(int64_t begin, int64_t count, int64_t stride, const Contributions& from) override;
  void arrived() override;

 private:
  Buffer buffer_;
  int root_;
  std::vector<double> factors_;
};

/// Blocks of different counts. The ring entry begins with the counts that its rank gives and takes,
/// so that all ranks know all of them. A contribution has a block for each peer, or, where the same
/// goes to all, one.
class ShmExchange final : public ChunkedCollective {
 public:
  ShmExchange(ShmEngine& engine, const ConstBuffer& input, const Buffer& output,
              const BlockExchange& blocks, const CallContext& context);

 protected:
  bool contributes(int peer) const override;
  const void* contribution() const override { return input_.data; }
  void put(int64_t begin, int64_t count, std::byte* slot) const override;
  void take(int64_t begin, int64_t count, int64_t stride, const Contributions& from) override;
  bool fits_inline(int64_t count) const override { return count <= inline_count_; }
  void publish(RingEntry& own) override;
  void arrived() override;
  bool move() override;
  bool move_direct() override;

 private:
  void take_block(int peer, int64_t begin, int64_t count, const std::byte* from);

  ConstBuffer input_;
  Buffer output_;
  BlockExchange blocks_;
  int64_t head_bytes_;          // of the counts in a ring entry
  int64_t inline_count_;        // elements of a block that fit behind them
  ExchangedCounts given_ = {};  // [from][to], of all ranks, once they have arrived
  bool read_ = false;           // in the direct way
};

}  // namespace lockstep
