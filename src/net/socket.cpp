#include "net/socket.hpp"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <cstddef>
#include <cstring>
#include <memory>

#include "base/file.hpp"

namespace lockstep {
namespace {

constexpr int kSocketFlags = SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK;
constexpr int kBacklog = 1024;

const sockaddr* as_address(const void* bytes) {
  return static_cast<const sockaddr*>(bytes);
}

struct UnixAddress {
  sockaddr_un address{};
  socklen_t length = 0;

  explicit UnixAddress(const std::string& name) {
    if (name.empty() || name.size() > sizeof(address.sun_path) - 1) {
      throw Error(Code::kRendezvous,
                  fmt::format("\"{}\" cannot name a Unix socket: 1 to {} bytes are allowed", name,
                              sizeof(address.sun_path) - 1),
                  "use a shorter name");
    }
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path + 1, name.data(), name.size());  // a leading zero: abstract
    length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  }
};

[[noreturn]] void fail_listen(const std::string& where, int error) {
  const std::string message = fmt::format("cannot listen at {}: {}", where, std::strerror(error));
  if (error == EADDRINUSE) {
    throw AddressInUse(Code::kRendezvous, message, "another job is using it: choose another port");
  }
  throw Error(Code::kRendezvous, message,
              limit_help(error, error == EADDRNOTAVAIL
                                    ? "it is not an address of this host: node 0 must run on the "
                                      "host that the endpoint names"
                                : error == EACCES ? "use a port of 1024 or above"
                                                  : "choose another endpoint"));
}

Socket bind_and_listen(const sockaddr* address, socklen_t length, const std::string& where) {
  Socket socket(::socket(address->sa_family, kSocketFlags, 0));
  if (!socket) fail_listen(where, errno);
  if (address->sa_family != AF_UNIX) {
    const int on = 1;
    ::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  }
  if (address->sa_family == AF_INET6) {
    const int only_six =
        !IN6_IS_ADDR_UNSPECIFIED(&reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr);
    ::setsockopt(socket.get(), IPPROTO_IPV6, IPV6_V6ONLY, &only_six, sizeof only_six);
  }
  if (::bind(socket.get(), address, length) != 0) fail_listen(where, errno);
  if (::listen(socket.get(), kBacklog) != 0) fail_listen(where, errno);
  return socket;
}

// Falls back to IPv4 if the kernel has no IPv6.
Socket listen_everywhere(int port, const std::string& where) {
  const Socket probe(::socket(AF_INET6, kSocketFlags, 0));
  if (!probe) {
    sockaddr_in any{};
    any.sin_family = AF_INET;
    any.sin_port = htons(static_cast<uint16_t>(port));
    return bind_and_listen(as_address(&any), sizeof any, where);
  }
  sockaddr_in6 any{};
  any.sin6_family = AF_INET6;
  any.sin6_port = htons(static_cast<uint16_t>(port));
  return bind_and_listen(as_address(&any), sizeof any, where);
}

using AddressList = std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)>;

AddressList look_up(const std::string& host, int port, int flags, int& error) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags | AI_NUMERICSERV;
  addrinfo* list = nullptr;
  error = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &list);
  return {list, &::freeaddrinfo};
}

template <class Getter>
std::string address_text(const Socket& socket, Getter getter) {
  sockaddr_storage storage{};
  socklen_t length = sizeof storage;
  auto* address = reinterpret_cast<sockaddr*>(&storage);
  if (getter(socket.get(), address, &length) != 0 || storage.ss_family == AF_UNIX) return "";
  char text[NI_MAXHOST] = {};
  if (::getnameinfo(address, length, text, sizeof text, nullptr, 0, NI_NUMERICHOST) != 0) return "";
  // A dual-stack listener shows IPv4 peers with this prefix.
  static constexpr std::string_view kMapped = "::ffff:";
  const std::string_view view = text;
  const bool mapped = view.starts_with(kMapped) && view.find('.') != std::string_view::npos;
  return std::string(mapped ? view.substr(kMapped.size()) : view);
}

