#include "comm/gloo/gloo_data.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/running_clock.hpp"
#include "lockstep/error.hpp"

namespace lockstep {
namespace {

// All ranks have met when Gloo connects: what takes longer than this will not come.
constexpr int64_t kConnectTimeoutMs = 30'000;

constexpr const char* kHelp =
    "see whether all ranks still run, and whether a firewall stands between the hosts: ranks "
    "connect to each other at ports that the system chooses";

[[noreturn]] void fail(const std::string& what, const std::string& why) {
  throw Error(Code::kRendezvous, fmt::format("gloo {}: {}", what, why), kHelp);
}

// The rank at `place` ended, or did not come in time, before all were connected.
[[noreturn]] void fail_rank(const Group& group, int place, const std::string& what) {
  const int rank = group.world_ranks.at(static_cast<size_t>(place));
  throw RankError(Code::kRendezvous, rank,
                  fmt::format("gloo, group {}: rank {} {} before all ranks were connected",
                              group.name, rank, what),
                  kHelp);
}

}  // namespace

GlooData::GlooData(const Group& group, const std::string& address, GlooLink& link,
                   int64_t deadline_ns)
    : api_(load_gloo()) {
  const int64_t left_ms = std::max<int64_t>((deadline_ns - running_ns()) / 1'000'000, 1);
  LockstepGlooMessage message{};
  if (api_.create(group.rank, group.size(), address.c_str(), std::min(left_ms, kConnectTimeoutMs),
                  running_ns, &context_, &message) != LOCKSTEP_GLOO_OK) {
    fail("cannot listen at " + address, message.text);
  }
  try {
    connect(group, link, deadline_ns);
  } catch (...) {
    api_.destroy(context_);
    throw;
  }
}

void GlooData::connect(const Group& group, GlooLink& link, int64_t deadline_ns) {
  LockstepGlooMessage message{};
  std::vector<int> peers;
  for (int peer = 0; peer < group.size(); ++peer) {
    if (peer == group.rank) continue;
    peers.push_back(peer);
    char bytes[LOCKSTEP_GLOO_MAX_ADDRESS];
    size_t length = 0;
    if (api_.address(context_, peer, bytes, &length, &message) != LOCKSTEP_GLOO_OK) {
      fail("has no address", message.text);
    }
    link.send(peer, GlooLink::Frame::kNote, {bytes, length});
  }
  const auto notes_of_all = [&] {
    auto gathered = link.gather(GlooLink::Frame::kNote, peers, deadline_ns);
    if (const auto* trouble = std::get_if<GlooLink::Trouble>(&gathered)) {
      const bool late = trouble->kind == GlooLink::Trouble::Kind::kLate;
      fail_rank(group, late ? trouble->missing.front() : trouble->place,
                late ? "did not come in time" : "ended");
    }
    return std::get<std::vector<std::string>>(std::move(gathered));
  };
  const std::vector<std::string> addresses = notes_of_all();
  for (size_t i = 0; i < peers.size(); ++i) {
    const std::string& theirs = addresses[i];
    if (api_.connect(context_, peers[i], theirs.data(), theirs.size(), &message) !=
        LOCKSTEP_GLOO_OK) {
      fail(fmt::format("cannot connect to rank {}",
                       group.world_ranks.at(static_cast<size_t>(peers[i]))),
           message.text);
    }
  }
  // Who leaves now would take its end of a connection from a slower rank that still makes it.
  link.send_all(GlooLink::Frame::kNote, "connected");
  notes_of_all();
}

}  // namespace lockstep
