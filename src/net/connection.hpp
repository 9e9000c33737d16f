#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "lockstep/error.hpp"
#include "net/channel.hpp"
#include "net/socket.hpp"

namespace lockstep {

/// The connection was closed by the other side or broken by the network.
class ConnectionLost : public Error {
 public:
  using Error::Error;
};

/// A client's connection to a server. Not thread-safe.
class Connection {
 public:
  enum class Retry { kUntilDeadline, kNever };

  /// Connects and authenticates. Retries while nobody listens; a name that does not resolve, a
  /// wrong token or a server that fails authentication is an Error at once.
  static Connection open_tcp(const Endpoint& server, const std::string& token, size_t max_payload,
                             int64_t deadline_ns, Retry retry = Retry::kUntilDeadline);
  static Connection open_unix(const std::string& name, size_t max_payload, int64_t deadline_ns,
                              Retry retry = Retry::kUntilDeadline);

  /// Takes one end of a socket pair.
  Connection(Socket socket, Channel channel, std::string server);

  bool ready() const { return channel_.ready(); }  ///< the other side is authenticated
  void post(std::string_view payload) { channel_.send(payload); }  ///< wait() writes it
  std::optional<std::string> take() { return channel_.take(); }

  /// What wait() waits for.
  enum class Until { kInput, kWritten };

  /// Writes posted payloads and reads input until input came, everything is written, `also` is
  /// readable, or the deadline has passed. Throws ConnectionLost if the other side is gone.
  void wait(Until until, int64_t deadline_ns, int also = -1);

  /// Returns the next payload, or nullopt at the deadline.
  std::optional<std::string> receive(int64_t deadline_ns);

  std::string peer_address() const { return lockstep::peer_address(socket_); }

 private:
  void write_some();
  bool read_some();
  [[noreturn]] void lost(const std::string& why) const;

  Socket socket_;
  Channel channel_;
  std::string server_;  // for messages
};

}  // namespace lockstep
