#include "comm/gloo/gloo_meeting.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>

#include "base/running_clock.hpp"
#include "lockstep/error.hpp"
#include "lockstep/units.hpp"
#include "net/secret.hpp"

namespace lockstep {
namespace {

constexpr size_t kSecretBytes = 32;  // as hex digits
constexpr size_t kMaxStrangers = 256;
constexpr uint32_t kHelloMagic = 0x6c736731;  // "lsg1"

// The first bytes on every connection. The secret is the listener's, from the store.
struct Hello {
  uint32_t magic = kHelloMagic;
  uint32_t call_bytes = sizeof(Call);  // another layout of Call is another lockstep
  int32_t place = 0;
  char secret[kSecretBytes] = {};
};

// Where a rank listens, as text in the store: "40123 <secret in hex> 10.0.0.7".
struct Listening {
  int port = 0;
  std::string secret;  // hex
  std::string host;

  std::string text() const { return fmt::format("{} {} {}", port, secret, host); }

  static Listening parse(const std::string& text) {
    Listening place;
    const size_t first = text.find(' ');
    const size_t second = text.find(' ', first + 1);
    const auto parsed = std::from_chars(text.data(), text.data() + text.size(), place.port);
    if (parsed.ec != std::errc() || second == std::string::npos) {
      throw Error(Code::kRendezvous, fmt::format("\"{}\" tells no gloo address", text),
                  "use one version of lockstep on all hosts");
    }
    place.secret = text.substr(first + 1, second - first - 1);
    place.host = text.substr(second + 1);
    return place;
  }
};

std::string key_of(int place) {
  return fmt::format("gloo/{}", place);
}

int poll_timeout_ms(int64_t deadline_ns) {
  const int64_t left_ms = (deadline_ns - running_ns() + 999'999) / 1'000'000;
  return static_cast<int>(std::clamp<int64_t>(left_ms, 0, 1000));
}

class Meeting {
 public:
  Meeting(Store& store, const Group& group, const std::string& address, int64_t deadline_ns)
      : store_(store),
        group_(group),
        deadline_ns_(deadline_ns),
        begun_ns_(running_ns()),
        listener_(listen_tcp({address, 0})),
        secret_(to_hex(random_bytes(kSecretBytes / 2))) {
    met_.address = own_address(listener_);
    if (met_.address == "::" || met_.address == "0.0.0.0") {
      throw Error(Code::kBackend, fmt::format("backend gloo cannot listen at \"{}\"", address),
                  "give this host's address in digits");
    }
    met_.sockets.resize(static_cast<size_t>(group.size()));
  }

  GlooMeeting run() {
    store_.set(key_of(group_.rank), Listening{bound_port(listener_), secret_, met_.address}.text());
    for (int place = 0; place < group_.rank; ++place) connect_to(place);
    accept_from_above();
    for (Socket& socket : met_.sockets) {
      if (socket) set_no_delay(socket);
    }
    return std::move(met_);
  }

 private:
  // A connection that has not said yet who it is.
  struct Stranger {
    Socket socket;
    std::string said;
  };

  void connect_to(int place) {
    Listening there;
    try {
      there = Listening::parse(store_.get(key_of(place), deadline_ns_));
    } catch (const Error& error) {
      if (running_ns() < deadline_ns_) throw;
      throw_missing({place});
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
    hello.place = group_.rank;
    std::copy_n(there.secret.begin(), std::min(there.secret.size(), kSecretBytes), hello.secret);
    if (error == 0 && ::send(socket.get(), &hello, sizeof hello, MSG_NOSIGNAL) != sizeof hello) {
      error = ECONNRESET;
    }
    if (error != 0) {
      throw RankError(Code::kRendezvous, world_rank(place),
                      fmt::format("gloo cannot connect to rank {} at {}: {}", world_rank(place),
                                  endpoint_text(there.host, there.port), std::strerror(error)),
                      "see whether that rank still runs, and whether a firewall stands between the "
                      "hosts: ranks connect to each other at ports that the system chooses");
    }
    met_.sockets[static_cast<size_t>(place)] = std::move(socket);
  }

  void accept_from_above() {
    for (;;) {
      const std::vector<int> missing = missing_above();
      if (missing.empty()) return;
      if (running_ns() >= deadline_ns_) throw_missing(missing);
      std::vector<pollfd> waiting{{listener_.get(), POLLIN, 0}};
      for (const Stranger& stranger : strangers_) {
        waiting.push_back({stranger.socket.get(), POLLIN, 0});
      }
      if (::poll(waiting.data(), waiting.size(), poll_timeout_ms(deadline_ns_)) <= 0) continue;
      for (size_t i = strangers_.size(); i > 0; --i) {
        if (waiting[i].revents != 0 && !listen_to(strangers_[i - 1])) {
          strangers_.erase(strangers_.begin() + static_cast<std::ptrdiff_t>(i) - 1);
        }
      }
      if (waiting[0].revents != 0) accept_one();
    }
  }

  void accept_one() {
    Socket socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket) return;
    if (strangers_.size() == kMaxStrangers) strangers_.erase(strangers_.begin());
    strangers_.push_back({std::move(socket), ""});
  }

  // Whether there is more to hear: not from one who is in now, or who was found to be no rank.
  bool listen_to(Stranger& stranger) {
    char bytes[sizeof(Hello)];
    const ssize_t count =
        ::recv(stranger.socket.get(), bytes, sizeof(Hello) - stranger.said.size(), 0);
    if (count < 0 && (errno == EAGAIN || errno == EINTR)) return true;
    if (count <= 0) return false;
    stranger.said.append(bytes, static_cast<size_t>(count));
    if (stranger.said.size() < sizeof(Hello)) return true;
    Hello hello;
    std::memcpy(&hello, stranger.said.data(), sizeof hello);
    const bool known = hello.magic == kHelloMagic && hello.call_bytes == sizeof(Call) &&
                       equal_secrets({hello.secret, kSecretBytes}, secret_) &&
                       hello.place > group_.rank && hello.place < group_.size() &&
                       !met_.sockets[static_cast<size_t>(hello.place)];
    if (known) met_.sockets[static_cast<size_t>(hello.place)] = std::move(stranger.socket);
    return false;
  }

  std::vector<int> missing_above() const {
    std::vector<int> missing;
    for (int place = group_.rank + 1; place < group_.size(); ++place) {
      if (!met_.sockets[static_cast<size_t>(place)]) missing.push_back(place);
    }
    return missing;
  }

  int world_rank(int place) const { return group_.world_ranks.at(static_cast<size_t>(place)); }

  [[noreturn]] void throw_missing(const std::vector<int>& places) const {
    std::vector<int> ranks;
    for (const int place : places) ranks.push_back(world_rank(place));
    throw RankError(
        Code::kRendezvous, ranks.front(),
        fmt::format("gloo, group {}: rank{} {} did not come within {}", group_.name,
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
  GlooMeeting met_;
  std::vector<Stranger> strangers_;
};

}  // namespace

GlooMeeting meet(Store& store, const Group& group, const std::string& address,
                 int64_t deadline_ns) {
  return Meeting(store, group, address, deadline_ns).run();
}

}  // namespace lockstep
