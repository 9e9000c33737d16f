#pragma once

#include <unistd.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/error.hpp"

struct addrinfo;

namespace lockstep {

/// Owns a socket. All sockets here are close-on-exec and never block.
class Socket {
 public:
  Socket() = default;
  explicit Socket(int fd) : fd_(fd) {}
  ~Socket() { close(); }
  Socket(Socket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Socket& operator=(Socket&& other) noexcept {
    if (this != &other) {
      close();
      fd_ = std::exchange(other.fd_, -1);
    }
    return *this;
  }

  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  void close() {
    if (fd_ >= 0) ::close(std::exchange(fd_, -1));
  }

 private:
  int fd_ = -1;
};

/// A place to listen at or connect to over TCP.
struct Endpoint {
  std::string host;
  int port = 0;
};

/// "node1:29500", "10.0.0.1:29500", "[fd00::1]:29500"; anything else is an Error (kUsage).
Endpoint parse_endpoint(std::string_view text);

/// The inverse: an IPv6 address gets its brackets.
std::string endpoint_text(std::string_view host, int port);

/// One address of a host, ready for connect().
struct ResolvedAddress {
  int family = 0;
  std::string bytes;  ///< a sockaddr
};

/// All addresses of a name, in the order to try them. A name that does not resolve is an Error at
/// once.
std::vector<ResolvedAddress> resolve(const Endpoint& endpoint);

/// Somebody listens there already.
struct AddressInUse final : Error {
  using Error::Error;
};

/// An abstract Unix socket: it has no file, and is gone with its last user.
Socket listen_unix(const std::string& name);

/// Listens at an address given in digits, on loopback alone for "localhost", and at every address
/// of this machine for any other name: a host's own name often means 127.0.1.1 to itself.
Socket listen_tcp(const Endpoint& endpoint);

/// Begins to connect. Done, or in progress: error 0 or EINPROGRESS.
Socket start_connect_unix(const std::string& name, int& error);
Socket start_connect(const ResolvedAddress& address, int& error);

int bound_port(const Socket& socket);

/// The other side's, or this side's, address in digits; "" for a Unix socket.
std::string peer_address(const Socket& socket);
std::string own_address(const Socket& socket);

/// "127.0.0.1" and the like.
bool is_loopback(std::string_view address);

/// Whether the process at the other end of a Unix socket runs as this user.
bool peer_is_this_user(const Socket& socket);

/// TCP may connect a socket to itself where nobody listens on a port of the ephemeral range.
bool connected_to_itself(const Socket& socket);

void set_no_delay(const Socket& socket);

}  // namespace lockstep
