#include "comm/gloo/gloo_farewell.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

namespace lockstep {
namespace {

constexpr size_t kMaxReasonBytes = 4096;

// Fixed part of an encoded farewell; places, calls, peers and the reason follow it.
struct Head {
  int64_t waited_ns = 0;
  int64_t arrived = 0;
  int64_t finished = 0;
  uint32_t places = 0;
  uint32_t calls = 0;
  uint32_t peers = 0;
  uint32_t reason_bytes = 0;
  Farewell::Kind kind = Farewell::Kind::kLeft;
};

template <class Item>
void append(std::string& text, const Item* items, size_t count) {
  text.append(reinterpret_cast<const char*>(items), count * sizeof(Item));
}

template <class Item>
bool take(std::string_view& bytes, Item* items, size_t count) {
  if (bytes.size() / sizeof(Item) < count) return false;
  if (count > 0) std::memcpy(items, bytes.data(), count * sizeof(Item));
  bytes.remove_prefix(count * sizeof(Item));
  return true;
}

bool has(const std::vector<int32_t>& places, int place) {
  return std::find(places.begin(), places.end(), place) != places.end();
}

// The ranks of a mismatch as a group of their own: two of a message, or all of a collective.
Group only(const Group& group, const std::vector<int32_t>& places) {
  Group part{0, {}, group.name};
  for (const int32_t place : places) {
    part.world_ranks.push_back(group.world_ranks.at(static_cast<size_t>(place)));
  }
  return part;
}

}  // namespace

Farewell Farewell::of(const RankActivity& activity) {
  Farewell farewell;
  farewell.kind = Kind::kStuck;
  farewell.arrived = activity.arrived;
  farewell.finished = activity.finished;
  for (const auto& [call, peer] : activity.waiting) {
    farewell.calls.push_back(call);
    farewell.peers.push_back(peer);
  }
  return farewell;
}

RankActivity Farewell::activity() const {
  RankActivity activity;
  activity.arrived = arrived;
  activity.finished = finished;
  for (size_t i = 0; i < calls.size(); ++i) {
    activity.waiting.push_back({calls[i], i < peers.size() ? peers[i] : -1});
  }
  return activity;
}

std::string Farewell::encode() const {
  Head head;
  head.waited_ns = waited_ns;
  head.arrived = arrived;
  head.finished = finished;
  head.peers = static_cast<uint32_t>(peers.size());
  head.places = static_cast<uint32_t>(places.size());
  head.calls = static_cast<uint32_t>(calls.size());
  head.reason_bytes = static_cast<uint32_t>(std::min(reason.size(), kMaxReasonBytes));
  head.kind = kind;
  std::string text;
  append(text, &head, 1);
  append(text, places.data(), places.size());
  append(text, calls.data(), calls.size());
  append(text, peers.data(), peers.size());
  append(text, reason.data(), head.reason_bytes);
  return text;
}

std::optional<Farewell> Farewell::decode(std::string_view bytes) {
  Head head;
  if (!take(bytes, &head, 1) || head.kind > Kind::kStuck) return std::nullopt;
  for (const uint32_t count : {head.places, head.calls, head.peers}) {
    if (count > bytes.size()) return std::nullopt;
  }
  Farewell farewell;
  farewell.kind = head.kind;
  farewell.waited_ns = head.waited_ns;
  farewell.arrived = head.arrived;
  farewell.finished = head.finished;
  farewell.places.resize(head.places);
  farewell.calls.resize(head.calls);
  farewell.peers.resize(head.peers);
  if (!take(bytes, farewell.places.data(), head.places)) return std::nullopt;
  if (!take(bytes, farewell.calls.data(), head.calls)) return std::nullopt;
  if (!take(bytes, farewell.peers.data(), head.peers)) return std::nullopt;
  if (head.reason_bytes > bytes.size()) return std::nullopt;
  farewell.reason = bytes.substr(0, head.reason_bytes);
  return farewell;
}

Farewell pass_on(const Farewell& heard, int from) {
  if (heard.kind != Farewell::Kind::kAborted) return heard;
  Farewell farewell = heard;
  farewell.kind = Farewell::Kind::kFailed;
  farewell.places = {from};
  return farewell;
}

void throw_farewell(const Group& group, const Call& call, int from, const Farewell& farewell) {
  const bool blames_us = has(farewell.places, group.rank);
  switch (farewell.kind) {
    case Farewell::Kind::kMismatch:
      throw_mismatch(only(group, farewell.places), farewell.calls);
    case Farewell::Kind::kFailed:
      if (blames_us) {
        throw_rank_failed(group, call, from, "lost its connection to this rank");
      }
      throw_rank_failed(group, call, farewell.places.at(0), farewell.reason);
    case Farewell::Kind::kAborted:
      throw_rank_failed(group, call, from, farewell.reason);
    case Farewell::Kind::kLeft:
    case Farewell::Kind::kStuck:
      break;
  }
  throw_rank_failed(group, call, from, "left: it destroyed its communicator");
}

}  // namespace lockstep
