#include "comm/gloo/gloo_link.hpp"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>

#include "base/running_clock.hpp"
#include "net/quiet_thread.hpp"

namespace lockstep {
namespace {

constexpr uint32_t kMaxFrameBytes = 1 << 20;
constexpr size_t kReadBytes = 1 << 14;
constexpr int64_t kEndedGraceNs = 500'000'000;

struct FrameHead {
  uint32_t payload_bytes = 0;
  uint32_t frame = 0;
};

std::string with_head(GlooLink::Frame frame, std::string_view payload) {
  const FrameHead head{static_cast<uint32_t>(payload.size()), static_cast<uint32_t>(frame)};
  std::string bytes(sizeof head + payload.size(), '\0');
  std::memcpy(bytes.data(), &head, sizeof head);
  std::copy(payload.begin(), payload.end(), bytes.begin() + sizeof head);
  return bytes;
}

// The buffer of a connection holds thousands of frames, and a rank is never more than one call
// ahead: where one does not fit, its peer is gone or no rank of ours.
void write_frame(const Socket& socket, std::string_view bytes) {
  if (socket) ::send(socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
}

}  // namespace

GlooLink::GlooLink(int rank, std::vector<Socket> sockets) : rank_(rank), peers_(sockets.size()) {
  for (size_t place = 0; place < sockets.size(); ++place) {
    peers_[place].socket = std::move(sockets[place]);
  }
  reader_ = start_quiet_thread([this] { read_all(); });
}

// A half-closed connection: what was said arrives, even where the peer's own words cross it.
GlooLink::~GlooLink() {
  say_farewell({});
  stop_.raise();
  reader_.join();
  for (Peer& peer : peers_) {
    if (peer.socket) ::shutdown(peer.socket.get(), SHUT_WR);
  }
}

void GlooLink::send(int to, Frame frame, std::string_view payload) {
  const std::string bytes = with_head(frame, payload);
  const std::lock_guard lock(send_mutex_);
  write_frame(peers_[static_cast<size_t>(to)].socket, bytes);
}

void GlooLink::send_all(Frame frame, std::string_view payload) {
  const std::string bytes = with_head(frame, payload);
  const std::lock_guard lock(send_mutex_);
  for (const Peer& peer : peers_) write_frame(peer.socket, bytes);
}

void GlooLink::say_farewell(const Farewell& farewell) {
  const std::string bytes = with_head(Frame::kFarewell, farewell.encode());
  const std::lock_guard send_lock(send_mutex_);
  if (farewell_said_) return;
  farewell_said_ = true;
  for (const Peer& peer : peers_) write_frame(peer.socket, bytes);
  // Whoever finds that it was said also finds what was said.
  const std::lock_guard lock(mutex_);
  own_farewell_ = farewell;
  changed_.notify_all();
}

bool GlooLink::has_cause(const Peer& peer) {
  return peer.farewell && peer.farewell->kind != Farewell::Kind::kLeft;
}

std::optional<GlooLink::Trouble> GlooLink::told() const {
  if (own_farewell_ && own_farewell_->kind == Farewell::Kind::kAborted) {
    return Trouble{Trouble::Kind::kTold, rank_, false, *own_farewell_, {}};
  }
  // A roll call names nobody: whoever knows more comes first.
  std::optional<Trouble> roll_call;
  for (size_t place = 0; place < peers_.size(); ++place) {
    if (!has_cause(peers_[place])) continue;
    Trouble trouble{
        Trouble::Kind::kTold, static_cast<int>(place), false, *peers_[place].farewell, {}};
    if (trouble.farewell.kind != Farewell::Kind::kStuck) return trouble;
    roll_call = std::move(trouble);
  }
  return roll_call;
}

std::optional<GlooLink::Trouble> GlooLink::ended(int place) const {
  const Peer& peer = peers_[static_cast<size_t>(place)];
  if (!peer.closed && !peer.farewell) return std::nullopt;
  return Trouble{Trouble::Kind::kGone, place, peer.farewell.has_value(), {}, {}};
}

bool GlooLink::wait(std::unique_lock<std::mutex>& lock, int64_t deadline_ns) {
  constexpr int64_t kLongestWaitNs = 3'600'000'000'000;  // no overflow where there is no deadline
  const int64_t left_ns = deadline_ns - running_ns();
  if (left_ns <= 0) return false;
  changed_.wait_for(lock, std::chrono::nanoseconds(std::min(left_ns, kLongestWaitNs)));
  return true;
}

std::variant<std::vector<std::string>, GlooLink::Trouble> GlooLink::gather(
    Frame frame, std::span<const int> peers, int64_t deadline_ns) {
  const auto queue = [&](int place) -> std::deque<std::string>& {
    return peers_[static_cast<size_t>(place)].frames[static_cast<size_t>(frame)];
  };
  std::unique_lock lock(mutex_);
  for (;;) {
    Trouble late;
    std::optional<Trouble> gone;
    for (const int place : peers) {
      if (!queue(place).empty()) continue;
      late.missing.push_back(place);
      if (!gone) gone = ended(place);
    }
    if (late.missing.empty()) {
      std::vector<std::string> taken;
      for (const int place : peers) {
        taken.push_back(std::move(queue(place).front()));
        queue(place).pop_front();
      }
      return taken;
    }
    if (auto trouble = told()) return *trouble;
    if (gone) return *gone;
    if (!wait(lock, deadline_ns)) return late;
  }
}

GlooLink::Trouble GlooLink::find_trouble(int64_t deadline_ns) {
  std::unique_lock lock(mutex_);
  for (;;) {
    if (auto trouble = told()) return *trouble;
    std::optional<Trouble> left;
    for (size_t place = 0; place < peers_.size(); ++place) {
      const auto gone = ended(static_cast<int>(place));
      if (gone && !gone->left) return *gone;
      if (gone && !left) left = gone;
    }
    if (left) return *left;
    if (!wait(lock, deadline_ns)) return {};
  }
}

void GlooLink::on_roll_call(std::function<RankActivity()> answer) {
  const std::lock_guard action_lock(action_mutex_);
  answer_ = std::move(answer);
}

bool GlooLink::all_have_spoken() const {
  for (size_t place = 0; place < peers_.size(); ++place) {
    const Peer& peer = peers_[place];
    if (static_cast<int>(place) != rank_ && !peer.closed && !peer.farewell) return false;
  }
  return true;
}

// For itself a rank has what it told the others, so that all judge by the same.
GlooLink::RollCall GlooLink::take_roll_call(int64_t deadline_ns) {
  std::unique_lock lock(mutex_);
  while (!all_have_spoken() && wait(lock, deadline_ns)) {
  }
  RollCall result;
  for (size_t place = 0; place < peers_.size(); ++place) {
    const Peer& peer = peers_[place];
    const auto& said = static_cast<int>(place) == rank_ ? own_farewell_ : peer.farewell;
    RankActivity activity;
    if (said && said->kind == Farewell::Kind::kStuck) {
      activity = said->activity();
      if (said->waited_ns > 0) {
        result.waited_ns = std::max(result.waited_ns, said->waited_ns);
        result.awaited.insert(result.awaited.end(), said->places.begin(), said->places.end());
        if (said->places.empty()) result.awaited.push_back(static_cast<int>(place));
      }
    } else if (static_cast<int>(place) != rank_) {
      activity.silent = !peer.closed && !said;
      activity.arrived = peer.calls;
      activity.finished = peer.calls - 1;
    }
    result.activities.push_back(std::move(activity));
  }
  return result;
}

int GlooLink::first_gone() {
  const std::lock_guard lock(mutex_);
  const auto gone = std::find_if(peers_.begin(), peers_.end(),
                                 [](const Peer& peer) { return peer.closed && !peer.farewell; });
  return gone == peers_.end() ? -1 : static_cast<int>(gone - peers_.begin());
}

void GlooLink::on_failure(std::function<void()> action) {
  const std::lock_guard action_lock(action_mutex_);
  on_failure_ = std::move(action);
  bool late = false;
  {
    const std::lock_guard lock(mutex_);
    late = std::any_of(peers_.begin(), peers_.end(), [](const Peer& peer) {
      return has_cause(peer) || (peer.closed && !peer.farewell);
    });
  }
  if (late && on_failure_) on_failure_();
}

void GlooLink::act_on_failure() {
  const std::lock_guard action_lock(action_mutex_);
  if (on_failure_) on_failure_();
}

void GlooLink::read_all() {
  for (;;) {
    std::vector<pollfd> waiting{{stop_.descriptor(), POLLIN, 0}};
    std::vector<Peer*> who;
    for (Peer& peer : peers_) {
      if (!peer.socket || peer.closed) continue;
      waiting.push_back({peer.socket.get(), POLLIN, 0});
      who.push_back(&peer);
    }
    int timeout_ms = -1;
    if (act_at_ns_ != 0) {
      timeout_ms = static_cast<int>(std::max<int64_t>(0, act_at_ns_ - running_ns()) / 1'000'000);
    }
    if (::poll(waiting.data(), waiting.size(), timeout_ms) < 0) continue;
    if (waiting[0].revents != 0) return;
    for (size_t i = 0; i < who.size(); ++i) {
      if (waiting[i + 1].revents != 0) read_from(*who[i]);
    }
    if (act_at_ns_ != 0 && running_ns() >= act_at_ns_) {
      act_at_ns_ = 0;
      act_on_failure();
    }
  }
}

void GlooLink::read_from(Peer& peer) {
  char bytes[kReadBytes];
  const ssize_t count = ::recv(peer.socket.get(), bytes, sizeof bytes, MSG_DONTWAIT);
  if (count < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (count > 0) {
    peer.input.append(bytes, static_cast<size_t>(count));
    take_frames(peer);
    return;
  }
  end(peer);
}

// Gloo forgets to wake who waits for the rest of a message whose sender has died: this does,
// after the time in which a rank that ended right after its last call may still be read from.
void GlooLink::end(Peer& peer) {
  const std::lock_guard lock(mutex_);
  peer.closed = true;
  changed_.notify_all();
  if (!peer.farewell && act_at_ns_ == 0) act_at_ns_ = running_ns() + kEndedGraceNs;
}

void GlooLink::take_frames(Peer& peer) {
  FrameHead head;
  while (peer.input.size() >= sizeof head) {
    std::memcpy(&head, peer.input.data(), sizeof head);
    if (head.payload_bytes > kMaxFrameBytes ||
        head.frame > static_cast<uint32_t>(Frame::kFarewell)) {
      return end(peer);  // no rank of ours talks so
    }
    if (peer.input.size() < sizeof head + head.payload_bytes) return;
    std::string payload = peer.input.substr(sizeof head, head.payload_bytes);
    peer.input.erase(0, sizeof head + head.payload_bytes);
    if (static_cast<Frame>(head.frame) == Frame::kFarewell) {
      hear_farewell(peer, payload);
      continue;
    }
    const std::lock_guard lock(mutex_);
    if (static_cast<Frame>(head.frame) == Frame::kCall) ++peer.calls;
    peer.frames[head.frame].push_back(std::move(payload));
    changed_.notify_all();
  }
}

void GlooLink::hear_farewell(Peer& peer, std::string_view payload) {
  Farewell farewell = Farewell::decode(payload).value_or(Farewell{});
  const Farewell::Kind kind = farewell.kind;
  {
    const std::lock_guard lock(mutex_);
    peer.farewell = std::move(farewell);
    changed_.notify_all();
  }
  if (kind == Farewell::Kind::kLeft) return;
  if (kind == Farewell::Kind::kStuck) {
    const std::lock_guard action_lock(action_mutex_);
    say_farewell(Farewell::of(answer_ ? answer_() : RankActivity{}));
  }
  act_on_failure();
}

}  // namespace lockstep
