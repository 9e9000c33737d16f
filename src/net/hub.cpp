#include "net/hub.hpp"

#include <fmt/format.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <limits>

#include "base/process.hpp"
#include "lockstep/clock.hpp"

namespace lockstep {
namespace {

constexpr int64_t kNever = std::numeric_limits<int64_t>::max();
constexpr int64_t kAcceptPauseNs = 100'000'000;
constexpr int64_t kLastWordsNs = 1'000'000'000;  // for a dropped peer to read the reason
constexpr int kReadsAtOnce = 16;                 // from one peer before the others get their turn
constexpr int kAcceptsAtOnce = 64;               // then accepted peers get a chance to authenticate
constexpr int kEventsAtOnce = 256;
constexpr uint32_t kRead = EPOLLIN;
constexpr uint32_t kWrite = EPOLLOUT;
constexpr uint32_t kEnded = static_cast<uint32_t>(EPOLLHUP) | static_cast<uint32_t>(EPOLLERR);
constexpr uint64_t kWakeName = 0;  // peers count from 1
constexpr uint64_t kListenerName = std::numeric_limits<uint64_t>::max();

// The rest of the descriptors that this process may open is for its own work.
size_t most_peers() {
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  const auto files = std::min<size_t>(static_cast<size_t>(limit.rlim_cur), 1 << 20);
  return std::max<size_t>({32, files / 2, files < 1024 ? 0 : files - 512});
}

}  // namespace

Hub::Hub(Socket listener, HubOptions options, HubHandler& handler, std::vector<Socket> adopted)
    : listener_(std::move(listener)),
      options_(std::move(options)),
      handler_(handler),
      port_(bound_port(listener_)),
      max_peers_(most_peers()),
      events_(::epoll_create1(EPOLL_CLOEXEC)),
      next_tick_ns_(options_.tick_ns > 0 ? monotonic_ns() + options_.tick_ns : kNever) {
  if (events_.get() < 0) {
    const int reason = errno;
    throw Error(Code::kRendezvous, fmt::format("cannot serve: {}", std::strerror(reason)),
                limit_help(reason, "check whether this machine is out of memory"));
  }
  watch(wake_.descriptor(), kWakeName, kRead, EPOLL_CTL_ADD);
  for (auto& socket : adopted) {
    add_peer({.id = ++last_id_,
              .socket = std::move(socket),
              .channel = Channel::plain(options_.max_payload),
              .address = "this host",
              .authenticated = true});
  }
  thread_ = start_quiet_thread([this] { run(); });
}

Hub::~Hub() {
  stop_ = true;
  wake_.raise();
  thread_.join();
}

void Hub::run() {
  while (!stop_) one_pass(kNever, true);
  if (options_.linger_ns > 0) linger();
}

// Input that arrived before the end is still delivered, and the output it causes is still written.
void Hub::linger() {
  const int64_t until_ns = monotonic_ns() + options_.linger_ns;
  wake_.clear();
  one_pass(monotonic_ns(), false);
  while (!peers_.empty() && monotonic_ns() < until_ns) {
    for (auto& [id, peer] : peers_) {
      if (!peer.authenticated) peer.gone = true;
      if (peer.channel.output().empty()) ::shutdown(peer.socket.get(), SHUT_WR);
    }
    one_pass(until_ns, false);
  }
}

int64_t Hub::next_wake_ns(int64_t latest_ns) const {
  int64_t next = std::min(latest_ns, next_tick_ns_);
  if (accept_again_ns_ != 0) next = std::min(next, accept_again_ns_);
  for (const PeerId id : timed_) {
    const Peer& peer = peers_.at(id);
    if (!peer.authenticated) next = std::min(next, peer.since_ns + kAuthenticationNs);
    if (!peer.why_closing.empty()) next = std::min(next, peer.close_by_ns);
  }
  return next;
}

void Hub::watch(int descriptor, uint64_t name, uint32_t events, int change) const {
  epoll_event event{};
  event.events = events;
  event.data.u64 = name;
  ::epoll_ctl(events_.get(), change, descriptor, &event);
}

void Hub::listen(bool on) {
  if (on == listening_) return;
  watch(listener_.get(), kListenerName, kRead, on ? EPOLL_CTL_ADD : EPOLL_CTL_DEL);
  listening_ = on;
}

void Hub::add_peer(Peer peer) {
  watch(peer.socket.get(), peer.id, kRead, EPOLL_CTL_ADD);
  if (peer.authenticated) {
    ++authenticated_;
  } else {
    timed_.insert(peer.id);
  }
  const PeerId id = peer.id;
  peers_.emplace(id, std::move(peer));
}

void Hub::one_pass(int64_t latest_ns, bool accepting) {
  const bool may_accept = monotonic_ns() >= accept_again_ns_;
  if (may_accept) accept_again_ns_ = 0;
  listen(accepting && may_accept);
  const int64_t next_ns = next_wake_ns(latest_ns);
  const int64_t left_ms = next_ns == kNever ? -1 : (next_ns - monotonic_ns() + 999'999) / 1'000'000;
  const int timeout_ms =
      next_ns == kNever ? -1 : static_cast<int>(std::clamp<int64_t>(left_ms, 0, 3'600'000));
  std::array<epoll_event, kEventsAtOnce> ready;
  const int count = ::epoll_wait(events_.get(), ready.data(), kEventsAtOnce, timeout_ms);
  bool connections = false;
  for (int i = 0; i < count; ++i) {
    const uint64_t name = ready[static_cast<size_t>(i)].data.u64;
    const uint32_t events = ready[static_cast<size_t>(i)].events;
    connections = connections || name == kListenerName;
    const auto found = peers_.find(name);
    if (found == peers_.end()) continue;  // the wake, or the listener
    if ((events & (kRead | kEnded)) != 0) read_from(found->second);
    if ((events & kWrite) != 0) write_to(found->second);
  }
  if (connections) accept_some();
  if (monotonic_ns() >= next_tick_ns_) {
    next_tick_ns_ = monotonic_ns() + options_.tick_ns;
    handler_.tick(*this);
  }
  drop_expired();
  remove_gone();
}

void Hub::accept_some() {
  for (int accepted = 0; accepted < kAcceptsAtOnce; ++accepted) {
    Socket socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket) {
      if (errno == EINTR || errno == ECONNABORTED) continue;
      if (errno != EAGAIN) accept_again_ns_ = monotonic_ns() + kAcceptPauseNs;
      return;
    }
    const bool plain = options_.token.empty();
    if (plain && !peer_is_this_user(socket)) {
      handler_.turned_away(*this, "this host", "another user");
      continue;
    }
    if (plain && full()) continue;
    make_room();
    set_no_delay(socket);
    std::string address = lockstep::peer_address(socket);
    add_peer({.id = ++last_id_,
              .socket = std::move(socket),
              .channel = plain ? Channel::plain(options_.max_payload)
                               : Channel::server(options_.token, options_.max_payload),
              .address = std::move(address),
              .since_ns = monotonic_ns(),
              .authenticated = plain});
  }
}

// Drops the unauthenticated peer that has had the most time to authenticate.
void Hub::make_room() {
  int unauthenticated = 0;
  Peer* oldest = nullptr;
  for (const PeerId id : timed_) {
    Peer& peer = peers_.at(id);
    if (peer.authenticated || peer.gone) continue;
    ++unauthenticated;
    if (oldest == nullptr) oldest = &peer;  // ids increase with time
  }
  if (unauthenticated >= kMaxUnauthenticated && oldest != nullptr)
    close_peer(*oldest, "too many unauthenticated connections", true);
}

void Hub::read_from(Peer& peer) {
  std::array<char, 1 << 14> buffer;
  for (int i = 0; i < kReadsAtOnce && !peer.gone; ++i) {
    const ssize_t count = ::recv(peer.socket.get(), buffer.data(), buffer.size(), 0);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && errno == EAGAIN) return;
    if (count <= 0) {
      close_peer(peer, count == 0 ? "it closed the connection" : std::strerror(errno), true);
      return;
    }
    if (!peer.why_closing.empty()) continue;  // being dropped: its input no longer counts
    try {
      peer.channel.feed({buffer.data(), static_cast<size_t>(count)});
      deliver(peer);
    } catch (const Error& error) {
      close_peer(peer, error.message(), false);
    } catch (const std::exception& error) {  // such as no memory for one peer's message
      close_peer(peer, error.what(), false);
    }
  }
}

