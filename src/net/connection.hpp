#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "lockstep/error.hpp"
#include "net/channel.hpp"
#include "net/socket.hpp"

namespace lockstep {

/// The other side closed the connection, or the network did.
class ConnectionLost : public Error {
 public:
  using Error::Error;
};

/// A client's connection to a server. One thread at a time.
class Connection {
 public:
  enum class Retry { kUntilDeadline, kNever };

  /// Connects and proves the token. Where nobody listens yet it tries again; a name that does not
  /// resolve, a wrong token or a stranger at the other end is an Error at once.
  static Connection open_tcp(const Endpoint& server, const std::string& token, size_t max_payload,
                             int64_t deadline_ns, Retry retry = Retry::kUntilDeadline);
  static Connection open_unix(const std::string& name, size_t max_payload, int64_t deadline_ns,
                              Retry retry = Retry::kUntilDeadline);

  /// Over one end of a socket pair.
  Connection(Socket socket, Channel channel, std::string server);

  bool ready() const { return channel_.ready(); }                  ///< the greeting is over
  void post(std::string_view payload) { channel_.send(payload); }  ///< wait() writes it
  std::optional<std::string> take() { return channel_.take(); }

  /// What wait() waits for; it ends at the deadline in any case.
  enum class Until { kInput, kWritten };

  /// Writes what was posted and reads what has come, until something has, or all is written, or
  /// `also` is readable. ConnectionLost when the other side is gone.
  void wait(Until until, int64_t deadline_ns, int also = -1);

  /// The next payload, or nullopt at the deadline.
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