Socket start_connect_to(const sockaddr* address, socklen_t length, int& error) {
  Socket socket(::socket(address->sa_family, kSocketFlags, 0));
  error = 0;
  if (!socket || ::connect(socket.get(), address, length) != 0) error = errno;
  return socket;
}

}  // namespace

Endpoint parse_endpoint(std::string_view text) {
  const size_t colon = text.rfind(':');
  std::string_view host = text.substr(0, colon);
  const bool bracketed = host.size() > 2 && host.front() == '[' && host.back() == ']';
  if (bracketed) host = host.substr(1, host.size() - 2);
  int port = -1;
  if (colon != std::string_view::npos) {
    const std::string_view digits = text.substr(colon + 1);
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), port);
    if (error != std::errc() || end != digits.data() + digits.size()) port = -1;
  }
  const bool bare_six = !bracketed && host.find_first_of(":[]") != std::string_view::npos;
  if (host.empty() || bare_six || port < 0 || port > 65535) {
    throw Error(Code::kUsage, fmt::format("\"{}\" is not an endpoint", text),
                "write host:port, such as node1:29500 or [fd00::1]:29500");
  }
  return {std::string(host), port};
}

std::string endpoint_text(std::string_view host, int port) {
  const bool six = host.find(':') != std::string_view::npos;
  return six ? fmt::format("[{}]:{}", host, port) : fmt::format("{}:{}", host, port);
}

std::vector<ResolvedAddress> resolve(const Endpoint& endpoint) {
  int error = 0;
  const AddressList list = look_up(endpoint.host, endpoint.port, 0, error);
  if (error != 0) {
    throw Error(Code::kRendezvous,
                fmt::format("cannot resolve the host \"{}\": {}", endpoint.host,
                            error == EAI_SYSTEM ? std::strerror(errno) : ::gai_strerror(error)),
                "check its spelling, or use its numeric address");
  }
  std::vector<ResolvedAddress> addresses;
  for (const addrinfo* one = list.get(); one != nullptr; one = one->ai_next) {
    addresses.push_back({one->ai_family, std::string(reinterpret_cast<const char*>(one->ai_addr),
                                                     one->ai_addrlen)});
  }
  return addresses;
}

Socket listen_unix(const std::string& name) {
  const UnixAddress address(name);
  return bind_and_listen(as_address(&address.address), address.length,
                         fmt::format("the Unix socket \"{}\"", name));
}

Socket listen_tcp(const Endpoint& endpoint) {
  const std::string where = endpoint_text(endpoint.host, endpoint.port);
  const std::string host = endpoint.host == "localhost" ? "127.0.0.1" : endpoint.host;
  int error = 0;
  const AddressList digits = look_up(host, endpoint.port, AI_NUMERICHOST | AI_PASSIVE, error);
  if (error == 0) return bind_and_listen(digits->ai_addr, digits->ai_addrlen, where);
  resolve(endpoint);  // fail here if the name does not resolve, rather than let other hosts wait
  return listen_everywhere(endpoint.port, where);
}

Socket start_connect_unix(const std::string& name, int& error) {
  const UnixAddress address(name);
  return start_connect_to(as_address(&address.address), address.length, error);
}

Socket start_connect(const ResolvedAddress& address, int& error) {
  return start_connect_to(as_address(address.bytes.data()),
                          static_cast<socklen_t>(address.bytes.size()), error);
}

int bound_port(const Socket& socket) {
  sockaddr_storage storage{};
  socklen_t length = sizeof storage;
  ::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&storage), &length);
  if (storage.ss_family == AF_INET)
    return ntohs(reinterpret_cast<const sockaddr_in*>(&storage)->sin_port);
  if (storage.ss_family == AF_INET6)
    return ntohs(reinterpret_cast<const sockaddr_in6*>(&storage)->sin6_port);
  return 0;
}

std::string peer_address(const Socket& socket) {
  return address_text(socket, ::getpeername);
}

std::string own_address(const Socket& socket) {
  return address_text(socket, ::getsockname);
}

bool is_loopback(std::string_view address) {
  return address == "::1" || address == "localhost" || address.starts_with("127.");
}

