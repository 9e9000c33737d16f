// An authenticated connection with somebody in between. The input is what that somebody does:
// deliver, change, drop or repeat bytes of either side. Whatever arrives was sent, in order.

#include "net/channel.hpp"

#include "fuzz.hpp"

namespace lockstep::fuzz {
namespace {

constexpr size_t kMaxPayload = 256;
constexpr int kMostMoves = 200;

struct Side {
  Channel channel;
  std::vector<std::string> sent = {};
  size_t received = 0;
  bool open = true;

  explicit Side(Channel made) : channel(std::move(made)) {}
};

void deliver(Side& from, Side& to, std::string_view bytes) {
  if (!to.open) return;
  to.open = accepts([&] { to.channel.feed(bytes); });
  while (auto payload = to.channel.take()) {
    require(to.received < from.sent.size() && from.sent[to.received] == *payload,
            "what arrives was sent, in this order");
    ++to.received;
  }
}

void transfer(Input& input, Side& from, Side& to, bool& tampered) {
  const std::string_view output = from.channel.output();
  const size_t count = std::min<size_t>(input.byte(), output.size());
  std::string bytes(output.substr(0, count));
  switch (input.byte() % 8) {
    case 0: {  // changed on its way
      const uint8_t flip = input.byte();
      if (!bytes.empty()) bytes[input.byte() % bytes.size()] ^= static_cast<char>(flip);
      tampered = tampered || (flip != 0 && !bytes.empty());
      break;
    }
    case 1:  // repeated
      deliver(from, to, bytes);
      tampered = tampered || !bytes.empty();
      break;
    case 2:  // something else in front of it
      bytes.insert(0, input.take(input.byte()));
      tampered = true;
      break;
    case 3:  // lost
      tampered = tampered || !bytes.empty();
      bytes.clear();
      break;
    case 4:
      if (from.channel.ready() && from.open) {
        from.sent.emplace_back(input.take(input.byte()));
        from.channel.send(from.sent.back());
      }
      return;
    default:
      break;
  }
  from.channel.wrote(count);
  deliver(from, to, bytes);
}

void between(Input input) {
  Side client(Channel::client("the same secret on both sides", kMaxPayload));
  Side server(Channel::server("the same secret on both sides", kMaxPayload));
  bool tampered = false;
  for (int i = 0; i < kMostMoves && !input.empty(); ++i) {
    const bool to_server = input.byte() % 2 == 0;
    transfer(input, to_server ? client : server, to_server ? server : client, tampered);
  }
  if (tampered) return;
  for (int i = 0; i < 4; ++i) {
    for (auto [from, to] : {std::pair(&client, &server), std::pair(&server, &client)}) {
      const std::string rest(from->channel.output());
      from->channel.wrote(rest.size());
      deliver(*from, *to, rest);
    }
  }
  require(client.open && server.open && client.channel.ready() && server.channel.ready(),
          "without interference the sides accept each other");
  require(client.received == server.sent.size() && server.received == client.sent.size(),
          "without interference everything arrives");
}

// A side that gets the input itself, which does not know the secret.
void strange(std::string_view bytes, Channel channel) {
  accepts([&] {
    channel.feed(bytes);
    require(!channel.ready() && !channel.take(), "nobody enters without the secret");
  });
}

void plain(std::string_view bytes) {
  Channel channel = Channel::plain(kMaxPayload);
  size_t taken = 0;
  accepts([&] {
    // In two pieces, as a socket may give it.
    channel.feed(bytes.substr(0, bytes.size() / 2));
    channel.feed(bytes.substr(bytes.size() / 2));
  });
  while (auto payload = channel.take()) {
    require(payload->size() <= kMaxPayload, "payloads are bounded");
    taken += payload->size() + 4;
  }
  require(taken <= bytes.size(), "payloads come from bytes that arrived");
}

}  // namespace
}  // namespace lockstep::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace lockstep;
  using namespace lockstep::fuzz;
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  between(Input(data, size));
  strange(bytes, Channel::server("a secret that nobody knows", kMaxPayload));
  strange(bytes, Channel::client("a secret that nobody knows", kMaxPayload));
  plain(bytes);
  return 0;
}
