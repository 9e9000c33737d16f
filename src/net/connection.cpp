#include "net/connection.hpp"

#include <fmt/format.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <functional>
#include <thread>

#include "base/running_clock.hpp"

namespace lockstep {
namespace {

constexpr int64_t kRetryPauseNs = 50'000'000;
// A name may have several addresses, and the first may be a black hole.
constexpr int64_t kOneAttemptNs = 5'000'000'000;

int poll_timeout_ms(int64_t deadline_ns) {
  const int64_t left_ns = deadline_ns - running_ns();
  return static_cast<int>(std::clamp<int64_t>((left_ns + 999'999) / 1'000'000, 0, 3'600'000));
}

// Returns 0, or the errno of a connection that was started.
int finish_connect(const Socket& socket, int64_t deadline_ns) {
  pollfd item{socket.get(), POLLOUT, 0};
  for (;;) {
    const int ready = ::poll(&item, 1, poll_timeout_ms(deadline_ns));
    if (ready > 0) break;
    if (ready == 0 && running_ns() >= deadline_ns) return ETIMEDOUT;
    if (ready < 0 && errno != EINTR) return errno;
  }
  int error = 0;
  socklen_t length = sizeof error;
  ::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &length);
  return error;
}

bool may_succeed_later(int error) {
  return error == ECONNREFUSED || error == ECONNRESET || error == ETIMEDOUT || error == EAGAIN ||
         error == ECONNABORTED;
}

// The result of one try: a connection, or why there is none and whether to retry.
struct ConnectResult {
  std::optional<Connection> connection;
  std::string problem;
  bool retry = false;
};

ConnectResult authenticate(Socket socket, Channel channel, const std::string& server,
                           int64_t deadline_ns) {
  ConnectResult result;
  try {
    Connection connection(std::move(socket), std::move(channel), server);
    while (!connection.ready()) {
      if (running_ns() >= deadline_ns) {
        result.problem = "a server accepts connections but does not answer";
        return result;
      }
      connection.wait(Connection::Until::kWritten, deadline_ns);
      if (!connection.ready()) connection.wait(Connection::Until::kInput, deadline_ns);
    }
    result.connection = std::move(connection);
  } catch (const ConnectionLost&) {
    // The server is about to exit, or has too many connections at the moment.
    result.problem = "the server hung up";
    result.retry = true;
  }
  return result;
}

using Start = std::function<Socket(int& error)>;
using MakeChannel = std::function<Channel()>;

ConnectResult try_once(const Start& start, const MakeChannel& make_channel,
                       const std::string& server, int64_t deadline_ns) {
  int error = 0;
  Socket socket = start(error);
  if (error == EINPROGRESS)
    error = finish_connect(socket, std::min(deadline_ns, running_ns() + kOneAttemptNs));
  if (error == 0 && connected_to_itself(socket)) error = ECONNREFUSED;
  if (error != 0) return {std::nullopt, std::strerror(error), may_succeed_later(error)};
  set_no_delay(socket);
  return authenticate(std::move(socket), make_channel(), server, deadline_ns);
}

Connection connect_with_retries(const std::vector<Start>& starts, const MakeChannel& make_channel,
                                const std::string& server, int64_t deadline_ns,
                                Connection::Retry retry) {
  for (;;) {
    bool try_again = false;
    std::string problem;
    for (const auto& start : starts) {
      ConnectResult result = try_once(start, make_channel, server, deadline_ns);
      if (result.connection) return std::move(*result.connection);
      problem = result.problem;
      try_again = try_again || result.retry;
    }
    if (!try_again || retry == Connection::Retry::kNever ||
        running_ns() + kRetryPauseNs >= deadline_ns) {
      throw Error(Code::kRendezvous, fmt::format("cannot reach {}: {}", server, problem),
                  "check that its server (node 0's launcher, or rank 0) has been started, that the "
                  "address is right, and that no firewall is in between");
    }
    std::this_thread::sleep_for(std::chrono::nanoseconds(kRetryPauseNs));
  }
}

}  // namespace

Connection::Connection(Socket socket, Channel channel, std::string server)
    : socket_(std::move(socket)), channel_(std::move(channel)), server_(std::move(server)) {}

Connection Connection::open_tcp(const Endpoint& server, const std::string& token,
                                size_t max_payload, int64_t deadline_ns, Retry retry) {
  std::vector<Start> starts;
  for (auto& address : resolve(server)) {
    starts.emplace_back([address](int& error) { return start_connect(address, error); });
  }
  return connect_with_retries(
      starts, [&] { return Channel::client(token, max_payload); },
      endpoint_text(server.host, server.port), deadline_ns, retry);
}

Connection Connection::open_unix(const std::string& name, size_t max_payload, int64_t deadline_ns,
                                 Retry retry) {
  const Start start = [&](int& error) {
    Socket socket = start_connect_unix(name, error);
    if (error == 0 && !peer_is_this_user(socket)) {
      throw Error(Code::kRendezvous,
                  fmt::format("the Unix socket \"{}\" is served by another user", name),
                  "end that process, or start the job again: it uses a new name");
    }
    return socket;
  };
  return connect_with_retries(
      {start}, [&] { return Channel::plain(max_payload); },
      fmt::format("the Unix socket \"{}\"", name), deadline_ns, retry);
}

void Connection::lost(const std::string& why) const {
  throw ConnectionLost(Code::kRendezvous,
                       fmt::format("the connection to {} was lost: {}", server_, why),
                       "the process that served it has ended: look at its log");
}

void Connection::write_some() {
  while (!channel_.output().empty()) {
    const std::string_view output = channel_.output();
    const ssize_t count = ::send(socket_.get(), output.data(), output.size(), MSG_NOSIGNAL);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && errno == EAGAIN) return;
    if (count < 0) lost(std::strerror(errno));
    channel_.wrote(static_cast<size_t>(count));
  }
}

bool Connection::read_some() {
  std::array<char, 1 << 14> buffer;
  const ssize_t count = ::recv(socket_.get(), buffer.data(), buffer.size(), 0);
  if (count < 0 && (errno == EINTR || errno == EAGAIN)) return false;
  if (count < 0) lost(std::strerror(errno));
  if (count == 0) lost("the other side closed it");
  try {
    channel_.feed({buffer.data(), static_cast<size_t>(count)});
  } catch (const Error& error) {
    throw Error(error.code(), fmt::format("{}: {}", server_, error.message()), error.help());
  }
  return true;
}

void Connection::wait(Until until, int64_t deadline_ns, int also) {
  for (;;) {
    // Read first: a server may have closed after its last message, which still counts.
    const bool writing = !channel_.output().empty();
    if (until == Until::kWritten && !writing) return;
    std::array<pollfd, 2> items = {
        pollfd{socket_.get(), static_cast<short>(writing ? POLLIN | POLLOUT : POLLIN), 0},
        pollfd{also, POLLIN, 0}};
    const int ready = ::poll(items.data(), also >= 0 ? 2 : 1, poll_timeout_ms(deadline_ns));
    if (ready < 0 && errno != EINTR) lost(std::strerror(errno));
    if (ready > 0 && (items[0].revents & (POLLIN | POLLHUP | POLLERR)) != 0 && read_some() &&
        until == Until::kInput) {
      return;
    }
    if (ready > 0 && (items[0].revents & POLLOUT) != 0) write_some();
    if (ready > 0 && items[1].revents != 0) return;
    if (running_ns() >= deadline_ns) return;
  }
}

std::optional<std::string> Connection::receive(int64_t deadline_ns) {
  for (;;) {
    if (auto payload = take()) return payload;
    if (running_ns() >= deadline_ns) return std::nullopt;
    wait(Until::kInput, deadline_ns);
  }
}

}  // namespace lockstep
