#include "comm/shm/shm_socket.hpp"

#include <fmt/format.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "base/running_clock.hpp"
#include "comm/shm/shm_control.hpp"
#include "lockstep/error.hpp"

namespace lockstep {
namespace {

constexpr uint32_t kMagic = 0x6b6c7331;  // "1slk"
constexpr size_t kNumbers = kShmRanks;
constexpr size_t kTextBytes = 2048;
constexpr size_t kDescriptors = kShmRanks + 1;

struct WireHeader {
  uint32_t magic;
  MessageKind kind;
  uint32_t number_count;
  uint32_t text_bytes;
};

// As it travels: the header, the numbers, the text.
struct Wire {
  WireHeader header;
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

bool well_formed(const Wire& wire, size_t bytes) {
  const WireHeader& header = wire.header;
  return bytes >= sizeof header && header.magic == kMagic && header.kind <= MessageKind::kGaveUp &&
         header.number_count <= kNumbers && header.text_bytes <= kTextBytes &&
         bytes == wire.bytes();
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
  Wire wire;
  wire.header = {.magic = kMagic,
                 .kind = kind,
                 .number_count = static_cast<uint32_t>(std::min(numbers.size(), kNumbers)),
                 .text_bytes = static_cast<uint32_t>(std::min(text.size(), kTextBytes))};
  if (!numbers.empty()) std::memcpy(wire.body, numbers.data(), wire.number_bytes());
  text.copy(wire.body + wire.number_bytes(), wire.header.text_bytes);
  iovec part{.iov_base = &wire, .iov_len = wire.bytes()};
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
  Wire wire;
  iovec part{.iov_base = &wire, .iov_len = sizeof wire};
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
  if (!well_formed(wire, static_cast<size_t>(bytes)) || (header.msg_flags & MSG_CTRUNC) != 0)
    return Received::kRubbish;
  message.kind = wire.header.kind;
  message.numbers.resize(wire.header.number_count);
  if (!message.numbers.empty()) {
    std::memcpy(message.numbers.data(), wire.body, wire.number_bytes());
  }
  message.text.assign(wire.body + wire.number_bytes(), wire.header.text_bytes);
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

}  // namespace lockstep
