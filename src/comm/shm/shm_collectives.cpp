#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "comm/arguments.hpp"
#include "comm/shm/shm_collectives.hpp"
#include "kernels/reduce_kernels.hpp"
#include "lockstep/error.hpp"

namespace lockstep {

#ifdef __x86_64__
#include <emmintrin.h>
#endif

/// Copies to memory that another core reads next and this one does not. `to` is aligned to 64
/// bytes.
///
/// The other core still holds the lines of its last read: storing to them the usual way first
/// fetches each one from there, which measured three times slower than writing past the caches (64
/// KiB: 34 against 3 microseconds). A few lines are not worth the wait for the writes to drain.
inline void stream_copy(std::byte* to, const std::byte* from, int64_t bytes) {
  int64_t streamed = 0;
#ifdef __x86_64__
  constexpr int64_t kWorthwhile = 512;
  constexpr int64_t kLine = 64;
  if (bytes >= kWorthwhile) {
    for (; streamed + kLine <= bytes; streamed += kLine) {
      for (int64_t part = 0; part < kLine; part += 16) {
        const __m128i data =
            _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + streamed + part));
        _mm_stream_si128(reinterpret_cast<__m128i*>(to + streamed + part), data);
      }
    }
    _mm_sfence();
  }
#endif
  if (bytes > streamed) {
    std::memcpy(to + streamed, from + streamed, static_cast<size_t>(bytes - streamed));
  }
}

ChunkedCollective::ChunkedCollective(ShmEngine& engine, const Fingerprint& what,
                                     const CallContext& context, int64_t width)
    : ShmCollective(engine, what, context),
      element_bytes_(dtype_bytes(what.dtype)),
      width_(width),
      extent_(what.count) {}

void ChunkedCollective::publish(RingEntry& own) {
  if (!contributes(engine_.rank())) return;
  if (fits_inline(extent_)) {
    put(0, extent_, own.payload);
  } else {
    engine_.locate(contribution(), extent_ * width_ * element_bytes_, own);
  }
}

ChunkedCollective::Way ChunkedCollective::choose() const {
  if (fits_inline(extent_)) return Way::kInline;
  if (engine_.size() == 1) return Way::kDirect;
  for (int peer = 0; peer < engine_.size(); ++peer) {
    if (!contributes(peer)) continue;
    if (engine_.ring_entry(peer, call.sequence).segment == 0) return Way::kStaged;
  }
  return Way::kDirect;
}

void ChunkedCollective::arrived() {
  way_ = choose();
  if (way_ != Way::kStaged) return;
  if (contributes(engine_.rank())) engine_.reserve_staging();
  chunk_count_ = kStagingBytes / (element_bytes_ * width_);
  chunks_ = (extent_ + chunk_count_ - 1) / chunk_count_;
  first_chunk_ = engine_.take_chunks(chunks_);
}

bool ChunkedCollective::move() {
  if (way_ == Way::kStaged) return move_staged();
  if (way_ == Way::kDirect) return move_direct();
  Contributions from;
  for (int peer = 0; peer < engine_.size(); ++peer) {
    from.push_back(engine_.ring_entry(peer, call.sequence).payload);
  }
  take(0, extent_, extent_, from);
  return true;
}

ChunkedCollective::Contributions ChunkedCollective::direct_contributions() const {
  Contributions from;
  for (int peer = 0; peer < engine_.size(); ++peer) {
    if (!contributes(peer)) {
      from.push_back(nullptr);
    } else if (is_own(peer)) {
      from.push_back(static_cast<const std::byte*>(contribution()));
    } else {
      from.push_back(engine_.address(engine_.ring_entry(peer, call.sequence)));
    }
  }
  return from;
}

bool ChunkedCollective::move_direct() {
  if (taken_ == 0) take(0, extent_, extent_, direct_contributions());
  return end_of_direct_reads();
}

bool ChunkedCollective::end_of_direct_reads() {
  if (taken_ == 0) {
    taken_ = 1;
    first_chunk_ = engine_.take_chunks(1);
    const ShmControl& control = engine_.control();
    control.announce(control.rank(engine_.rank()).consumed, first_chunk_ + 1);
  }
  return !contributes(engine_.rank()) ||
         engine_.all_reached(&RankControl::consumed, first_chunk_ + 1);
}

std::vector<int> ChunkedCollective::awaited_direct() const {
  return engine_.behind(&RankControl::consumed, first_chunk_ + 1);
}

