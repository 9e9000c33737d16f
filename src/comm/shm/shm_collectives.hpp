#pragma once

#include "comm/shm/shm_pieces.hpp"

namespace lockstep {

/// Reduces in place. In memory that peers can reach, the elements are cut into chunks; a rank reads
/// a chunk from all ranks in their order and writes the result to all. It claims the chunks of its
/// own region first, and then helps with those of ranks that have less time. Who does which does
/// not change the bits.
class ShmAllReduce final : public ShmPieces {
 public:
  ShmAllReduce(ShmEngine& engine, const Buffer& buffer, ReduceOp op, double weight,
               const CallContext& context);

 protected:
  const void* contribution() const override { return buffer_.data; }
  void put(int64_t begin, int64_t count, std::byte* slot) const override;
  void take(int64_t begin, int64_t count, int64_t stride, const Contributions& from) override;
  void publish(RingCall& own) override;
  void arrived() override;
  bool move() override;
  bool move_direct() override;
  std::vector<int> awaited_direct() const override;

 private:
  void cut_into_chunks();
  void reduce_region(int place);
  void reduce_chunk(int64_t chunk);

  Buffer buffer_;
  std::vector<double> factors_;
  int64_t chunk_count_ = 0;  // elements of a chunk
  int64_t chunks_ = 0;
  std::vector<std::byte*> buffers_;  // [place]
  std::vector<const void*> inputs_;  // [place], of one chunk
  std::vector<void*> outputs_;       // [place]
};

class ShmBroadcast final : public ShmPieces {
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

class ShmReduceScatter final : public ShmPieces {
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

class ShmAllGather final : public ShmPieces {
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
