#include <fmt/format.h>
#include <fmt/ranges.h>
#include <poll.h>
#include <sys/socket.h>
#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstring>

#include "base/counted.hpp"
#include "base/file.hpp"
#include "base/process.hpp"
#include "base/random.hpp"
#include "base/running_clock.hpp"
#include "comm/network/tcp_control.hpp"
#include "lockstep/error.hpp"
#include "lockstep/units.hpp"
#include "net/secret.hpp"

namespace lockstep {

namespace {

constexpr size_t kSecretBytes = 32;  // as hex digits
constexpr size_t kMaxUnauthenticated = 256;
constexpr uint32_t kHelloMagic = 0x6c736731;  // "lsg1"

// What fits goes at once, and not through the thread that reads.
constexpr int kSendRoom = 128 << 10;

// The first bytes on every connection. The secret is the listener's, from the store.
struct Hello {
  uint32_t magic = kHelloMagic;
  uint32_t call_bytes = sizeof(Fingerprint);  // another layout is another lockstep
  int32_t group_rank = 0;
  char secret[kSecretBytes] = {};
};

// Where a rank listens, as text in the store: "40123 <secret in hex> 10.0.0.7".
struct Listening {
  int port = 0;
  std::string secret;  // hex
  std::string host;

  std::string text() const { return fmt::format("{} {} {}", port, secret, host); }

