#include <poll.h>
#include <sys/socket.h>

#include <atomic>
#include <functional>
#include <random>
#include <thread>
#include <vector>

#include "net/channel.hpp"
#include "net/connection.hpp"
#include "net/hub.hpp"
#include "net/store.hpp"
#include "net_support.hpp"

namespace lockstep::test::store_abuse_test {
namespace {

// What an unauthenticated peer does to a server's port while a healthy job uses it.
struct Abuse {
  std::string name;
  std::function<void(int port)> act;
};

Socket raw_connection(int port) {
  int error = 0;
  Socket socket = start_connect(resolve({"127.0.0.1", port}).at(0), error);
  pollfd item{socket.get(), POLLOUT, 0};
  ::poll(&item, 1, 5000);
  return socket;
}

void send_raw(const Socket& socket, const std::string& bytes) {
  for (size_t done = 0; done < bytes.size();) {
    pollfd item{socket.get(), POLLOUT, 0};
    if (::poll(&item, 1, 2000) <= 0) return;
    const ssize_t count =
        ::send(socket.get(), bytes.data() + done, bytes.size() - done, MSG_NOSIGNAL);
    if (count <= 0) return;  // the server hung up, as it should
    done += static_cast<size_t>(count);
  }
}

// Whether the server hangs up within this time.
bool hung_up(const Socket& socket, int64_t milliseconds) {
  const int64_t until = in_ms(milliseconds);
  char buffer[4096];
  while (monotonic_ns() < until) {
    pollfd item{socket.get(), POLLIN, 0};
    ::poll(&item, 1, 50);
    const ssize_t count = ::recv(socket.get(), buffer, sizeof buffer, 0);
    if (count == 0 || (count < 0 && errno != EAGAIN)) return true;
  }
  return false;
}

// A greeting as a real client sends it.
std::string hello() {
  return std::string(Channel::client("anything", 100).output());
}

std::vector<Abuse> abuses() {
  return {
      {"Http",
       [](int port) {
         const Socket socket = raw_connection(port);
         send_raw(socket, "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n");
         EXPECT_TRUE(hung_up(socket, 4000)) << "rubbish is known by its first byte";
       }},
      {"RandomBytes",
       [](int port) {
         std::mt19937 generator(7);
         for (int i = 0; i < 50; ++i) {
           const Socket socket = raw_connection(port);
           std::string bytes(1 + generator() % 5000, '\0');
           for (auto& byte : bytes) byte = static_cast<char>(generator());
           bytes[0] = '\x80';
           send_raw(socket, bytes);
           EXPECT_TRUE(hung_up(socket, 4000));
         }
       }},
      {"HugeLengthWithoutProof",
       [](int port) {
         const Socket socket = raw_connection(port);
         send_raw(socket, hello() + std::string(32, '\xff') + std::string(1 << 20, '\xff'));
         EXPECT_TRUE(hung_up(socket, 4000));
       }},
      {"OneByteAndHold",
       [](int port) {
         const Socket socket = raw_connection(port);
         send_raw(socket, "l");
         EXPECT_FALSE(hung_up(socket, 3000));
         EXPECT_TRUE(hung_up(socket, 6000)) << "five seconds for the proof";
       }},
      {"HalfOpen",
       [](int port) {
         const Socket socket = raw_connection(port);
         ::shutdown(socket.get(), SHUT_WR);
         EXPECT_TRUE(hung_up(socket, 4000));
         const Socket silent = raw_connection(port);
         EXPECT_TRUE(hung_up(silent, 9000));
       }},
      {"ConnectAndLeave",
       [](int port) {
         for (int i = 0; i < 200; ++i) raw_connection(port);
       }},
      {"ResetAfterHello",
       [](int port) {
         for (int i = 0; i < 50; ++i) {
           const Socket socket = raw_connection(port);
           send_raw(socket, hello());
           const linger now{1, 0};
           ::setsockopt(socket.get(), SOL_SOCKET, SO_LINGER, &now, sizeof now);
         }
       }},
      {"ManyHolders",
       [](int port) {
         std::vector<Socket> holders;
         for (int i = 0; i < 3 * Hub::kMaxUnauthenticated; ++i) {
           holders.push_back(raw_connection(port));
           send_raw(holders.back(), "lock");
         }
         EXPECT_TRUE(hung_up(holders.front(), 3000)) << "the oldest make room";
       }},
      {"WrongToken",
       [](int port) {
         for (int i = 0; i < 10; ++i) {
           expect_error(Code::kRendezvous, {"token"}, [&] {
             connect_store({"", "127.0.0.1", port, "wrong"}, in_ms(20'000));
           });
         }
       }},
  };
}

class StoreUnderAbuse : public testing::TestWithParam<Abuse> {};

TEST_P(StoreUnderAbuse, AHealthyJobGoesOn) {
  StoreAddress address{"", "127.0.0.1", 0, kToken};
  const StoreServer server(address);
  address.port = server.port();
  std::atomic<bool> over = false;
  std::thread intruder([&] {
    GetParam().act(server.port());
    over = true;
  });
  // New clients all the while, each with a set and a get: none may be slow.
  int64_t slowest_ns = 0;
  int clients = 0;
  const auto old_client = connect_store(address, in_ms(20'000));
  for (; !over || clients < 5; ++clients) {
    const int64_t before = monotonic_ns();
    const auto store = connect_store(address, in_ms(20'000));
    const std::string key = "client " + std::to_string(clients);
    store->set(key, "value");
    EXPECT_EQ(old_client->get(key, in_ms(20'000)), "value");
    slowest_ns = std::max(slowest_ns, monotonic_ns() - before);
    pause_ms(1);
  }
  intruder.join();
  EXPECT_LT(slowest_ns, 2'500'000'000);
  RecordProperty("healthy_clients", clients);
  RecordProperty("slowest_us", static_cast<int>(slowest_ns / 1000));
}

INSTANTIATE_TEST_SUITE_P(Faults, StoreUnderAbuse, testing::ValuesIn(abuses()),
                         [](const auto& kind) { return kind.param.name; });

// Proves the token, asks again and again, and reads no answer, until sending fails.
bool is_dropped_when_it_never_reads(int port, const std::string& key) {
  const Socket socket = raw_connection(port);
  Channel channel = Channel::client(kToken, kMaxStorePayload);
  char buffer[4096];
  for (const int64_t until = in_ms(60'000); monotonic_ns() < until;) {
    if (!channel.ready()) {
      const ssize_t count = ::recv(socket.get(), buffer, sizeof buffer, 0);
      if (count > 0) channel.feed({buffer, static_cast<size_t>(count)});
    } else {
      channel.send(encode({.verb = StoreVerb::kGet, .key = key}));
    }
    const std::string_view output = channel.output();
    if (output.empty()) continue;
    const ssize_t count = ::send(socket.get(), output.data(), output.size(), MSG_NOSIGNAL);
    if (count < 0 && errno != EAGAIN) return true;
    if (count > 0) channel.wrote(static_cast<size_t>(count));
    pause_ms(1);
  }
  return false;
}

// Those who know the token are still bounded in what they can ask for.
TEST(StoreServer, DropsAKnownClientThatBreaksTheRules) {
  StoreAddress address{"", "127.0.0.1", 0, kToken};
  const StoreServer server(address);
  const Endpoint endpoint{"127.0.0.1", server.port()};
  const auto open = [&] { return Connection::open_tcp(endpoint, kToken, 1 << 24, in_ms(5000)); };
  const auto dropped = [](Connection& connection) {
    try {
      while (connection.receive(in_ms(5000))) {
      }
    } catch (const ConnectionLost&) {
      return true;
    }
    return false;
  };
  std::vector<std::string> bad = {"",
                                  "x",
                                  std::string(3, '\0'),
                                  std::string("\1\0\0value", 8),
                                  std::string("\2\1\0kvalue", 9),
                                  std::string("\3\1\0k", 4),
                                  std::string("\2\xff\xffk", 4),
                                  std::string(kMaxStorePayload + 1, 'x')};
  for (const auto& payload : bad) {
    Connection connection = open();
    connection.post(payload);
    EXPECT_TRUE(dropped(connection)) << payload.size() << " bytes";
  }
  // A second request before the answer to the first.
  Connection hasty = open();
  hasty.post(encode({.verb = StoreVerb::kGet, .key = "never"}));
  hasty.post(encode({.verb = StoreVerb::kGet, .key = "never"}));
  EXPECT_TRUE(dropped(hasty));
  address.port = server.port();
  const auto store = connect_store(address, in_ms(5000));
  store->set("big", std::string(kMaxValueBytes, 'v'));
  EXPECT_TRUE(is_dropped_when_it_never_reads(server.port(), "big"));
  EXPECT_EQ(store->get("big", in_ms(5000)).size(), kMaxValueBytes);
}

}  // namespace
}  // namespace lockstep::test::store_abuse_test