void Hub::deliver(Peer& peer) {
  if (!peer.authenticated && peer.channel.ready()) {
    if (full()) {
      close_peer(peer, "too many connections", true);
      return;
    }
    peer.authenticated = true;
    ++authenticated_;
    if (peer.why_closing.empty()) timed_.erase(peer.id);
  }
  write_to(peer);
  while (auto payload = peer.channel.take()) {
    if (peer.gone || !peer.why_closing.empty()) return;
    handler_.received(*this, peer.id, *payload);
  }
}

void Hub::write_to(Peer& peer) {
  write_some(peer);
  const bool waits = !peer.gone && !peer.channel.output().empty();
  if (waits == peer.waits_to_write) return;
  watch(peer.socket.get(), peer.id, waits ? kRead | kWrite : kRead, EPOLL_CTL_MOD);
  peer.waits_to_write = waits;
}

void Hub::write_some(Peer& peer) {
  while (!peer.gone && !peer.channel.output().empty()) {
    const std::string_view output = peer.channel.output();
    const ssize_t count = ::send(peer.socket.get(), output.data(), output.size(), MSG_NOSIGNAL);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && errno == EAGAIN) break;
    if (count < 0) {
      // Input that it sent before it closed may still be unread; read_from finds the end.
      if (errno != EPIPE && errno != ECONNRESET) close_peer(peer, std::strerror(errno), true);
      peer.channel.wrote(output.size());
      return;
    }
    peer.channel.wrote(static_cast<size_t>(count));
  }
}