  static Listening parse(const std::string& text) {
    Listening group_rank;
    const size_t first = text.find(' ');
    const size_t second = text.find(' ', first + 1);
    const auto parsed = std::from_chars(text.data(), text.data() + text.size(), group_rank.port);
    if (parsed.ec != std::errc() || second == std::string::npos) {
      throw Error(Code::kRendezvous, fmt::format("\"{}\" tells no rank's address", text),
                  "use one version of lockstep on all hosts");
    }
    group_rank.secret = text.substr(first + 1, second - first - 1);
    group_rank.host = text.substr(second + 1);
    return group_rank;
  }
};

std::string key_of(int group_rank) {
  return fmt::format("rank/{}", group_rank);
}

int poll_timeout_ms(int64_t deadline_ns) {
  const int64_t left_ms = (deadline_ns - running_ns() + 999'999) / 1'000'000;
  return static_cast<int>(std::clamp<int64_t>(left_ms, 0, 1000));
}

class Rendezvous {
 public:
  Rendezvous(Store& store, const Group& group, const std::string& address, int64_t deadline_ns)
      : store_(store),
        group_(group),
        deadline_ns_(deadline_ns),
        begun_ns_(running_ns()),
        listener_(listen_tcp({address, 0})),
        secret_(random_hex(kSecretBytes)) {
    result_.address = own_address(listener_);
    if (result_.address == "::" || result_.address == "0.0.0.0") {
      throw Error(Code::kBackend, fmt::format("ranks cannot listen at \"{}\"", address),
                  "give this host's address in digits");
    }
    result_.sockets.resize(static_cast<size_t>(group.size()));
  }

  TcpRendezvous run() {
    store_.set(key_of(group_.rank),
               Listening{bound_port(listener_), secret_, result_.address}.text());
    for (int group_rank = 0; group_rank < group_.rank; ++group_rank) connect_to(group_rank);
    accept_from_above();
    for (Socket& socket : result_.sockets) {
      if (!socket) continue;
      set_no_delay(socket);
      ::setsockopt(socket.get(), SOL_SOCKET, SO_SNDBUF, &kSendRoom, sizeof kSendRoom);
    }
    return std::move(result_);
  }

 private:
  // A connection that has not yet proved to be a rank's.
  struct UnauthenticatedPeer {
    Socket socket;
    std::string received;
  };

  void connect_to(int group_rank) {
    Listening there;
    try {
      there = Listening::parse(store_.get(key_of(group_rank), deadline_ns_));
    } catch (const Error& error) {
      if (running_ns() < deadline_ns_) throw;
      throw_missing({group_rank});
    }
    int error = 0;
    Socket socket = start_connect(resolve({there.host, there.port}).front(), error);
    while (error == EINPROGRESS) {
      pollfd waiting{socket.get(), POLLOUT, 0};
      const int ready = ::poll(&waiting, 1, poll_timeout_ms(deadline_ns_));
      if (ready > 0) {
        socklen_t bytes = sizeof error;
        ::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &bytes);
      } else if (running_ns() >= deadline_ns_) {
        error = ETIMEDOUT;
      }
    }
    Hello hello;
    hello.group_rank = group_.rank;
    std::copy_n(there.secret.begin(), std::min(there.secret.size(), kSecretBytes), hello.secret);
    if (error == 0 && ::send(socket.get(), &hello, sizeof hello, MSG_NOSIGNAL) != sizeof hello) {
      error = ECONNRESET;
    }
    if (error != 0) {
      throw RankError(Code::kRendezvous, world_rank(group_rank),
                      fmt::format("cannot connect to rank {} at {}: {}", world_rank(group_rank),
                                  endpoint_text(there.host, there.port), std::strerror(error)),
                      limit_help(error,
                                 "see whether that rank still runs, and whether a firewall stands "
                                 "between the hosts: ranks connect to each other at ports that the "
                                 "system chooses"));
    }
    result_.sockets[static_cast<size_t>(group_rank)] = std::move(socket);
  }

  void accept_from_above() {
    for (;;) {
      const std::vector<int> missing = missing_above();
      if (missing.empty()) return;
      if (running_ns() >= deadline_ns_) throw_missing(missing);
      std::vector<pollfd> waiting{{listener_.get(), POLLIN, 0}};
      for (const UnauthenticatedPeer& peer : unauthenticated_) {
        waiting.push_back({peer.socket.get(), POLLIN, 0});
      }
      if (::poll(waiting.data(), waiting.size(), poll_timeout_ms(deadline_ns_)) <= 0) continue;
      for (size_t i = unauthenticated_.size(); i > 0; --i) {
        if (waiting[i].revents != 0 && !listen_to(unauthenticated_[i - 1])) {
          unauthenticated_.erase(unauthenticated_.begin() + static_cast<std::ptrdiff_t>(i) - 1);
        }
      }
      if (waiting[0].revents != 0) accept_one();
    }
  }

  void accept_one() {
    Socket socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket && (errno == EMFILE || errno == ENFILE)) {
      const int error = errno;
      throw Error(Code::kRendezvous,
                  fmt::format("group {}: cannot accept a connection: {}", group_.name,
                              std::strerror(error)),
                  limit_help(error, ""));
    }
    if (!socket) return;
    if (unauthenticated_.size() == kMaxUnauthenticated)
      unauthenticated_.erase(unauthenticated_.begin());
    unauthenticated_.push_back({std::move(socket), ""});
  }

  // Returns whether the peer has more to say before it is admitted or rejected.
  bool listen_to(UnauthenticatedPeer& peer) {
    char bytes[sizeof(Hello)];
    const ssize_t count = ::recv(peer.socket.get(), bytes, sizeof(Hello) - peer.received.size(), 0);
    if (count < 0 && (errno == EAGAIN || errno == EINTR)) return true;
    if (count <= 0) return false;
    peer.received.append(bytes, static_cast<size_t>(count));
    if (peer.received.size() < sizeof(Hello)) return true;
    Hello hello;
    std::memcpy(&hello, peer.received.data(), sizeof hello);
    const bool known = hello.magic == kHelloMagic && hello.call_bytes == sizeof(Fingerprint) &&
                       equal_secrets({hello.secret, kSecretBytes}, secret_) &&
                       hello.group_rank > group_.rank && hello.group_rank < group_.size() &&
                       !result_.sockets[static_cast<size_t>(hello.group_rank)];
    if (known) result_.sockets[static_cast<size_t>(hello.group_rank)] = std::move(peer.socket);
    return false;
  }

