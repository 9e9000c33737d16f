// Frames on the control connection between ranks of several hosts.

#include "comm/network/tcp_control.hpp"

#include <sys/socket.h>

#include <array>

#include "base/running_clock.hpp"
#include "fuzz.hpp"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace lockstep;
  using namespace lockstep::fuzz;
  std::array<int, 2> ends{};
  require(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends.data()) == 0,
          "there is a pair of sockets");
  Socket peer(ends[1]);
  std::vector<Socket> sockets(2);
  sockets[1] = Socket(ends[0]);
  TcpControl link(0, std::move(sockets));
  ::send(peer.get(), data, size, MSG_NOSIGNAL);
  ::shutdown(peer.get(), SHUT_WR);
  const std::array from = {1};
  size_t taken = 0;
  for (const auto frame :
       {TcpControl::Frame::kFingerprint, TcpControl::Frame::kMessage, TcpControl::Frame::kNote}) {
    for (;;) {
      const auto got = link.gather(frame, from, running_ns() + 20'000'000'000);
      const auto* frames = std::get_if<std::vector<std::string>>(&got);
      if (frames == nullptr) {
        require(std::get<TcpControl::Trouble>(got).kind != TcpControl::Trouble::Kind::kLate,
                "a peer that hangs up is noticed");
        break;
      }
      taken += frames->front().size() + 1;
    }
  }
  require(taken <= size, "frames come from bytes that arrived");
  return 0;
}
