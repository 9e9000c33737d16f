#include "comm/shm/shm_pieces.hpp"

#include <algorithm>

#include "lockstep/error.hpp"

namespace lockstep {

ShmPieces::ShmPieces(ShmEngine& engine, const Call& what, const CallContext& context, int source,
                     int64_t width)
    : ShmCollective(engine, what, context),
      element_bytes_(dtype_bytes(what.dtype)),
      width_(width),
      source_(source) {}

void ShmPieces::publish(RingCall& own) {
  if (!contributes()) return;
  const int64_t bytes = call.count * width_ * element_bytes_;
  if (bytes <= kInlineBytes) {
    put(0, call.count, own.payload);
  } else {
    engine_.locate(contribution(), bytes, own);
  }
}

ShmPieces::Way ShmPieces::choose() const {
  if (call.count * width_ * element_bytes_ <= kInlineBytes) return Way::kInline;
  if (engine_.size() == 1) return Way::kDirect;
  for (int place = 0; place < engine_.size(); ++place) {
    if (source_ >= 0 && place != source_) continue;
    if (engine_.ring_call(place, call.sequence).segment == 0) return Way::kStaged;
  }
  return Way::kDirect;
}

void ShmPieces::arrived() {
  way_ = choose();
  if (way_ != Way::kStaged) return;
  if (contributes()) engine_.reserve_staging();
  piece_count_ = kStagingBytes / (element_bytes_ * width_);
  pieces_ = (call.count + piece_count_ - 1) / piece_count_;
  first_piece_ = engine_.take_pieces(pieces_);
}

bool ShmPieces::move() {
  if (way_ == Way::kStaged) return move_staged();
  if (way_ == Way::kDirect) return move_direct();
  Contributions from;
  for (int place = 0; place < engine_.size(); ++place) {
    from.push_back(engine_.ring_call(place, call.sequence).payload);
  }
  take(0, call.count, call.count, from);
  return true;
}

ShmPieces::Contributions ShmPieces::direct_contributions() const {
  Contributions from;
  for (int place = 0; place < engine_.size(); ++place) {
    if (source_ >= 0 && place != source_) {
      from.push_back(nullptr);
    } else if (place == engine_.rank()) {
      from.push_back(static_cast<const std::byte*>(contribution()));
    } else {
      from.push_back(engine_.address(engine_.ring_call(place, call.sequence)));
    }
  }
  return from;
}

bool ShmPieces::move_direct() {
  if (taken_ == 0) {
    first_piece_ = engine_.take_pieces(1);
    take(0, call.count, call.count, direct_contributions());
    taken_ = 1;
    const ShmControl& control = engine_.control();
    control.announce(control.rank(engine_.rank()).consumed, first_piece_ + 1);
  }
  return !contributes() || engine_.all_reached(&RankControl::consumed, first_piece_ + 1);
}

std::vector<int> ShmPieces::awaited_direct() const {
  return engine_.behind(&RankControl::consumed, first_piece_ + 1);
}

int64_t ShmPieces::count_of(int64_t piece) const {
  return std::min(piece_count_, call.count - begin_of(piece));
}

bool ShmPieces::all_staged(int64_t target) const {
  if (source_ < 0) return engine_.all_reached(&RankControl::staged, target);
  const auto& staged = engine_.control().rank(source_).staged.value;
  return staged.load(std::memory_order_seq_cst) >= target;
}

bool ShmPieces::move_staged() {
  const ShmControl& control = engine_.control();
  RankControl& own = control.rank(engine_.rank());
  if (!contributes()) put_ = pieces_;
  for (bool moved = true; moved && taken_ < pieces_;) {
    moved = false;
    const int64_t next = first_piece_ + put_;
    if (put_ < pieces_ && put_ < taken_ + kStagingSlots &&
        engine_.all_reached(&RankControl::consumed, next + 1 - kStagingSlots)) {
      put(begin_of(put_), count_of(put_), control.staging(engine_.rank(), next));
      control.announce(own.staged, next + 1);
      ++put_;
      moved = true;
    }
    const int64_t piece = first_piece_ + taken_;
    if (taken_ < put_ && all_staged(piece + 1)) {
      Contributions from;
      for (int place = 0; place < engine_.size(); ++place) {
        from.push_back(control.staging(place, piece));
      }
      take(begin_of(taken_), count_of(taken_), count_of(taken_), from);
      control.announce(own.consumed, piece + 1);
      ++taken_;
      moved = true;
    }
  }
  return taken_ == pieces_;
}

std::vector<int> ShmPieces::awaited_to_move() const {
  if (way_ == Way::kDirect) return awaited_direct();
  if (way_ == Way::kInline || taken_ == pieces_) return {};
  if (taken_ < put_) {
    std::vector<int> late = engine_.behind(&RankControl::staged, first_piece_ + taken_ + 1);
    if (source_ >= 0) std::erase_if(late, [this](int place) { return place != source_; });
    return late;
  }
  return engine_.behind(&RankControl::consumed, first_piece_ + put_ + 1 - kStagingSlots);
}

std::vector<double> ShmPieces::factors() const {
  if (call.reduce != ReduceOp::kMean) return {};
  std::vector<double> factors;
  double sum = 0;
  for (int place = 0; place < engine_.size(); ++place) {
    factors.push_back(engine_.ring_call(place, call.sequence).call.weight);
    sum += factors.back();
  }
  if (sum == 0) {
    throw Error(Code::kUsage, describe(call) + ": the weights of all ranks are zero",
                "give at least one rank a weight; a weight is usually its number of samples");
  }
  for (double& factor : factors) factor /= sum;
  return factors;
}

}  // namespace lockstep