  std::vector<int> missing_above() const {
    std::vector<int> missing;
    for (int group_rank = group_.rank + 1; group_rank < group_.size(); ++group_rank) {
      if (!result_.sockets[static_cast<size_t>(group_rank)]) missing.push_back(group_rank);
    }
    return missing;
  }

  int world_rank(int group_rank) const {
    return group_.world_ranks.at(static_cast<size_t>(group_rank));
  }

  [[noreturn]] void throw_missing(const std::vector<int>& group_ranks) const {
    std::vector<int> ranks;
    for (const int group_rank : group_ranks) ranks.push_back(world_rank(group_rank));
    throw RankError(
        Code::kRendezvous, ranks.front(),
        fmt::format("group {}: rank{} {} did not come within {}", group_.name,
                    ranks.size() == 1 ? "" : "s", fmt::join(ranks, ", "),
                    format_seconds(static_cast<double>(running_ns() - begun_ns_) * 1e-9)),
        "see whether all ranks were started and what the missing ones say; where they are only "
        "slow, give them more time with --timeout of `lockstep run` or LOCKSTEP_TIMEOUT_S");
  }

  Store& store_;
  const Group& group_;
  const int64_t deadline_ns_;
  const int64_t begun_ns_;
  Socket listener_;
  std::string secret_;
  TcpRendezvous result_;
  std::vector<UnauthenticatedPeer> unauthenticated_;
};

}  // namespace

TcpRendezvous rendezvous(Store& store, const Group& group, const std::string& address,
                         int64_t deadline_ns) {
  return Rendezvous(store, group, address, deadline_ns).run();
}

namespace {

constexpr uint32_t kMaxFrameBytes = 1 << 20;
constexpr size_t kReadBytes = 1 << 14;
constexpr int64_t kEndedGraceNs = 500'000'000;

// How long a rank that lives takes to answer a survey.
constexpr int64_t kSurveyNs = 1'000'000'000;

// How long a rank that ends waits for peers that have not yet read all it sent.
constexpr int64_t kFlushNs = 2'000'000'000;

constexpr std::string_view kEnded = "ended: its connection closed unexpectedly";

struct FrameHead {
  uint32_t payload_bytes = 0;
  uint32_t frame = 0;
};

// The fixed part of an encoded stall; the awaited ranks and the waiting calls follow it.
struct StallHead {
  int64_t waited_ns = 0;
  int64_t arrived = 0;
  int64_t finished = 0;
  uint32_t awaited = 0;
  uint32_t waiting = 0;
};

std::string with_head(TcpControl::Frame frame, std::string_view payload) {
  const FrameHead head{static_cast<uint32_t>(payload.size()), static_cast<uint32_t>(frame)};
  std::string bytes(sizeof head + payload.size(), '\0');
  std::memcpy(bytes.data(), &head, sizeof head);
  std::copy(payload.begin(), payload.end(), bytes.begin() + sizeof head);
  return bytes;
}

}  // namespace

TcpControl::TcpControl(int rank, std::vector<Socket> sockets)
    : rank_(rank), peers_(sockets.size()) {
  for (size_t group_rank = 0; group_rank < sockets.size(); ++group_rank) {
    peers_[group_rank].socket = std::move(sockets[group_rank]);
  }
  reader_ = start_quiet_thread([this] { read_all(); });
}

// Half-closes the connections: what was sent still arrives, even if the peer sends meanwhile.
TcpControl::~TcpControl() {
  leave();
  stopping_ = true;
  wake_.raise();
  reader_.join();
  for (Peer& peer : peers_) {
    if (peer.socket) ::shutdown(peer.socket.get(), SHUT_WR);
  }
}

