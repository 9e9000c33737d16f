#include "net/channel.hpp"

#include <fmt/format.h>

#include "base/random.hpp"
#include "lockstep/error.hpp"

namespace lockstep {
namespace {

constexpr std::string_view kMagic = "lockstep";
constexpr unsigned char kProtocol = 1;
constexpr size_t kNonceBytes = 32;
constexpr size_t kGreetingBytes = kMagic.size() + 1 + kNonceBytes;
constexpr size_t kReplyBytes = 1 + kMacBytes;
constexpr char kAccepted = 1;
constexpr char kWrongToken = 2;
constexpr size_t kLengthBytes = 4;
constexpr size_t kSequenceBytes = 8;

constexpr const char* kTokenHelp =
    "use the same secret on all hosts: set LOCKSTEP_TOKEN, or copy ~/.config/lockstep/token";

[[noreturn]] void reject(const std::string& why, const char* help) {
  throw Error(Code::kRendezvous, why, help);
}

// Drops the consumed front of a buffer once that is worth the move: the buffer neither grows
// without end nor is moved for every frame.
void drop_front(std::string& buffer, size_t& done) {
  if (done == buffer.size()) {
    buffer.clear();
    done = 0;
  } else if (done > (size_t{64} << 10)) {
    buffer.erase(0, done);
    done = 0;
  }
}

}  // namespace

Channel::Channel(Role role, std::string token, size_t max_payload)
    : role_(role),
      state_(role == Role::kPlain    ? State::kReady
             : role == Role::kClient ? State::kAwaitChallenge
                                     : State::kAwaitHello),
      token_(std::move(token)),
      max_payload_(max_payload) {
  if (role_ == Role::kPlain) return;
  if (token_.empty()) {
    reject("a connection over TCP needs a token, and there is none",
           "set LOCKSTEP_TOKEN to the same secret on all hosts");
  }
  own_nonce_ = random_bytes(kNonceBytes);
  if (role_ == Role::kClient) {
    output_ = kMagic;
    output_ += static_cast<char>(kProtocol);
    output_ += own_nonce_;
  }
}

Channel Channel::plain(size_t max_payload) {
  return {Role::kPlain, "", max_payload};
}

Channel Channel::client(std::string token, size_t max_payload) {
  return {Role::kClient, std::move(token), max_payload};
}

Channel Channel::server(std::string token, size_t max_payload) {
  return {Role::kServer, std::move(token), max_payload};
}

void Channel::feed(std::string_view bytes) {
  if (state_ == State::kBroken) reject("the connection has already failed", "connect again");
  input_ += bytes;
  try {
    while (parse_one()) {
    }
  } catch (...) {
    state_ = State::kBroken;
    throw;
  }
  drop_front(input_, input_done_);
}

bool Channel::parse_one() {
  const auto whole = [this](size_t count) { return input().size() >= count; };
  const auto next = [this](size_t count) {
    const std::string_view part = input().substr(0, count);
    input_done_ += count;
    return part;
  };
  switch (state_) {
    case State::kAwaitHello:
    case State::kAwaitChallenge:
      check_first_bytes();
      if (!whole(kGreetingBytes)) return false;
      greet(next(kGreetingBytes));
      return true;
    case State::kAwaitProof:
      if (!whole(kMacBytes)) return false;
      check_proof(next(kMacBytes));
      return true;
    case State::kAwaitReply:
      if (!whole(kReplyBytes)) return false;
      check_reply(next(kReplyBytes));
      return true;
    case State::kReady:
      return parse_frame();
    case State::kBroken:
      break;
  }
  return false;
}

// Garbage is rejected at its first byte rather than after a whole greeting.
void Channel::check_first_bytes() const {
  const std::string_view seen = input().substr(0, kMagic.size());
  if (!kMagic.starts_with(seen)) {
    reject("the other end is not lockstep",
           "use the port of lockstep's endpoint, not that of another service");
  }
}

void Channel::greet(std::string_view greeting) {
  const auto protocol = static_cast<unsigned char>(greeting[kMagic.size()]);
  peer_nonce_ = greeting.substr(kMagic.size() + 1);
  if (role_ == Role::kServer) {
    output_ += kMagic;
    output_ += static_cast<char>(kProtocol);
    output_ += own_nonce_;
  }
  if (protocol != kProtocol) {
    reject(fmt::format("the other end speaks version {} of lockstep's protocol, this one speaks {}",
                       protocol, kProtocol),
           "install the same version of lockstep on all hosts");
  }
  if (role_ == Role::kServer) {
    state_ = State::kAwaitProof;
  } else {
    output_ += proof("client");
    state_ = State::kAwaitReply;
  }
}

// "client" and "server" prevent answering a challenge with the other side's own proof.
std::string Channel::proof(std::string_view side) const {
  const bool server = role_ == Role::kServer;
  return hmac_sha256(token_,
                     {side, server ? peer_nonce_ : own_nonce_, server ? own_nonce_ : peer_nonce_});
}

void Channel::check_proof(std::string_view their_proof) {
  if (!equal_secrets(their_proof, proof("client"))) {
    output_ += kWrongToken;
    output_.append(kMacBytes, '\0');
    reject("the other end does not know the token", kTokenHelp);
  }
  output_ += kAccepted;
  output_ += proof("server");
  open_for_frames();
}

void Channel::check_reply(std::string_view reply) {
  if (reply[0] == kWrongToken) reject("the server refused our token", kTokenHelp);
  if (reply[0] != kAccepted || !equal_secrets(reply.substr(1), proof("server"))) {
    reject("the server does not know the token", kTokenHelp);
  }
  open_for_frames();
}

void Channel::open_for_frames() {
  const bool server = role_ == Role::kServer;
  send_key_ = proof(server ? "server frames" : "client frames");
  receive_key_ = proof(server ? "client frames" : "server frames");
  state_ = State::kReady;
}

std::string Channel::frame_code(const std::string& key, std::string_view header,
                                std::string_view payload) const {
  return hmac_sha256(key, {header, payload});  // the header contains the length
}

bool Channel::parse_frame() {
  const bool plain = role_ == Role::kPlain;
  const size_t numbers = plain ? kLengthBytes : kLengthBytes + kSequenceBytes;
  const size_t header = plain ? numbers : numbers + kMacBytes;
  const std::string_view in = input();
  if (in.size() < kLengthBytes) return false;
  const size_t length = get_integer(in, kLengthBytes);
  if (length > max_payload_) {
    reject(fmt::format("the other end announces {} bytes; at most {} are allowed", length,
                       max_payload_),
           "use the same version of lockstep on both sides");
  }
  if (in.size() < header + length) return false;
  const std::string_view payload = in.substr(header, length);
  if (!plain) {
    const uint64_t sequence = get_integer(in.substr(kLengthBytes), kSequenceBytes);
    const std::string code = frame_code(receive_key_, in.substr(0, numbers), payload);
    if (sequence != received_ || !equal_secrets(code, in.substr(numbers, kMacBytes))) {
      reject("a message was changed or injected in transit",
             "check who else has access to this network");
    }
  }
  ++received_;
  payloads_.emplace_back(payload);
  input_done_ += header + length;
  return true;
}

std::optional<std::string> Channel::take() {
  if (payloads_.empty()) return std::nullopt;
  std::string payload = std::move(payloads_.front());
  payloads_.pop_front();
  return payload;
}

void Channel::send(std::string_view payload) {
  if (!ready() || payload.size() > max_payload_) {
    throw Error(Code::kInternal,
                fmt::format("a message of {} bytes cannot be sent (at most {}){}", payload.size(),
                            max_payload_, ready() ? "" : ": the connection is not open"));
  }
  std::string header;
  put_integer(header, payload.size(), kLengthBytes);
  if (role_ != Role::kPlain) {
    put_integer(header, sent_, kSequenceBytes);
    header += frame_code(send_key_, header, payload);
  }
  ++sent_;
  output_ += header;
  output_ += payload;
}

void Channel::wrote(size_t count) {
  output_done_ += count;
  drop_front(output_, output_done_);
}

}  // namespace lockstep
