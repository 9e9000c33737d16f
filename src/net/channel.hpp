#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <string_view>

#include "net/secret.hpp"

namespace lockstep {

/// One end of a connection as a machine without I/O: bytes in, payloads out, and the reverse.
///
/// Over TCP both sides first prove that they know the token, without showing it:
///
///     client -> server   "lockstep", version, nonce C
///     server -> client   "lockstep", version, nonce S
///     client -> server   HMAC(token, "client" C S)
///     server -> client   verdict, HMAC(token, "server" C S)
///
/// After that every frame is [length 4][sequence 8][HMAC 32][payload], its code under a key made of
/// token, direction and both nonces: frames cannot be forged, replayed, reordered or sent back. On
/// a plain channel (a Unix socket whose owner was checked) a frame is [length 4][payload]. Integers
/// are little-endian. Payloads are authenticated, not encrypted.
class Channel {
 public:
  /// Payloads of more than `max_payload` bytes are refused before memory is taken for them.
  static Channel plain(size_t max_payload);
  static Channel client(std::string token, size_t max_payload);
  static Channel server(std::string token, size_t max_payload);

  /// Takes what has arrived. An Error (kRendezvous) means the other side is no friend of ours:
  /// flush the output, which may hold the reason, and close.
  void feed(std::string_view bytes);

  /// Whether the other side has proved itself; before that there are no payloads.
  bool ready() const { return state_ == State::kReady; }

  std::optional<std::string> take();
  void send(std::string_view payload);  ///< only when ready

  /// What is to be written, and that some of it was.
  std::string_view output() const { return std::string_view(output_).substr(output_done_); }
  void wrote(size_t count);

 private:
  enum class State { kAwaitHello, kAwaitChallenge, kAwaitProof, kAwaitVerdict, kReady, kBroken };
  enum class Role { kPlain, kClient, kServer };

  Channel(Role role, std::string token, size_t max_payload);

  bool parse_one();
  void greet(std::string_view greeting);
  void judge_proof(std::string_view proof);
  void judge_verdict(std::string_view verdict);
  bool parse_frame();
  void check_first_bytes() const;
  void open_for_frames();
  std::string proof(std::string_view who) const;
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