void Hub::close_peer(Peer& peer, const std::string& why, bool at_once) {
  if (peer.why_closing.empty()) {
    peer.why_closing = why;
    peer.close_by_ns = monotonic_ns() + kLastWordsNs;
    timed_.insert(peer.id);
  }
  peer.gone = peer.gone || at_once;
}

void Hub::drop_expired() {
  const int64_t now_ns = monotonic_ns();
  for (const PeerId id : timed_) {
    Peer& peer = peers_.at(id);
    if (!peer.authenticated && now_ns >= peer.since_ns + kAuthenticationNs)
      close_peer(peer, "not authenticated within 5 s", true);
    if (peer.why_closing.empty()) continue;
    write_to(peer);
    if (peer.channel.output().empty() || now_ns >= peer.close_by_ns) peer.gone = true;
  }
}

// The handler may send to or drop other peers meanwhile, so the search starts over.
void Hub::remove_gone() {
  for (bool found = true; found;) {
    found = false;
    for (const PeerId id : timed_) {
      if (!peers_.at(id).gone) continue;
      timed_.erase(id);
      auto node = peers_.extract(id);
      const Peer& peer = node.mapped();
      // Not left to close(): a forked process may still hold the same socket.
      watch(peer.socket.get(), id, 0, EPOLL_CTL_DEL);
      if (peer.authenticated) {
        --authenticated_;
        handler_.left(*this, id, peer.why_closing);
      } else {
        handler_.turned_away(*this, peer.address, peer.why_closing);
      }
      found = true;
      break;
    }
  }
}

void Hub::send(PeerId id, std::string_view payload) {
  const auto found = peers_.find(id);
  if (found == peers_.end() || found->second.gone || !found->second.why_closing.empty()) return;
  Peer& peer = found->second;
  if (peer.channel.output().size() > 4 * options_.max_payload) {
    close_peer(peer, "it does not read what it is sent", true);
    return;
  }
  peer.channel.send(payload);
  write_to(peer);
}

void Hub::drop(PeerId id, const std::string& why) {
  const auto found = peers_.find(id);
  if (found != peers_.end()) close_peer(found->second, why, false);
}

std::string Hub::peer_address(PeerId id) const {
  const auto found = peers_.find(id);
  return found == peers_.end() ? "" : found->second.address;
}

std::string Hub::own_address(PeerId id) const {
  const auto found = peers_.find(id);
  return found == peers_.end() ? "" : lockstep::own_address(found->second.socket);
}

}  // namespace lockstep
