#include "comm/shm/shm_collectives.hpp"

#include <algorithm>
#include <cstring>

#include "comm/make_call.hpp"
#include "comm/shm/stream_copy.hpp"
#include "kernels/reduce_kernels.hpp"

namespace lockstep {
namespace {

// In bytes of one rank's buffer. Small enough that ranks end together and that a chunk of a few
// ranks stays in a core's cache, large enough that claiming one costs nothing.
constexpr int64_t kSmallestChunk = 16 << 10;
constexpr int64_t kLargestChunk = 128 << 10;

std::byte* bytes_at(void* data, int64_t bytes) {
  return static_cast<std::byte*>(data) + bytes;
}

const std::byte* bytes_at(const void* data, int64_t bytes) {
  return static_cast<const std::byte*>(data) + bytes;
}

void copy_bytes(std::byte* to, const std::byte* from, int64_t bytes) {
  if (bytes > 0 && to != from) std::memcpy(to, from, static_cast<size_t>(bytes));
}

}  // namespace

ShmAllReduce::ShmAllReduce(ShmEngine& engine, const Buffer& buffer, ReduceOp op, double weight,
                           const CallContext& context)
    : ShmPieces(engine,
                make_reduce_call(Operation::kAllReduce, buffer.dtype, buffer.count, op, weight),
                context, -1, 1),
      buffer_(buffer) {}

void ShmAllReduce::put(int64_t begin, int64_t count, std::byte* slot) const {
  stream_copy(slot, bytes_at(buffer_.data, begin * element_bytes_), count * element_bytes_);
}

void ShmAllReduce::take(int64_t begin, int64_t count, int64_t /*stride*/,
                        const Contributions& from) {
  if (count == 0) return;
  const std::vector<const void*> inputs(from.begin(), from.end());
  void* output = bytes_at(buffer_.data, begin * element_bytes_);
  reduce(buffer_.dtype, call.reduce, inputs, factors_, {&output, 1}, count);
}

void ShmAllReduce::publish(RingCall& own) {
  own.claimed.value.store(0, std::memory_order_relaxed);
  own.done.value.store(0, std::memory_order_relaxed);
  ShmPieces::publish(own);
}

void ShmAllReduce::arrived() {
  ShmPieces::arrived();
  factors_ = factors();
}

bool ShmAllReduce::move() {
  return engine_.size() == 1 || ShmPieces::move();
}

void ShmAllReduce::cut_into_chunks() {
  for (const std::byte* buffer : direct_contributions()) {
    buffers_.push_back(const_cast<std::byte*>(buffer));  // every rank gave a Buffer
  }
  inputs_.resize(buffers_.size());
  outputs_.resize(buffers_.size());
  const int64_t share = round_up(buffer_.bytes() / engine_.size(), page_bytes());
  chunk_count_ = std::clamp(share, kSmallestChunk, kLargestChunk) / element_bytes_;
  chunks_ = (call.count + chunk_count_ - 1) / chunk_count_;
}

void ShmAllReduce::reduce_chunk(int64_t chunk) {
  const int64_t begin = chunk * chunk_count_;
  for (size_t place = 0; place < buffers_.size(); ++place) {
    inputs_[place] = outputs_[place] = buffers_[place] + begin * element_bytes_;
  }
  reduce(buffer_.dtype, call.reduce, inputs_, factors_, outputs_,
         std::min(chunk_count_, call.count - begin));
}

// Does what nobody has claimed of the chunks that lie at this place's share of the elements.
void ShmAllReduce::reduce_region(int place) {
  const int64_t begin = place * chunks_ / engine_.size();
  const int64_t end = (place + 1) * chunks_ / engine_.size();
  auto& claimed = engine_.ring_call(place, call.sequence).claimed.value;
  auto& done = engine_.ring_call(0, call.sequence).done.value;
  while (claimed.load(std::memory_order_relaxed) < end - begin) {
    const int64_t chunk = begin + claimed.fetch_add(1, std::memory_order_relaxed);
    if (chunk >= end) return;
    reduce_chunk(chunk);
    if (done.fetch_add(1, std::memory_order_seq_cst) + 1 == chunks_) engine_.control().wake();
  }
}

bool ShmAllReduce::move_direct() {
  if (chunks_ == 0) cut_into_chunks();
  auto& reducing = engine_.control().rank(engine_.rank()).reducing.value;
  reducing.store(call.sequence, std::memory_order_relaxed);
  for (int step = 0; step < engine_.size(); ++step) {
    reduce_region((engine_.rank() + step) % engine_.size());
  }
  reducing.store(0, std::memory_order_relaxed);
  const auto& done = engine_.ring_call(0, call.sequence).done.value;
  return done.load(std::memory_order_seq_cst) == chunks_;
}

std::vector<int> ShmAllReduce::awaited_direct() const {
  std::vector<int> places;
  for (int place = 0; place < engine_.size(); ++place) {
    const auto& reducing = engine_.control().rank(place).reducing.value;
    if (place != engine_.rank() && reducing.load(std::memory_order_relaxed) == call.sequence) {
      places.push_back(place);
    }
  }
  return places;
}

ShmBroadcast::ShmBroadcast(ShmEngine& engine, const Buffer& buffer, int root,
                           const CallContext& context)
    : ShmPieces(engine, make_broadcast_call(buffer, root), context, root, 1),
      buffer_(buffer),
      root_(root) {}

void ShmBroadcast::put(int64_t begin, int64_t count, std::byte* slot) const {
  stream_copy(slot, bytes_at(buffer_.data, begin * element_bytes_), count * element_bytes_);
}

void ShmBroadcast::take(int64_t begin, int64_t count, int64_t /*stride*/,
                        const Contributions& from) {
  if (engine_.rank() == root_) return;
  copy_bytes(bytes_at(buffer_.data, begin * element_bytes_), from[static_cast<size_t>(root_)],
             count * element_bytes_);
}

ShmReduceScatter::ShmReduceScatter(ShmEngine& engine, const ConstBuffer& input,
                                   const Buffer& output, ReduceOp op, double weight,
                                   const CallContext& context)
    : ShmPieces(engine,
                make_reduce_call(Operation::kReduceScatter, output.dtype, output.count, op, weight),
                context, -1, engine.size()),
      input_(input),
      output_(output) {}

// A slot holds that range of every block, one after the other.
void ShmReduceScatter::put(int64_t begin, int64_t count, std::byte* slot) const {
  for (int64_t block = 0; block < width_; ++block) {
    copy_bytes(slot + block * count * element_bytes_,
               bytes_at(input_.data, (block * call.count + begin) * element_bytes_),
               count * element_bytes_);
  }
}

void ShmReduceScatter::take(int64_t begin, int64_t count, int64_t stride,
                            const Contributions& from) {
  if (count == 0) return;
  std::vector<const void*> inputs;
  for (const std::byte* contribution : from) {
    inputs.push_back(contribution + engine_.rank() * stride * element_bytes_);
  }
  void* output = bytes_at(output_.data, begin * element_bytes_);
  reduce(output_.dtype, call.reduce, inputs, factors_, {&output, 1}, count);
}

void ShmReduceScatter::arrived() {
  ShmPieces::arrived();
  factors_ = factors();
}

ShmAllGather::ShmAllGather(ShmEngine& engine, const ConstBuffer& input, const Buffer& output,
                           const CallContext& context)
    : ShmPieces(engine, make_call(Operation::kAllGather, input.dtype, input.count), context, -1, 1),
      input_(input),
      output_(output) {}

void ShmAllGather::put(int64_t begin, int64_t count, std::byte* slot) const {
  stream_copy(slot, bytes_at(input_.data, begin * element_bytes_), count * element_bytes_);
}

void ShmAllGather::take(int64_t begin, int64_t count, int64_t /*stride*/,
                        const Contributions& from) {
  for (int place = 0; place < engine_.size(); ++place) {
    copy_bytes(bytes_at(output_.data, (place * call.count + begin) * element_bytes_),
               from[static_cast<size_t>(place)], count * element_bytes_);
  }
}

}  // namespace lockstep
