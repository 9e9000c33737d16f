#include <fmt/format.h>
#include <fmt/ranges.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>
#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>

#include "base/running_clock.hpp"
#include "comm/shm/shm_control.hpp"
#include "comm/shm/shm_rendezvous.hpp"
#include "lockstep/error.hpp"
#include "lockstep/units.hpp"

namespace lockstep {

namespace {

constexpr uint32_t kMagic = 0x6b6c7331;  // "1slk"
constexpr size_t kNumbers = kShmRanks;
constexpr size_t kTextBytes = 2048;
constexpr size_t kDescriptors = kShmRanks + 1;

struct DatagramHeader {
  uint32_t magic;
  MessageKind kind;
  uint32_t number_count;
  uint32_t text_bytes;
};

// What is sent: the header, the numbers, the text.
struct Datagram {
  DatagramHeader header;
  char body[kNumbers * sizeof(int64_t) + kTextBytes];

  size_t number_bytes() const { return header.number_count * sizeof(int64_t); }
  size_t bytes() const { return sizeof header + number_bytes() + header.text_bytes; }
};

// sendmsg's room for descriptors.
union Ancillary {
  cmsghdr aligned;
  char bytes[CMSG_SPACE(sizeof(int) * kDescriptors)];
};

[[noreturn]] void fail_socket(const std::string& what) {
  throw Error(Code::kRendezvous, fmt::format("cannot {}: {}", what, std::strerror(errno)),
              "check the limit of open files (ulimit -n)");
}

OwnedDescriptor own(int fd) {
  return std::make_unique<Descriptor>(fd);
}

OwnedDescriptor make_socket() {
  auto socket = own(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (socket->get() < 0) fail_socket("make a Unix socket");
  return socket;
}

struct Address {
  sockaddr_un name{};
  socklen_t bytes = 0;
};

Address address_of(const std::string& name) {
  Address address;
  address.name.sun_family = AF_UNIX;  // sun_path[0] stays 0: an abstract name
  name.copy(address.name.sun_path + 1, sizeof address.name.sun_path - 1);
  address.bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

std::vector<OwnedDescriptor> take_descriptors(msghdr& header) {
  std::vector<OwnedDescriptor> descriptors;
  for (cmsghdr* part = CMSG_FIRSTHDR(&header); part != nullptr; part = CMSG_NXTHDR(&header, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(part) + i * sizeof fd, sizeof fd);
      descriptors.push_back(own(fd));
    }
  }
  return descriptors;
}

bool well_formed(const Datagram& datagram, size_t bytes) {
  const DatagramHeader& header = datagram.header;
  return bytes >= sizeof header && header.magic == kMagic && header.kind <= MessageKind::kGaveUp &&
         header.number_count <= kNumbers && header.text_bytes <= kTextBytes &&
         bytes == datagram.bytes();
}

}  // namespace

std::pair<OwnedDescriptor, OwnedDescriptor> make_socket_pair() {
  std::array<int, 2> ends{};
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends.data()) != 0) {
    fail_socket("make a pair of Unix sockets");
  }
  return {own(ends[0]), own(ends[1])};
}