int64_t ChunkedCollective::count_of(int64_t chunk) const {
  return std::min(chunk_count_, extent_ - begin_of(chunk));
}

bool ChunkedCollective::all_staged(int64_t target) const {
  for (int peer = 0; peer < engine_.size(); ++peer) {
    if (is_own(peer) || !contributes(peer)) continue;
    const auto& staged = engine_.control().rank(peer).staged.value;
    if (staged.load(std::memory_order_seq_cst) < target) return false;
  }
  return true;
}

bool ChunkedCollective::move_staged() {
  const ShmControl& control = engine_.control();
  RankControl& own = control.rank(engine_.rank());
  if (!contributes(engine_.rank())) put_ = chunks_;
  for (bool moved = true; moved && taken_ < chunks_;) {
    moved = false;
    const int64_t next = first_chunk_ + put_;
    if (put_ < chunks_ && put_ < taken_ + kStagingSlots &&
        engine_.all_reached(&RankControl::consumed, next + 1 - kStagingSlots)) {
      put(begin_of(put_), count_of(put_), control.staging(engine_.rank(), next));
      control.announce(own.staged, next + 1);
      ++put_;
      moved = true;
    }
    const int64_t chunk = first_chunk_ + taken_;
    if (taken_ < put_ && all_staged(chunk + 1)) {
      Contributions from;
      for (int peer = 0; peer < engine_.size(); ++peer) {
        from.push_back(control.staging(peer, chunk));
      }
      take(begin_of(taken_), count_of(taken_), count_of(taken_), from);
      control.announce(own.consumed, chunk + 1);
      ++taken_;
      moved = true;
    }
  }
  return taken_ == chunks_;
}

std::vector<int> ChunkedCollective::awaited_to_move() const {
  if (way_ == Way::kDirect) return awaited_direct();
  if (way_ == Way::kInline || taken_ == chunks_) return {};
  if (taken_ < put_) {
    std::vector<int> late = engine_.behind(&RankControl::staged, first_chunk_ + taken_ + 1);
    std::erase_if(late, [this](int peer) { return !contributes(peer); });
    return late;
  }
  return engine_.behind(&RankControl::consumed, first_chunk_ + put_ + 1 - kStagingSlots);
}

std::vector<double> ChunkedCollective::factors() const {
  if (call.reduce != ReduceOp::kMean) return {};
  std::vector<double> weights;
  for (int peer = 0; peer < engine_.size(); ++peer) {
    weights.push_back(engine_.ring_entry(peer, call.sequence).call.weight);
  }
  return mean_factors(call, std::move(weights));
}

