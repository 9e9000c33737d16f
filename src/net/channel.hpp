#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <string_view>

#include "net/secret.hpp"

namespace lockstep {

/// Appends the `width` low bytes of an integer, little-endian.
inline void put_integer(std::string& text, uint64_t value, size_t width) {
  for (size_t i = 0; i < width; ++i) text += static_cast<char>(value >> (8 * i));
}

inline uint64_t get_integer(std::string_view text, size_t width) {
  uint64_t value = 0;
  for (size_t i = 0; i < width; ++i)
    value |= static_cast<uint64_t>(static_cast<unsigned char>(text[i])) << (8 * i);
  return value;
}

/// One end of a connection, without I/O: turns received bytes into payloads and payloads into
/// bytes to send.
///
/// Over TCP both sides first prove that they know the token, without revealing it:
///
///     client -> server   "lockstep", version, nonce C
///     server -> client   "lockstep", version, nonce S
///     client -> server   HMAC(token, "client" C S)
///     server -> client   reply, HMAC(token, "server" C S)
///
/// After that every frame is [length 4][sequence 8][HMAC 32][payload]. The key of a frame's HMAC is
/// derived from the token, the direction and both nonces, so frames cannot be forged, replayed,
/// reordered or sent back. On a plain channel (a Unix socket whose owner was checked) a frame is
/// [length 4][payload]. Integers are little-endian. Payloads are authenticated, not encrypted.
class Channel {
 public:
  /// Payloads of more than `max_payload` bytes are refused before memory is allocated for them.
  static Channel plain(size_t max_payload);
  static Channel client(std::string token, size_t max_payload);
  static Channel server(std::string token, size_t max_payload);

  /// Takes received bytes. An Error (kRendezvous) means that the other side failed authentication
  /// or broke the protocol: flush the output, which may contain the reason, and close.
  void feed(std::string_view bytes);

  /// True once the other side is authenticated; before that there are no payloads.
  bool ready() const { return state_ == State::kReady; }

  std::optional<std::string> take();
  void send(std::string_view payload);  ///< only when ready

  /// The bytes to send; wrote() removes those that were sent.
  std::string_view output() const { return std::string_view(output_).substr(output_done_); }
  void wrote(size_t count);

 private:
  enum class State { kAwaitHello, kAwaitChallenge, kAwaitProof, kAwaitReply, kReady, kBroken };
  enum class Role { kPlain, kClient, kServer };

  Channel(Role role, std::string token, size_t max_payload);

  bool parse_one();
  void greet(std::string_view greeting);
  void check_proof(std::string_view proof);
  void check_reply(std::string_view reply);
  bool parse_frame();
  void check_first_bytes() const;
  void open_for_frames();
  std::string proof(std::string_view side) const;
  std::string frame_code(const std::string& key, std::string_view header,
                         std::string_view payload) const;
  std::string_view input() const { return std::string_view(input_).substr(input_done_); }

  Role role_;
  State state_;
  std::string token_;
  size_t max_payload_;
  std::string own_nonce_;
  std::string peer_nonce_;
  std::string send_key_;
  std::string receive_key_;
  uint64_t sent_ = 0;      // frames
  uint64_t received_ = 0;  // frames
  std::string input_;
  size_t input_done_ = 0;
  std::string output_;
  size_t output_done_ = 0;
  std::deque<std::string> payloads_;
};

}  // namespace lockstep