bool send_message(int socket, MessageKind kind, const std::vector<int64_t>& numbers,
                  const std::string& text, const std::vector<int>& descriptors) {
  Datagram datagram;
  datagram.header = {.magic = kMagic,
                     .kind = kind,
                     .number_count = static_cast<uint32_t>(std::min(numbers.size(), kNumbers)),
                     .text_bytes = static_cast<uint32_t>(std::min(text.size(), kTextBytes))};
  if (!numbers.empty()) std::memcpy(datagram.body, numbers.data(), datagram.number_bytes());
  text.copy(datagram.body + datagram.number_bytes(), datagram.header.text_bytes);
  iovec part{.iov_base = &datagram, .iov_len = datagram.bytes()};
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  Ancillary ancillary{};
  if (!descriptors.empty()) {
    const size_t bytes = descriptors.size() * sizeof(int);
    header.msg_control = ancillary.bytes;
    header.msg_controllen = CMSG_SPACE(bytes);
    cmsghdr* rights = CMSG_FIRSTHDR(&header);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(bytes);
    std::memcpy(CMSG_DATA(rights), descriptors.data(), bytes);
  }
  ssize_t sent = 0;
  do {
    sent = ::sendmsg(socket, &header, MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
  if (sent >= 0) return true;
  if (errno == EPIPE || errno == ECONNRESET || errno == ENOTCONN || errno == EAGAIN) return false;
  fail_socket("send to another rank");
}

Received receive_message(int socket, SocketMessage& message) {
  Datagram datagram;
  iovec part{.iov_base = &datagram, .iov_len = sizeof datagram};
  Ancillary ancillary{};
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  header.msg_control = ancillary.bytes;
  header.msg_controllen = sizeof ancillary.bytes;
  ssize_t bytes = 0;
  do {
    bytes = ::recvmsg(socket, &header, MSG_CMSG_CLOEXEC);
  } while (bytes < 0 && errno == EINTR);
  if (bytes < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return Received::kNothing;
  if (bytes <= 0) return Received::kClosed;
  message.descriptors = take_descriptors(header);
  if (!well_formed(datagram, static_cast<size_t>(bytes)) || (header.msg_flags & MSG_CTRUNC) != 0)
    return Received::kRubbish;
  message.kind = datagram.header.kind;
  message.numbers.resize(datagram.header.number_count);
  if (!message.numbers.empty()) {
    std::memcpy(message.numbers.data(), datagram.body, datagram.number_bytes());
  }
  message.text.assign(datagram.body + datagram.number_bytes(), datagram.header.text_bytes);
  return Received::kMessage;
}

std::string socket_name(const std::string& session) {
  std::string name = fmt::format("lockstep-{}-{}", ::geteuid(), session);
  constexpr size_t kLongest = sizeof(sockaddr_un::sun_path) - 1;
  if (name.size() <= kLongest) return name;
  uint64_t hash = 0xcbf29ce484222325;  // FNV-1a, over all of it
  for (const char letter : name) {
    hash = (hash ^ static_cast<unsigned char>(letter)) * 0x100000001b3;
  }
  return fmt::format("{}~{:016x}", name.substr(0, kLongest - 17), hash);
}

OwnedDescriptor listen_at(const std::string& name) {
  auto socket = make_socket();
  const Address address = address_of(name);
  const auto* generic = reinterpret_cast<const sockaddr*>(&address.name);
  if (::bind(socket->get(), generic, address.bytes) != 0) {
    if (errno == EADDRINUSE) return nullptr;
    fail_socket("bind a Unix socket");
  }
  if (::listen(socket->get(), kShmRanks) != 0) fail_socket("listen on a Unix socket");
  return socket;
}

OwnedDescriptor connect_to(const std::string& name) {
  auto socket = make_socket();
  const Address address = address_of(name);
  const auto* generic = reinterpret_cast<const sockaddr*>(&address.name);
  if (::connect(socket->get(), generic, address.bytes) == 0) return socket;
  if (errno == ECONNREFUSED || errno == EAGAIN || errno == EINTR) return nullptr;
  fail_socket("connect to rank 0");
}

OwnedDescriptor accept_from(int listener) {
  const int fd = ::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
  if (fd < 0) return nullptr;
  return own(fd);
}

std::optional<pid_t> peer_process(int socket) {
  ucred peer{};
  socklen_t bytes = sizeof peer;
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) != 0) return std::nullopt;
  if (peer.uid != ::geteuid()) return std::nullopt;
  return peer.pid;
}

void wait_readable(const std::vector<int>& sockets, int64_t deadline_ns) {
  std::vector<pollfd> watched;
  watched.reserve(sockets.size());
  for (const int socket : sockets)
    watched.push_back({.fd = socket, .events = POLLIN, .revents = 0});
  const int64_t left_ms = (deadline_ns - running_ns()) / 1'000'000 + 1;
  ::poll(watched.data(), watched.size(), static_cast<int>(std::clamp<int64_t>(left_ms, 0, 60'000)));
}

namespace {

constexpr int64_t kAnnounceNs = 50'000'000;  // between two lists of the present ranks

constexpr const char* kHelp =
    "start all ranks of the job within the deadline, with one session and one world size; "
    "`lockstep run` does that";

[[noreturn]] void fail_rendezvous(const std::string& message) {
  throw Error(Code::kRendezvous, message, kHelp);
}

// The launcher follows `blamed`: the rank that is at fault, and not one of those that waited for
// it.
[[noreturn]] void fail_rendezvous_of(int64_t blamed, const std::string& message,
                                     std::vector<std::string> notes = {}) {
  throw RankError(Code::kRendezvous, static_cast<int>(blamed), message, kHelp, std::move(notes));
}

bool holds(const std::vector<int64_t>& ranks, int64_t rank) {
  return std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
}

std::vector<int64_t> missing_beside(const std::vector<int64_t>& present, int64_t size) {
  std::vector<int64_t> missing;
  for (int64_t rank = 0; rank < size; ++rank) {
    if (!holds(present, rank)) missing.push_back(rank);
  }
  return missing;
}

[[noreturn]] void fail_held_by_another_user(const std::string& session) {
  throw Error(Code::kRendezvous,
              fmt::format("another user's process holds the socket of session {}", session),
              "set LOCKSTEP_TOKEN to a secret of your own for all ranks, or start them with "
              "`lockstep run`: other users cannot foresee the socket's name then");
}

std::string who_came(const std::vector<int64_t>& present, int64_t size) {
  return fmt::format("rank{} {} came, missing: {}", present.size() == 1 ? "" : "s",
                     fmt::join(present, ", "), fmt::join(missing_beside(present, size), ", "));
}

// Rank 0's side: takes connections until everybody is there.
class Host {
 public:
  explicit Host(const ShmOptions& options)
      : options_(options),
        begun_ns_(running_ns()),
        members_(static_cast<size_t>(options.size)),
        pids_(static_cast<size_t>(options.size), 0) {
    listener_ = listen_at(socket_name(options.session));
    if (listener_ == nullptr) {
      const auto holder = connect_to(socket_name(options.session));
      if (holder && !peer_process(holder->get())) fail_held_by_another_user(options.session);
      fail_rendezvous(fmt::format("somebody is rank 0 of session {} already", options.session));
    }
    pids_[0] = ::getpid();
  }

  ShmMembership run() {
    while (static_cast<int>(present().size()) < options_.size) {
      if (running_ns() >= options_.deadline_ns) give_up();
      wait_readable(watched(), unannounced_ ? std::min(announce_at_ns_, options_.deadline_ns)
                                            : options_.deadline_ns);
      while (auto connection = accept_from(listener_->get())) {
        // Another user's process is not even answered.
        if (peer_process(connection->get())) unauthenticated_.push_back(std::move(connection));
      }
      read_unauthenticated();
      read_members();
      announce_members();
    }
    return welcome();
  }

 private:
  std::vector<int64_t> present() const {
    std::vector<int64_t> ranks = {0};
    for (size_t rank = 1; rank < members_.size(); ++rank) {
      if (members_[rank]) ranks.push_back(static_cast<int64_t>(rank));
    }
    return ranks;
  }

  std::vector<int> watched() const {
    std::vector<int> sockets = {listener_->get()};
    for (const auto& peer : unauthenticated_) sockets.push_back(peer->get());
    for (const auto& member : members_) {
      if (member) sockets.push_back(member->get());
    }
    return sockets;
  }

  // Reads from connections that are not authenticated yet.
  void read_unauthenticated() {
    std::vector<OwnedDescriptor> silent;
    for (auto& peer : unauthenticated_) {
      SocketMessage message;
      const Received received = receive_message(peer->get(), message);
      if (received == Received::kNothing) {
        silent.push_back(std::move(peer));
      } else if (received == Received::kMessage && message.kind == MessageKind::kHello &&
                 message.numbers.size() == 3) {
        admit(std::move(peer), message.numbers);
      }
    }
    unauthenticated_ = std::move(silent);
  }

  // hello: [rank, size, layout version].
  void admit(OwnedDescriptor connection, const std::vector<int64_t>& hello) {
    const int64_t rank = hello[0];
    std::string reason;
    if (hello[2] != kShmLayoutVersion) {
      reason = fmt::format("rank {} uses layout {} of lockstep's shared memory, rank 0 uses {}",
                           rank, hello[2], kShmLayoutVersion);
    } else if (hello[1] != options_.size) {
      reason = fmt::format("rank {} came with world size {}, rank 0 has {}", rank, hello[1],
                           options_.size);
    } else if (rank < 1 || rank >= options_.size) {
      reason = fmt::format("there is no rank {} in a world of {}", rank, options_.size);
    } else if (members_[static_cast<size_t>(rank)]) {
      reason = fmt::format("rank {} is here already: process {}", rank,
                           pids_[static_cast<size_t>(rank)]);
    }
    if (!reason.empty()) {
      send_message(connection->get(), MessageKind::kRefused, {}, reason);
      if (refused_.size() < 4) refused_.push_back("refused: " + reason);
      return;
    }
    pids_[static_cast<size_t>(rank)] = peer_process(connection->get()).value_or(0);
    auto& member = members_[static_cast<size_t>(rank)];
    member = std::move(connection);
    send_message(member->get(), MessageKind::kPresent, present(), "");
    unannounced_ = true;
  }

  // Telling all members of every newcomer would take as many messages as there are pairs of ranks.
  // The list only serves to name the missing ranks at a member's deadline.
  void announce_members() {
    if (!unannounced_ || running_ns() < announce_at_ns_) return;
    tell(MessageKind::kPresent, present(), "");
    unannounced_ = false;
    announce_at_ns_ = running_ns() + kAnnounceNs;
  }

  void read_members() {
    for (size_t rank = 1; rank < members_.size(); ++rank) {
      if (!members_[rank]) continue;
      SocketMessage message;
      const Received received = receive_message(members_[rank]->get(), message);
      if (received == Received::kNothing) continue;
      const std::string who = fmt::format("rank {} (process {})", rank, pids_[rank]);
      if (received == Received::kMessage && message.kind == MessageKind::kGaveUp) {
        fail_missing(fmt::format("{} gave up before the rendezvous was complete", who));
      }
      members_[rank].reset();
      fail_all(static_cast<int64_t>(rank), who + " ended before the rendezvous was complete", {});
    }
  }

  void tell(MessageKind kind, const std::vector<int64_t>& numbers, const std::string& text) {
    for (const auto& member : members_) {
      if (member) send_message(member->get(), kind, numbers, text);
    }
  }

  [[noreturn]] void give_up() {
    fail_missing(fmt::format("not all {} ranks came within {}", options_.size,
                             format_seconds(static_cast<double>(running_ns() - begun_ns_) * 1e-9)));
  }

  [[noreturn]] void fail_missing(const std::string& what) {
    const std::vector<int64_t> here = present();
    fail_all(missing_beside(here, options_.size).front(),
             fmt::format("{}: {}", what, who_came(here, options_.size)), refused_);
  }

  [[noreturn]] void fail_all(int64_t blamed, const std::string& what,
                             std::vector<std::string> notes) {
    tell(MessageKind::kRefused, {blamed}, what);
    fail_rendezvous_of(blamed, what, std::move(notes));
  }

  ShmMembership welcome() {
    OwnedDescriptor control;
    try {
      control = ShmControl::make(options_.size);
    } catch (const Error& error) {
      tell(MessageKind::kRefused, {}, error.message());
      throw;
    }
    for (const auto& member : members_) {
      if (member) send_message(member->get(), MessageKind::kWelcome, pids_, "", {control->get()});
    }
    ShmMembership membership;
    membership.group = Group::world(0, options_.size);
    membership.pool = std::make_shared<MappingPool>();
    membership.control = membership.pool->map(std::move(control));
    membership.members = std::move(members_);
    for (const int64_t pid : pids_) membership.processes.emplace_back(static_cast<pid_t>(pid));
    return membership;
  }

  const ShmOptions& options_;
  int64_t begun_ns_;
  OwnedDescriptor listener_;
  std::vector<OwnedDescriptor> unauthenticated_;
  std::vector<OwnedDescriptor> members_;  // [rank]; null: not here yet
  std::vector<int64_t> pids_;             // [rank]
  std::vector<std::string> refused_;
  bool unannounced_ = false;    // a rank joined that members have not been told about
  int64_t announce_at_ns_ = 0;  // not before
};

// Rank 0 may come later: tries again until the deadline.
OwnedDescriptor find_host(const ShmOptions& options) {
  const std::string name = socket_name(options.session);
  auto pause = std::chrono::microseconds(200);
  for (;;) {
    auto connection = connect_to(name);
    if (connection && !peer_process(connection->get())) {
      fail_held_by_another_user(options.session);
    }
    if (connection) return connection;
    if (running_ns() >= options.deadline_ns) {
      fail_rendezvous_of(0, fmt::format("rank {} of {} found no rank 0 of session {}", options.rank,
                                        options.size, options.session));
    }
    std::this_thread::sleep_for(pause);
    pause = std::min(pause * 2, std::chrono::microseconds(10'000));
  }
}

// A member's deadline has come. Rank 0 is at fault if it took no notice of this rank, or of all.
[[noreturn]] void give_up(const ShmOptions& options, const Descriptor& host,
                          const std::vector<int64_t>& present) {
  send_message(host.get(), MessageKind::kGaveUp, {});
  const std::vector<int64_t> missing = missing_beside(present, options.size);
  if (missing.empty() || !holds(present, options.rank)) {
    fail_rendezvous_of(0, fmt::format("rank {}: rank 0 does not answer: not all {} ranks came",
                                      options.rank, options.size));
  }
  fail_rendezvous_of(missing.front(),
                     fmt::format("rank {}: not all {} ranks came: {}", options.rank, options.size,
                                 who_came(present, options.size)));
}

ShmMembership join(const ShmOptions& options) {
  OwnedDescriptor host = find_host(options);
  send_message(host->get(), MessageKind::kHello, {options.rank, options.size, kShmLayoutVersion});
  std::vector<int64_t> present = {0};
  for (;;) {
    SocketMessage message;
    const Received received = receive_message(host->get(), message);
    if (received == Received::kNothing) {
      if (running_ns() >= options.deadline_ns) give_up(options, *host, present);
      wait_readable({host->get()}, options.deadline_ns);
    } else if (received != Received::kMessage) {
      fail_rendezvous_of(
          0, fmt::format("rank {}: rank 0 ended before the rendezvous was complete", options.rank));
    } else if (message.kind == MessageKind::kRefused && message.numbers.size() == 1) {
      fail_rendezvous_of(message.numbers[0], message.text);
    } else if (message.kind == MessageKind::kRefused) {
      fail_rendezvous(message.text);
    } else if (message.kind == MessageKind::kPresent) {
      present = message.numbers;
    } else if (message.kind == MessageKind::kWelcome && message.descriptors.size() == 1) {
      ShmMembership membership;
      membership.group = Group::world(options.rank, options.size);
      membership.pool = std::make_shared<MappingPool>();
      membership.control = membership.pool->map(std::move(message.descriptors[0]));
      membership.leader = std::move(host);
      for (const int64_t pid : message.numbers) {
        membership.processes.emplace_back(static_cast<pid_t>(pid));
      }
      return membership;
    }
  }
}

void check_size(int size) {
  if (size >= 1 && size <= kShmRanks) return;
  throw Error(Code::kBackend,
              fmt::format("the backend shm cannot serve {} ranks: it serves 1 to {} of one host",
                          size, kShmRanks),
              "use gloo for more, or start fewer");
}

}  // namespace

ShmMembership rendezvous_of_processes(const ShmOptions& options) {
  check_size(options.size);
  if (options.rank < 0 || options.rank >= options.size) {
    fail_rendezvous(
        fmt::format("there is no rank {} in a world of {}", options.rank, options.size));
  }
  return options.rank == 0 ? Host(options).run() : join(options);
}

std::vector<ShmMembership> rendezvous_of_threads(int size) {
  check_size(size);
  auto pool = std::make_shared<MappingPool>();
  const auto control = pool->map(ShmControl::make(size));
  std::vector<ShmMembership> ranks(static_cast<size_t>(size));
  for (int rank = 0; rank < size; ++rank) {
    ShmMembership& membership = ranks[static_cast<size_t>(rank)];
    membership.group = Group::world(rank, size);
    membership.pool = pool;
    membership.control = control;
    membership.processes.assign(static_cast<size_t>(size), PeerProcess(::getpid()));
    ranks[0].members.emplace_back();
    if (rank > 0) {
      auto [leader_end, member_end] = make_socket_pair();
      ranks[0].members.back() = std::move(leader_end);
      membership.leader = std::move(member_end);
    }
  }
  return ranks;
}

}  // namespace lockstep