std::string TcpControl::FinalNotice::encode() const {
  std::string bytes(1, static_cast<char>(kind));
  if (kind == Kind::kAborted) return bytes + record.encode();
  if (kind == Kind::kLeft) return bytes;
  const StallHead head{.waited_ns = waited_ns,
                       .arrived = activity.arrived,
                       .finished = activity.finished,
                       .awaited = static_cast<uint32_t>(awaited.size()),
                       .waiting = static_cast<uint32_t>(activity.waiting.size())};
  const auto append = [&](const auto& item) {
    bytes.append(reinterpret_cast<const char*>(&item), sizeof item);
  };
  append(head);
  for (const int32_t group_rank : awaited) append(group_rank);
  for (const auto& waiting : activity.waiting) {
    append(waiting.call);
    append(waiting.peer);
  }
  return bytes;
}

// Bytes that make no sense are those of a rank that leaves: nothing is known about why.
TcpControl::FinalNotice TcpControl::FinalNotice::decode(std::string_view bytes) {
  FinalNotice notice;
  if (bytes.empty()) return notice;
  const auto kind = static_cast<Kind>(bytes[0]);
  bytes.remove_prefix(1);
  if (kind == Kind::kAborted) {
    auto record = AbortRecord::decode(bytes);
    if (!record) return notice;
    notice.record = std::move(*record);
    notice.kind = kind;
    return notice;
  }
  const auto take = [&](auto& item) {
    if (bytes.size() < sizeof item) return false;
    std::memcpy(&item, bytes.data(), sizeof item);
    bytes.remove_prefix(sizeof item);
    return true;
  };
  StallHead head;
  if (kind != Kind::kStalled || !take(head)) return notice;
  for (uint32_t i = 0; i < head.awaited; ++i) {
    int32_t group_rank = 0;
    if (!take(group_rank)) return notice;
    notice.awaited.push_back(group_rank);
  }
  for (uint32_t i = 0; i < head.waiting; ++i) {
    RankActivity::Waiting waiting;
    if (!take(waiting.call) || !take(waiting.peer)) return notice;
    notice.activity.waiting.push_back(waiting);
  }
  notice.kind = kind;
  notice.waited_ns = head.waited_ns;
  notice.activity.arrived = head.arrived;
  notice.activity.finished = head.finished;
  return notice;
}

void TcpControl::send(int to, Frame frame, std::string_view payload) {
  const std::string bytes = with_head(frame, payload);
  const std::lock_guard lock(send_mutex_);
  write(peers_[static_cast<size_t>(to)], bytes);
}

void TcpControl::send_all(Frame frame, std::string_view payload) {
  const std::string bytes = with_head(frame, payload);
  const std::lock_guard lock(send_mutex_);
  for (Peer& peer : peers_) write(peer, bytes);
}

// Under send_mutex_. A peer that lives reads all the time, so that little is ever left; what is
// left goes in the thread that reads. What a peer that is gone does not take is dropped: its end is
// noticed when somebody waits for it.
void TcpControl::write(Peer& peer, std::string_view bytes) {
  if (!peer.socket) return;
  if (!peer.unsent.empty()) {
    peer.unsent += bytes;
    return;
  }
  peer.unsent = bytes.substr(write_some(peer, bytes));
  if (peer.unsent.empty()) return;
  has_unsent_ = true;
  wake_.raise();
}

