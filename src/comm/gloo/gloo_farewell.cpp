#include "comm/gloo/gloo_farewell.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "lockstep/units.hpp"

namespace lockstep {
namespace {

constexpr size_t kMaxReasonBytes = 4096;

// Fixed part of an encoded farewell; places, calls and the reason follow it.
struct Head {
  int64_t waited_ns = 0;
  uint32_t places = 0;
  uint32_t calls = 0;
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

std::string Farewell::encode() const {
  Head head;
  head.waited_ns = waited_ns;
  head.places = static_cast<uint32_t>(places.size());
  head.calls = static_cast<uint32_t>(calls.size());
  head.reason_bytes = static_cast<uint32_t>(std::min(reason.size(), kMaxReasonBytes));
  head.kind = kind;
  std::string text;
  append(text, &head, 1);
  append(text, places.data(), places.size());
  append(text, calls.data(), calls.size());
  append(text, reason.data(), head.reason_bytes);
  return text;
}

std::optional<Farewell> Farewell::decode(std::string_view bytes) {
  Head head;
  if (!take(bytes, &head, 1) || head.kind > Kind::kStuck) return std::nullopt;
  if (head.places > bytes.size() || head.calls > bytes.size()) return std::nullopt;
  Farewell farewell;
  farewell.kind = head.kind;
  farewell.waited_ns = head.waited_ns;
  farewell.places.resize(head.places);
  farewell.calls.resize(head.calls);
  if (!take(bytes, farewell.places.data(), head.places)) return std::nullopt;
  if (!take(bytes, farewell.calls.data(), head.calls)) return std::nullopt;
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
    case Farewell::Kind::kAbsent: {
      if (blames_us) {
        const double waited_s = static_cast<double>(farewell.waited_ns) * 1e-9;
        throw_rank_failed(group, call, from,
                          fmt::format("waited {} for this rank in {} and gave up",
                                      format_seconds(waited_s), describe(farewell.calls.at(0))));
      }
      std::vector<MissingRank> missing;
      for (const int32_t place : farewell.places) missing.push_back({place, ""});
      throw_absent(group, call, missing, farewell.waited_ns);
    }
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
