#include "launch/port_hold.hpp"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "base/limits.hpp"
#include "lockstep/error.hpp"

namespace lockstep {

PortHold::PortHold(int port, bool loopback) {
  fd_ = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const int yes = 1;
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(loopback ? INADDR_LOOPBACK : INADDR_ANY);
  socklen_t bytes = sizeof(address);
  const bool bound =
      fd_ >= 0 && ::setsockopt(fd_, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes)) == 0 &&
      ::bind(fd_, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0 &&
      ::getsockname(fd_, reinterpret_cast<sockaddr*>(&address), &bytes) == 0;
  if (!bound) {
    const int reason = errno;
    if (fd_ >= 0) ::close(fd_);
    throw Error(
        Code::kLaunch,
        port == 0 ? fmt::format("cannot reserve a port: {}", std::strerror(reason))
                  : fmt::format("port {} cannot be used: {}", port, std::strerror(reason)),
        limit_help(reason, port == 0 ? "see whether this machine has free ports"
                                     : "leave --master-port out, and lockstep finds a free one"));
  }
  port_ = ntohs(address.sin_port);
}

PortHold::~PortHold() {
  ::close(fd_);
}

}  // namespace lockstep