namespace {

// In bytes of one rank's buffer. Small enough that ranks end together and that a slice of a few
// ranks stays in a core's cache, large enough that claiming one costs nothing.
constexpr int64_t kSmallestSlice = 16 << 10;
constexpr int64_t kLargestSlice = 128 << 10;

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
    : ChunkedCollective(
          engine,
          make_reduce_fingerprint(Operation::kAllReduce, buffer.dtype, buffer.count, op, weight),
          context, 1),
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

void ShmAllReduce::publish(RingEntry& own) {
  own.claimed.value.store(0, std::memory_order_relaxed);
  own.done.value.store(0, std::memory_order_relaxed);
  ChunkedCollective::publish(own);
}

void ShmAllReduce::arrived() {
  ChunkedCollective::arrived();
  factors_ = factors();
}

bool ShmAllReduce::move() {
  return engine_.size() == 1 || ChunkedCollective::move();
}

void ShmAllReduce::cut_into_slices() {
  for (const std::byte* buffer : direct_contributions()) {
    buffers_.push_back(const_cast<std::byte*>(buffer));  // every rank gave a Buffer
  }
  inputs_.resize(buffers_.size());
  outputs_.resize(buffers_.size());
  const int64_t share = round_up(buffer_.bytes() / engine_.size(), page_bytes());
  slice_count_ = std::clamp(share, kSmallestSlice, kLargestSlice) / element_bytes_;
  slices_ = (call.count + slice_count_ - 1) / slice_count_;
}

void ShmAllReduce::reduce_slice(int64_t slice) {
  const int64_t begin = slice * slice_count_;
  for (size_t peer = 0; peer < buffers_.size(); ++peer) {
    inputs_[peer] = outputs_[peer] = buffers_[peer] + begin * element_bytes_;
  }
  reduce(buffer_.dtype, call.reduce, inputs_, factors_, outputs_,
         std::min(slice_count_, call.count - begin));
}

// Reduces the slices of this peer's region that no rank has claimed yet.
void ShmAllReduce::reduce_region(int peer) {
  const int64_t begin = peer * slices_ / engine_.size();
  const int64_t end = (peer + 1) * slices_ / engine_.size();
  auto& claimed = engine_.ring_entry(peer, call.sequence).claimed.value;
  auto& done = engine_.ring_entry(0, call.sequence).done.value;
  while (claimed.load(std::memory_order_relaxed) < end - begin) {
    const int64_t slice = begin + claimed.fetch_add(1, std::memory_order_relaxed);
    if (slice >= end) return;
    reduce_slice(slice);
    if (done.fetch_add(1, std::memory_order_seq_cst) + 1 == slices_) engine_.control().wake();
  }
}

bool ShmAllReduce::move_direct() {
  if (slices_ == 0) cut_into_slices();
  auto& reducing = engine_.control().rank(engine_.rank()).reducing.value;
  reducing.store(call.sequence, std::memory_order_relaxed);
  for (int step = 0; step < engine_.size(); ++step) {
    reduce_region((engine_.rank() + step) % engine_.size());
  }
  reducing.store(0, std::memory_order_relaxed);
  const auto& done = engine_.ring_entry(0, call.sequence).done.value;
  return done.load(std::memory_order_seq_cst) == slices_;
}

std::vector<int> ShmAllReduce::awaited_direct() const {
  std::vector<int> peers;
  for (int peer = 0; peer < engine_.size(); ++peer) {
    const auto& reducing = engine_.control().rank(peer).reducing.value;
    if (peer != engine_.rank() && reducing.load(std::memory_order_relaxed) == call.sequence) {
      peers.push_back(peer);
    }
  }
  return peers;
}

ShmBroadcast::ShmBroadcast(ShmEngine& engine, const Buffer& buffer, int root,
                           const CallContext& context)
    : ChunkedCollective(engine, make_broadcast_fingerprint(buffer, root), context, 1),
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
    : ChunkedCollective(engine,
                        make_reduce_fingerprint(Operation::kReduceScatter, output.dtype,
                                                output.count, op, weight),
                        context, engine.size()),
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
  ChunkedCollective::arrived();
  factors_ = factors();
}

ShmAllGather::ShmAllGather(ShmEngine& engine, const ConstBuffer& input, const Buffer& output,
                           const CallContext& context)
    : ChunkedCollective(engine, make_fingerprint(Operation::kAllGather, input.dtype, input.count),
                        context, 1),
      input_(input),
      output_(output) {}

void ShmAllGather::put(int64_t begin, int64_t count, std::byte* slot) const {
  stream_copy(slot, bytes_at(input_.data, begin * element_bytes_), count * element_bytes_);
}

void ShmAllGather::take(int64_t begin, int64_t count, int64_t /*stride*/,
                        const Contributions& from) {
  for (int peer = 0; peer < engine_.size(); ++peer) {
    copy_bytes(bytes_at(output_.data, (peer * call.count + begin) * element_bytes_),
               is_own(peer) ? bytes_at(input_.data, begin * element_bytes_)
                            : from[static_cast<size_t>(peer)],
               count * element_bytes_);
  }
}

ShmReduce::ShmReduce(ShmEngine& engine, const Buffer& buffer, int root, ReduceOp op, double weight,
                     const CallContext& context)
    : ChunkedCollective(engine, make_rooted_reduce_fingerprint(buffer, root, op, weight), context,
                        1),
      buffer_(buffer),
      root_(root) {}

void ShmReduce::put(int64_t begin, int64_t count, std::byte* slot) const {
  stream_copy(slot, bytes_at(buffer_.data, begin * element_bytes_), count * element_bytes_);
}

void ShmReduce::take(int64_t begin, int64_t count, int64_t /*stride*/, const Contributions& from) {
  if (count == 0 || !is_own(root_)) return;
  const std::vector<const void*> inputs(from.begin(), from.end());
  void* output = bytes_at(buffer_.data, begin * element_bytes_);
  reduce(buffer_.dtype, call.reduce, inputs, factors_, {&output, 1}, count);
}

void ShmReduce::arrived() {
  ChunkedCollective::arrived();
  factors_ = factors();
}

