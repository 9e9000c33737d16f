#pragma once

#include <unistd.h>

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/file.hpp"
#include "lockstep/error.hpp"

namespace lockstep {

/// Owns a socket. All sockets here are close-on-exec and non-blocking.
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

/// A TCP address to listen on or connect to.
struct Endpoint {
  std::string host;
  int port = 0;
};

/// Parses "node1:29500", "10.0.0.1:29500" or "[fd00::1]:29500"; anything else is an Error (kUsage).
Endpoint parse_endpoint(std::string_view text);

/// The inverse: an IPv6 address gets its brackets.
std::string endpoint_text(std::string_view host, int port);

/// One address of a host, ready for connect().
struct ResolvedAddress {
  int family = 0;
  std::string bytes;  ///< a sockaddr
};

/// All addresses of a name, in the order to try them. A name that does not resolve is an Error.
std::vector<ResolvedAddress> resolve(const Endpoint& endpoint);

/// Thrown if another socket already listens on the address.
struct AddressInUse final : Error {
  using Error::Error;
};

/// Listens on an abstract Unix socket, which has no file and disappears with its last user.
Socket listen_unix(const std::string& name);

/// Listens on a numeric address, on loopback for "localhost", and on every address of this machine
/// for any other name: a host's own name often resolves to 127.0.1.1 on that host.
Socket listen_tcp(const Endpoint& endpoint);

/// Starts to connect. `error` is 0 (connected), EINPROGRESS, or the failure's errno.
Socket start_connect_unix(const std::string& name, int& error);
Socket start_connect(const ResolvedAddress& address, int& error);

int bound_port(const Socket& socket);

/// The numeric address of the other side or of this side; "" for a Unix socket.
std::string peer_address(const Socket& socket);
std::string own_address(const Socket& socket);

/// This host's address, in digits, as others may reach it: that of its name, else that of its first
/// interface; the loopback if there is none.
std::string host_address();

/// True for "127.0.0.1" and the like.
bool is_loopback(std::string_view address);

/// True if `host` is a name or address of this machine.
bool is_this_host(const std::string& host);

/// True if the process at the other end of a Unix socket runs as this user.
bool peer_is_this_user(const Socket& socket);

/// TCP may connect a socket to itself if nobody listens on a port of the ephemeral range.
bool connected_to_itself(const Socket& socket);

void set_no_delay(const Socket& socket);

/// A free TCP port, reserved so that no other job gets it while this one starts. It is bound with
/// SO_REUSEADDR and never listens, so a rank that also sets SO_REUSEADDR, as every store does, can
/// bind it and listen on it.
class PortHold {
 public:
  /// `port` 0 takes any free port; a port in use is an Error (kLaunch). `loopback` reserves it on
  /// 127.0.0.1 only, otherwise it is reserved on every address of this host.
  PortHold(int port, bool loopback);

  int port() const { return port_; }

 private:
  Socket socket_;
  int port_ = 0;
};

/// An eventfd: readable between raise() and clear(), to be polled together with sockets. Any thread
/// may call both.
class Wake {
 public:
  Wake();
  int descriptor() const { return event_.get(); }
  void raise();
  void clear();

 private:
  Descriptor event_;
};

}  // namespace lockstep
