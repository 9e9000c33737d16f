#include "net/channel.hpp"

#include <random>
#include <string>
#include <utility>

#include "net_support.hpp"

namespace lockstep::test::channel_test {
namespace {

// The channel by itself: every byte of the greeting and of a frame counts.
std::pair<Channel, Channel> greeted(const std::string& token = kToken, size_t max_payload = 1000) {
  Channel client = Channel::client(token, max_payload);
  Channel server = Channel::server(token, max_payload);
  const auto pass = [](Channel& from, Channel& to) {
    const std::string bytes(from.output());
    from.wrote(bytes.size());
    for (const char byte : bytes) to.feed({&byte, 1});  // one at a time: any division must do
  };
  pass(client, server);
  pass(server, client);
  pass(client, server);
  pass(server, client);
  return {std::move(client), std::move(server)};
}

std::string drain(Channel& channel) {
  std::string bytes(channel.output());
  channel.wrote(bytes.size());
  return bytes;
}

TEST(Channel, CarriesPayloadsBothWays) {
  auto [client, server] = greeted();
  ASSERT_TRUE(client.ready());
  ASSERT_TRUE(server.ready());
  client.send("one");
  client.send("");
  server.send(std::string(1000, 'x'));
  server.feed(drain(client));
  client.feed(drain(server));
  EXPECT_EQ(server.take(), "one");
  EXPECT_EQ(server.take(), "");
  EXPECT_EQ(server.take(), std::nullopt);
  EXPECT_EQ(client.take(), std::string(1000, 'x'));
  EXPECT_THROW(client.send(std::string(1001, 'x')), Error);
}

TEST(Channel, EveryChangedBitOfAFrameIsRefused) {
  const size_t frame_bytes = 4 + 8 + 32 + 5;
  int refused = 0;
  for (size_t bit = 0; bit < 8 * frame_bytes; ++bit) {
    auto [client, server] = greeted();
    client.send("frame");
    std::string bytes = drain(client);
    ASSERT_EQ(bytes.size(), frame_bytes);
    bytes[bit / 8] = static_cast<char>(bytes[bit / 8] ^ (1 << (bit % 8)));
    try {
      server.feed(bytes + std::string(1000, '\0'));  // a longer length must not just wait
      EXPECT_EQ(server.take(), std::nullopt) << "bit " << bit;
    } catch (const Error&) {
      ++refused;
    }
  }
  EXPECT_EQ(refused, static_cast<int>(8 * frame_bytes));
}

TEST(Channel, EveryChangedByteOfTheGreetingIsRefused) {
  for (int message = 0; message < 4; ++message) {
    for (size_t at = 0;; ++at) {
      Channel client = Channel::client(kToken, 100);
      Channel server = Channel::server(kToken, 100);
      bool refused = false;
      bool over = false;
      try {
        for (int turn = 0; turn < 4; ++turn) {
          std::string bytes = drain(turn % 2 == 0 ? client : server);
          if (turn == message) {
            over = at >= bytes.size();
            if (!over) bytes[at] = static_cast<char>(bytes[at] ^ 0x10);
          }
          (turn % 2 == 0 ? server : client).feed(bytes);
        }
      } catch (const Error&) {
        refused = true;
      }
      if (over) break;
      EXPECT_TRUE(refused) << "message " << message << ", byte " << at;
    }
  }
}

TEST(Channel, ReplayReorderAndReflectionAreRefused) {
  {
    auto [client, server] = greeted();
    client.send("pay");
    const std::string bytes = drain(client);
    server.feed(bytes);
    EXPECT_THROW(server.feed(bytes), Error) << "the same frame twice";
    EXPECT_THROW(server.feed("x"), Error) << "broken for good";
  }
  {
    auto [client, server] = greeted();
    client.send("one");
    const std::string one = drain(client);
    client.send("two");
    EXPECT_THROW(server.feed(drain(client) + one), Error);
  }
  {
    auto [client, server] = greeted();
    client.send("one");
    EXPECT_THROW(client.feed(drain(client)), Error) << "a frame sent back to its sender";
  }
  {
    auto [client, server] = greeted();
    auto [other_client, other_server] = greeted();
    client.send("one");
    EXPECT_THROW(other_server.feed(drain(client)), Error) << "a frame of another session";
  }
}

// A peer that answers a challenge with a proof it got elsewhere: another session's or the server's.
TEST(Channel, AProofServesOneSessionAndOneSide) {
  Channel client = Channel::client(kToken, 100);
  Channel server = Channel::server(kToken, 100);
  Channel second = Channel::server(kToken, 100);
  const std::string greeting = drain(client);
  server.feed(greeting);
  second.feed(greeting);
  client.feed(drain(server));
  const std::string proof = drain(client);
  EXPECT_THROW(second.feed(proof), Error) << "another server nonce";
  server.feed(proof);
  const std::string reply = drain(server);
  Channel third = Channel::server(kToken, 100);
  third.feed(greeting);
  EXPECT_THROW(third.feed(reply.substr(1)), Error) << "the server's proof as a client's";
}

TEST(Channel, AnotherTokenIsRefusedOnBothSides) {
  Channel client = Channel::client("one token", 100);
  Channel server = Channel::server("another token", 100);
  server.feed(drain(client));
  client.feed(drain(server));
  expect_error(Code::kRendezvous, {"does not know the token"}, [&] { server.feed(drain(client)); });
  expect_error(Code::kRendezvous, {"refused our token"}, [&] { client.feed(drain(server)); });
}

// A greeting as a real client sends it.
std::string hello() {
  return std::string(Channel::client("anything", 100).output());
}

TEST(Channel, RandomBytesNeverPassAndNeverCrash) {
  std::mt19937 generator(11);
  int refused = 0;
  for (int i = 0; i < 3000; ++i) {
    Channel server = Channel::server(kToken, 1000);
    std::string bytes = i % 2 == 0 ? "" : hello();
    for (size_t extra = generator() % 300 + 64; extra > 0; --extra)
      bytes += static_cast<char>(generator());
    try {
      for (size_t at = 0; at < bytes.size(); at += 7)
        server.feed(std::string_view(bytes).substr(at, 7));
    } catch (const Error&) {
      ++refused;
    }
    EXPECT_FALSE(server.ready());
  }
  EXPECT_EQ(refused, 3000);
}

}  // namespace
}  // namespace lockstep::test::channel_test
