#pragma once

#include <vector>

#include "comm/shm/shm_engine.hpp"

namespace lockstep {

/// A collective in which ranks contribute elements and every rank makes something of all
/// contributions. How the contributions get from rank to rank depends on where they lie:
///
///   inline   small: each travels in its rank's ring entry, beside the fingerprint
///   direct   in memory that peers can reach: read where it is; its owner waits for the readers
///   staged   elsewhere: copied, chunk by chunk, through the ranks' staging slots
///
/// All ranks choose the same way, from what all have published.
class ChunkedCollective : public ShmCollective {
 public:
  /// `source` is the only rank that contributes; -1: all do. A contribution is `width` blocks of
  /// the call's count.
  ChunkedCollective(ShmEngine& engine, const Fingerprint& what, const CallContext& context,
                    int source, int64_t width);

 protected:
  using Contributions = std::vector<const std::byte*>;  // [rank]

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

  void publish(RingEntry& own) override;
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
  int64_t begin_of(int64_t chunk) const { return chunk * chunk_count_; }
  int64_t count_of(int64_t chunk) const;
  bool all_staged(int64_t target) const;

  const int source_;
  Way way_ = Way::kInline;
  int64_t chunk_count_ = 0;  // elements of a chunk
  int64_t chunks_ = 0;
  int64_t first_chunk_ = 0;  // its number among all chunks of the group
  int64_t put_ = 0;
  int64_t taken_ = 0;
};

/// Reduces in place. In memory that peers can reach, the elements are cut into slices; a rank reads
/// a slice from all ranks in their order and writes the result to all. It claims the slices of its
/// own region first, and then helps with those of ranks that have less time. Who does which does
/// not change the bits.
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

}  // namespace lockstep