namespace {

// In digits; "" for what has none.
std::string digits_of(const sockaddr* address) {
  std::array<char, NI_MAXHOST> digits{};
  const socklen_t bytes = address->sa_family == AF_INET    ? sizeof(sockaddr_in)
                          : address->sa_family == AF_INET6 ? sizeof(sockaddr_in6)
                                                           : 0;
  if (bytes == 0 || ::getnameinfo(address, bytes, digits.data(), digits.size(), nullptr, 0,
                                  NI_NUMERICHOST) != 0) {
    return "";
  }
  return digits.data();
}

}  // namespace

std::string host_address() {
  std::array<char, 256> name{};
  ::gethostname(name.data(), name.size() - 1);
  int error = 0;
  const AddressList named = look_up(name.data(), 0, 0, error);
  for (const addrinfo* one = named.get(); error == 0 && one != nullptr; one = one->ai_next) {
    const std::string digits = digits_of(one->ai_addr);
    if (!digits.empty() && !is_loopback(digits)) return digits;
  }
  ifaddrs* interfaces = nullptr;
  std::string found;
  if (::getifaddrs(&interfaces) != 0) return "127.0.0.1";
  for (const ifaddrs* one = interfaces; one != nullptr && found.empty(); one = one->ifa_next) {
    const bool up = (one->ifa_flags & IFF_UP) != 0 && (one->ifa_flags & IFF_LOOPBACK) == 0;
    if (up && one->ifa_addr != nullptr && one->ifa_addr->sa_family == AF_INET) {
      found = digits_of(one->ifa_addr);
    }
  }
  ::freeifaddrs(interfaces);
  return found.empty() ? "127.0.0.1" : found;
}

// Only an address of this host can be bound.
bool is_this_host(const std::string& host) {
  int error = 0;
  const AddressList list = look_up(host, 0, 0, error);
  if (error != 0) return false;
  for (const addrinfo* one = list.get(); one != nullptr; one = one->ai_next) {
    const Socket socket(::socket(one->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    if (::bind(socket.get(), one->ai_addr, one->ai_addrlen) == 0) return true;
  }
  return false;
}

bool peer_is_this_user(const Socket& socket) {
  ucred peer{};
  socklen_t length = sizeof peer;
  return ::getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0 &&
         peer.uid == ::geteuid();
}

bool connected_to_itself(const Socket& socket) {
  sockaddr_storage here{};
  sockaddr_storage there{};
  socklen_t here_length = sizeof here;
  socklen_t there_length = sizeof there;
  return ::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&here), &here_length) == 0 &&
         ::getpeername(socket.get(), reinterpret_cast<sockaddr*>(&there), &there_length) == 0 &&
         here.ss_family != AF_UNIX && here_length == there_length &&
         std::memcmp(&here, &there, here_length) == 0;
}

void set_no_delay(const Socket& socket) {
  const int on = 1;
  ::setsockopt(socket.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

PortHold::PortHold(int port, bool loopback)
    : socket_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
  const int on = 1;
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(loopback ? INADDR_LOOPBACK : INADDR_ANY);
  const bool bound = socket_ &&
                     ::setsockopt(socket_.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0 &&
                     ::bind(socket_.get(), as_address(&address), sizeof address) == 0;
  if (!bound) {
    const int reason = errno;
    throw Error(
        Code::kLaunch,
        port == 0 ? fmt::format("cannot reserve a port: {}", std::strerror(reason))
                  : fmt::format("port {} cannot be used: {}", port, std::strerror(reason)),
        limit_help(reason, port == 0 ? "check whether this machine has free ports"
                                     : "leave out --master-port, and lockstep finds a free one"));
  }
  port_ = bound_port(socket_);
}

Wake::Wake() : event_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (event_.get() < 0) {
    throw Error(Code::kRendezvous,
                fmt::format("cannot create an eventfd: {}", std::strerror(errno)),
                "raise the limit of open files: ulimit -n");
  }
}

void Wake::raise() {
  const uint64_t one = 1;
  // A full counter is readable anyway.
  [[maybe_unused]] const ssize_t written = ::write(event_.get(), &one, sizeof one);
}

void Wake::clear() {
  uint64_t count = 0;
  [[maybe_unused]] const ssize_t got = ::read(event_.get(), &count, sizeof count);
}

}  // namespace lockstep