// Returns how many bytes need not be sent again.
size_t TcpControl::write_some(const Peer& peer, std::string_view bytes) {
  const ssize_t count =
      ::send(peer.socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  if (count >= 0) return static_cast<size_t>(count);
  return errno == EAGAIN || errno == EINTR ? 0 : bytes.size();
}

void TcpControl::publish(const AbortRecord& record) {
  send_notice({.kind = FinalNotice::Kind::kAborted, .record = record});
}

void TcpControl::send_notice(const FinalNotice& notice) {
  const std::string bytes = with_head(Frame::kFinalNotice, notice.encode());
  const std::lock_guard send_lock(send_mutex_);
  if (notice_sent_) return;
  notice_sent_ = true;
  for (Peer& peer : peers_) write(peer, bytes);
  // A thread that finds the notice sent also finds what was sent.
  const std::lock_guard lock(mutex_);
  own_notice_ = notice;
  changed_.notify_all();
}

bool TcpControl::has_cause(const Peer& peer) {
  return peer.notice && peer.notice->kind != FinalNotice::Kind::kLeft;
}

std::optional<TcpControl::Trouble> TcpControl::reported() const {
  if (own_notice_ && own_notice_->kind == FinalNotice::Kind::kAborted) {
    return Trouble{.kind = Trouble::Kind::kAborted, .rank = rank_, .record = own_notice_->record};
  }
  // A stall names no rank: a notice that knows more comes first.
  std::optional<Trouble> stalled;
  for (size_t group_rank = 0; group_rank < peers_.size(); ++group_rank) {
    if (!has_cause(peers_[group_rank])) continue;
    const FinalNotice& notice = *peers_[group_rank].notice;
    const int rank = static_cast<int>(group_rank);
    if (notice.kind == FinalNotice::Kind::kAborted) {
      return Trouble{.kind = Trouble::Kind::kAborted, .rank = rank, .record = notice.record};
    }
    stalled = Trouble{.kind = Trouble::Kind::kStalled, .rank = rank};
  }
  return stalled;
}

std::optional<TcpControl::Trouble> TcpControl::ended(int group_rank) const {
  const Peer& peer = peers_[static_cast<size_t>(group_rank)];
  if (!peer.closed && !peer.notice) return std::nullopt;
  return Trouble{.kind = Trouble::Kind::kGone, .rank = group_rank, .left = peer.notice.has_value()};
}

bool TcpControl::wait(std::unique_lock<std::mutex>& lock, int64_t deadline_ns) {
  constexpr int64_t kLongestWaitNs = 3'600'000'000'000;  // no overflow if there is no deadline
  const int64_t left_ns = deadline_ns - running_ns();
  if (left_ns <= 0) return false;
  changed_.wait_for(lock, std::chrono::nanoseconds(std::min(left_ns, kLongestWaitNs)));
  return true;
}

std::variant<std::vector<std::string>, TcpControl::Trouble> TcpControl::gather(
    Frame frame, std::span<const int> peers, int64_t deadline_ns) {
  const auto queue = [&](int group_rank) -> std::deque<std::string>& {
    return peers_[static_cast<size_t>(group_rank)].frames[static_cast<size_t>(frame)];
  };
  std::unique_lock lock(mutex_);
  for (;;) {
    Trouble late;
    std::optional<Trouble> gone;
    for (const int group_rank : peers) {
      if (!queue(group_rank).empty()) continue;
      late.missing.push_back(group_rank);
      if (!gone) gone = ended(group_rank);
    }
    if (late.missing.empty()) {
      std::vector<std::string> taken;
      for (const int group_rank : peers) {
        taken.push_back(std::move(queue(group_rank).front()));
        queue(group_rank).pop_front();
      }
      return taken;
    }
    if (auto trouble = reported()) return *trouble;
    if (gone) return *gone;
    if (!wait(lock, deadline_ns)) return late;
  }
}

TcpControl::Trouble TcpControl::find_trouble(int64_t deadline_ns) {
  std::unique_lock lock(mutex_);
  for (;;) {
    if (auto trouble = reported()) return *trouble;
    std::optional<Trouble> left;
    for (size_t group_rank = 0; group_rank < peers_.size(); ++group_rank) {
      const auto gone = ended(static_cast<int>(group_rank));
      if (gone && !gone->left) return *gone;
      if (gone && !left) left = gone;
    }
    if (left) return *left;
    if (!wait(lock, deadline_ns)) return {};
  }
}

void TcpControl::on_survey(std::function<RankActivity()> answer) {
  const std::lock_guard action_lock(action_mutex_);
  answer_ = std::move(answer);
}

bool TcpControl::all_have_answered() const {
  for (size_t group_rank = 0; group_rank < peers_.size(); ++group_rank) {
    const Peer& peer = peers_[group_rank];
    if (static_cast<int>(group_rank) != rank_ && !peer.closed && !peer.notice) return false;
  }
  return true;
}

// A rank that lives has answered, or answers now, with what it does. For itself a rank takes what
// it reported to the others, so that all judge by the same answers.
StallReport TcpControl::survey(const StalledCall& own) {
  FinalNotice notice{.kind = FinalNotice::Kind::kStalled, .waited_ns = own.waited_ns};
  notice.awaited.assign(own.awaited.begin(), own.awaited.end());
  {
    const std::lock_guard action_lock(action_mutex_);
    if (answer_) notice.activity = answer_();
  }
  send_notice(notice);
  const int64_t deadline_ns = running_ns() + kSurveyNs;
  std::unique_lock lock(mutex_);
  while (!all_have_answered() && wait(lock, deadline_ns)) {
  }
  StallReport report;
  for (size_t group_rank = 0; group_rank < peers_.size(); ++group_rank) {
    const Peer& peer = peers_[group_rank];
    const int rank = static_cast<int>(group_rank);
    const auto& notice = rank == rank_ ? own_notice_ : peer.notice;
    RankActivity activity;
    if (notice && notice->kind == FinalNotice::Kind::kStalled) {
      activity = notice->activity;
      if (notice->waited_ns > 0) {
        report.waited_ns = std::max(report.waited_ns, notice->waited_ns);
        report.awaited.insert(report.awaited.end(), notice->awaited.begin(), notice->awaited.end());
        if (notice->awaited.empty()) report.awaited.push_back(rank);
      }
    } else if (rank != rank_) {
      activity.silent = !peer.closed && !notice;
      activity.arrived = peer.calls;
      activity.finished = peer.calls - 1;
    }
    activity.state =
        fmt::format("it {}; it has begun {}", activity.silent ? "does not answer" : "is alive",
                    counted(activity.arrived, "collective"));
    report.activities.push_back(std::move(activity));
    if (peer.closed && !peer.notice && !report.cause) {
      report.cause = AbortRecord{.by = rank_, .blamed = rank, .text = std::string(kEnded)};
    }
  }
  const auto trouble = reported();
  if (!report.cause && trouble && trouble->kind == Trouble::Kind::kAborted) {
    report.cause = trouble->record;
  }
  return report;
}

void TcpControl::on_failure(std::function<void()> action) {
  const std::lock_guard action_lock(action_mutex_);
  on_failure_ = std::move(action);
  bool late = false;
  {
    const std::lock_guard lock(mutex_);
    late = std::any_of(peers_.begin(), peers_.end(), [](const Peer& peer) {
      return has_cause(peer) || (peer.closed && !peer.notice);
    });
  }
  if (late && on_failure_) on_failure_();
}

void TcpControl::act_on_failure() {
  const std::lock_guard action_lock(action_mutex_);
  if (on_failure_) on_failure_();
}

// [group rank]: events to poll its socket for.
std::vector<short> TcpControl::awaited_events() {
  std::vector<short> events;
  for (const Peer& peer : peers_) {
    events.push_back(static_cast<short>(peer.socket && !peer.closed ? POLLIN : 0));
  }
  if (!has_unsent_) return events;
  const std::lock_guard lock(send_mutex_);
  bool unsent = false;
  for (size_t i = 0; i < peers_.size(); ++i) {
    if (peers_[i].unsent.empty()) continue;
    events[i] = static_cast<short>(events[i] | POLLOUT);
    unsent = true;
  }
  has_unsent_ = unsent;
  return events;
}

void TcpControl::read_all() {
  int64_t end_at_ns = 0;  // of a rank that ends
  for (;;) {
    if (stopping_ && end_at_ns == 0) end_at_ns = running_ns() + kFlushNs;
    const std::vector<short> events = awaited_events();
    if (end_at_ns != 0 && (!has_unsent_ || running_ns() >= end_at_ns)) return;
    std::vector<pollfd> waiting{{wake_.descriptor(), POLLIN, 0}};
    std::vector<Peer*> polled;
    for (size_t i = 0; i < peers_.size(); ++i) {
      if (events[i] == 0) continue;
      waiting.push_back({peers_[i].socket.get(), events[i], 0});
      polled.push_back(&peers_[i]);
    }
    int timeout_ms = -1;
    for (const int64_t at_ns : {act_at_ns_, end_at_ns}) {
      if (at_ns == 0) continue;
      const int64_t left_ms = std::max<int64_t>(0, at_ns - running_ns()) / 1'000'000;
      timeout_ms = timeout_ms < 0 ? static_cast<int>(left_ms)
                                  : std::min(timeout_ms, static_cast<int>(left_ms));
    }
    if (::poll(waiting.data(), waiting.size(), timeout_ms) < 0) continue;
    if (waiting[0].revents != 0) wake_.clear();
    for (size_t i = 0; i < polled.size(); ++i) {
      const short came = waiting[i + 1].revents;
      if ((came & POLLOUT) != 0 || (came != 0 && polled[i]->closed)) write_unsent(*polled[i]);
      if ((came & ~POLLOUT) != 0 && !polled[i]->closed) read_from(*polled[i]);
    }
    if (std::exchange(has_frames_, false)) changed_.notify_all();
    if (act_at_ns_ != 0 && running_ns() >= act_at_ns_) {
      act_at_ns_ = 0;
      act_on_failure();
    }
  }
}

void TcpControl::write_unsent(Peer& peer) {
  const std::lock_guard lock(send_mutex_);
  peer.unsent.erase(0, write_some(peer, peer.unsent));
}

void TcpControl::read_from(Peer& peer) {
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

// Gloo does not wake a thread that waits for the rest of a message whose sender has died. This
// does, after a grace period in which data of a rank that ended right after its last call still
// arrives.
void TcpControl::end(Peer& peer) {
  const std::lock_guard lock(mutex_);
  peer.closed = true;
  changed_.notify_all();
  if (!peer.notice && act_at_ns_ == 0) act_at_ns_ = running_ns() + kEndedGraceNs;
}

void TcpControl::take_frames(Peer& peer) {
  FrameHead head;
  while (peer.input.size() >= sizeof head) {
    std::memcpy(&head, peer.input.data(), sizeof head);
    if (head.payload_bytes > kMaxFrameBytes ||
        head.frame > static_cast<uint32_t>(Frame::kFinalNotice)) {
      return end(peer);  // not a lockstep rank
    }
    if (peer.input.size() < sizeof head + head.payload_bytes) return;
    std::string payload = peer.input.substr(sizeof head, head.payload_bytes);
    peer.input.erase(0, sizeof head + head.payload_bytes);
    if (static_cast<Frame>(head.frame) == Frame::kFinalNotice) {
      receive_notice(peer, payload);
      continue;
    }
    const std::lock_guard lock(mutex_);
    if (static_cast<Frame>(head.frame) == Frame::kFingerprint) ++peer.calls;
    peer.frames[head.frame].push_back(std::move(payload));
    has_frames_ = true;
  }
}

void TcpControl::receive_notice(Peer& peer, std::string_view payload) {
  const FinalNotice notice = FinalNotice::decode(payload);
  {
    const std::lock_guard lock(mutex_);
    peer.notice = notice;
    changed_.notify_all();
  }
  if (notice.kind == FinalNotice::Kind::kLeft) return;
  if (notice.kind == FinalNotice::Kind::kStalled) {
    const std::lock_guard action_lock(action_mutex_);
    send_notice(
        {.kind = FinalNotice::Kind::kStalled, .activity = answer_ ? answer_() : RankActivity{}});
  }
  act_on_failure();
}

}  // namespace lockstep