ShmExchange::ShmExchange(ShmEngine& engine, const ConstBuffer& input, const Buffer& output,
                         const BlockExchange& blocks, const CallContext& context)
    : ChunkedCollective(engine, make_exchange_fingerprint(input.dtype, blocks), context,
                        blocks.same_for_all() ? 1 : engine.size()),
      input_(input),
      output_(output),
      blocks_(blocks),
      head_bytes_(2 * engine.size() * static_cast<int64_t>(sizeof(int64_t))),
      inline_count_((kInlineBytes - head_bytes_) / (width_ * element_bytes_)) {}

// No rank knows the largest block yet: what fits is sent along, and is used if all of it fits.
void ShmExchange::publish(RingEntry& own) {
  std::byte* next = own.payload;
  for (const auto* counts : {&blocks_.given, &blocks_.taken}) {
    const auto bytes = counts->size() * sizeof(int64_t);
    std::memcpy(next, counts->data(), bytes);
    next += bytes;
  }
  if (*std::max_element(blocks_.given.begin(), blocks_.given.end()) <= inline_count_) {
    put(0, inline_count_, next);
  }
  engine_.locate(input_.data, input_.bytes(), own);
}

void ShmExchange::arrived() {
  const auto ranks = static_cast<size_t>(engine_.size());
  ExchangedCounts taken;
  extent_ = 0;
  for (int peer = 0; peer < engine_.size(); ++peer) {
    std::vector<int64_t> counts(2 * ranks);
    std::memcpy(counts.data(), engine_.ring_entry(peer, call.sequence).payload,
                static_cast<size_t>(head_bytes_));
    const auto middle = counts.begin() + static_cast<ptrdiff_t>(ranks);
    given_.emplace_back(counts.begin(), middle);
    taken.emplace_back(middle, counts.end());
    extent_ = std::max(extent_, *std::max_element(counts.begin(), middle));
  }
  require_same_counts(engine_.group(), reported(), given_, taken);
  ChunkedCollective::arrived();
}

bool ShmExchange::contributes(int peer) const {
  const auto& given = given_[static_cast<size_t>(peer)];
  return std::any_of(given.begin(), given.end(), [](int64_t count) { return count > 0; });
}

// A slot holds that range of every block, one after the other.
void ShmExchange::put(int64_t begin, int64_t count, std::byte* slot) const {
  for (int block = 0; block < width_; ++block) {
    const int64_t there = blocks_.given[static_cast<size_t>(block)] - begin;
    copy_bytes(slot + block * count * element_bytes_,
               bytes_at(input_.data, (blocks_.given_offset(block) + begin) * element_bytes_),
               std::clamp<int64_t>(there, 0, count) * element_bytes_);
  }
}

// The own block comes from the input: in place it stays as it is, which another thread may be
// sending to other hosts.
void ShmExchange::take_block(int peer, int64_t begin, int64_t count, const std::byte* from) {
  const int64_t there = blocks_.taken[static_cast<size_t>(peer)] - begin;
  if (there <= 0) return;
  if (is_own(peer)) {
    from = bytes_at(input_.data, (blocks_.given_offset(peer) + begin) * element_bytes_);
  }
  copy_bytes(bytes_at(output_.data, (blocks_.taken_offset(peer) + begin) * element_bytes_), from,
             std::min(there, count) * element_bytes_);
}

void ShmExchange::take(int64_t begin, int64_t count, int64_t stride, const Contributions& from) {
  const int64_t own_block = blocks_.same_for_all() ? 0 : engine_.rank() * stride * element_bytes_;
  for (int peer = 0; peer < engine_.size(); ++peer) {
    take_block(peer, begin, count, from[static_cast<size_t>(peer)] + own_block);
  }
}

bool ShmExchange::move() {
  if (way_ != Way::kInline) return ChunkedCollective::move();
  Contributions from;
  for (int peer = 0; peer < engine_.size(); ++peer) {
    from.push_back(engine_.ring_entry(peer, call.sequence).payload + head_bytes_);
  }
  take(0, extent_, inline_count_, from);
  return true;
}

// In a peer's own memory its blocks have the counts that it gives.
bool ShmExchange::move_direct() {
  if (!read_) {
    read_ = true;
    const Contributions from = direct_contributions();
    for (int peer = 0; peer < engine_.size(); ++peer) {
      BlockExchange theirs = blocks_;
      theirs.given = given_[static_cast<size_t>(peer)];
      if (from[static_cast<size_t>(peer)] == nullptr) continue;
      take_block(
          peer, 0, extent_,
          from[static_cast<size_t>(peer)] + theirs.given_offset(engine_.rank()) * element_bytes_);
    }
  }
  return end_of_direct_reads();
}

}  // namespace lockstep
