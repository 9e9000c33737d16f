#include "net/store.hpp"

#include <fmt/format.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <thread>
#include <vector>

#include "net/hub.hpp"
#include "net/socket.hpp"
#include "net_support.hpp"

namespace lockstep::test::store_test {
namespace {

// One kind of store and how to get two views of the same one.
struct Kind {
  std::string name;
  StoreAddress address;  // neither name nor host: inside this process
};

class AnyStore : public testing::TestWithParam<Kind> {
 protected:
  void SetUp() override {
    StoreAddress address = GetParam().address;
    if (address.unix_name.empty() && address.host.empty()) {
      local_ = make_local_store();
      return;
    }
    if (!address.unix_name.empty()) address.unix_name = unique_name("store");
    server_ = std::make_unique<StoreServer>(address);
    address.port = server_->port();
    address_ = address;
  }

  std::shared_ptr<Store> view() const {
    return local_ ? local_ : connect_store(address_, in_ms(5000));
  }

  std::shared_ptr<Store> local_;
  std::unique_ptr<StoreServer> server_;
  StoreAddress address_;
};

TEST_P(AnyStore, WhatOneSetsAnotherGets) {
  const auto one = view();
  const auto two = view();
  const std::string bytes("\0\xff\n and text", 12);
  one->set("key", bytes);
  EXPECT_EQ(two->get("key", in_ms(5000)), bytes);
  EXPECT_EQ(one->get("key", in_ms(5000)), bytes);
  EXPECT_EQ(two->get("key", 0), bytes) << "a value that is there needs no time";
  two->set("empty", "");
  EXPECT_EQ(one->get("empty", in_ms(5000)), "");
}

TEST_P(AnyStore, AGetWaitsForTheSet) {
  const auto one = view();
  const auto two = view();
  std::thread setter([&] {
    pause_ms(50);
    two->set("late", "value");
  });
  EXPECT_EQ(one->get("late", in_ms(10'000)), "value");
  setter.join();
}

TEST_P(AnyStore, ManyWaitForOneKey) {
  std::atomic<int> right = 0;
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 5; ++rank) {
    ranks.emplace_back([&, rank] {
      const auto store = view();
      store->set("rank " + std::to_string(rank), std::to_string(rank * rank));
      for (int peer = 0; peer < 5; ++peer) {
        right += store->get("rank " + std::to_string(peer), in_ms(20'000)) ==
                 std::to_string(peer * peer);
      }
    });
  }
  for (auto& rank : ranks) rank.join();
  EXPECT_EQ(right, 25);
}

TEST_P(AnyStore, ThreadsOfOneViewDoNotWaitForEachOther) {
  const auto store = view();
  std::string first;
  std::thread waiting([&] { first = store->get("first", in_ms(20'000)); });
  std::thread also([&] { EXPECT_EQ(store->get("first", in_ms(20'000)), "1"); });
  pause_ms(50);
  store->set("second", "2");
  EXPECT_EQ(store->get("second", in_ms(5000)), "2");
  store->set("first", "1");
  waiting.join();
  also.join();
  EXPECT_EQ(first, "1");
}

TEST_P(AnyStore, SettingTwiceIsAnErrorAndKeepsTheFirst) {
  const auto store = view();
  store->set("key", "first");
  expect_error(Code::kRendezvous, {"\"key\"", "already set"}, [&] { store->set("key", "second"); });
  EXPECT_EQ(store->get("key", in_ms(5000)), "first");
}

TEST_P(AnyStore, TheDeadlineNamesTheKeyAndTheStoreGoesOn) {
  const auto store = view();
  const int64_t before = monotonic_ns();
  expect_error(Code::kRendezvous, {"\"nobody/sets me\""},
               [&] { store->get("nobody/sets me", in_ms(150)); });
  EXPECT_GE(monotonic_ns() - before, 150'000'000);
  EXPECT_LT(monotonic_ns() - before, 3'000'000'000);
  store->set("other", "x");
  EXPECT_EQ(store->get("other", in_ms(5000)), "x");
}

TEST_P(AnyStore, SizesAreBounded) {
  const auto store = view();
  const std::string longest_key(kMaxKeyBytes, 'k');
  const std::string largest(kMaxValueBytes, 'v');
  store->set(longest_key, largest);
  EXPECT_EQ(store->get(longest_key, in_ms(20'000)), largest);
  expect_error(Code::kRendezvous, {"1025 bytes"},
               [&] { store->set(std::string(kMaxKeyBytes + 1, 'k'), "v"); });
  expect_error(Code::kRendezvous, {"0 bytes"}, [&] { store->get("", in_ms(100)); });
  expect_error(Code::kRendezvous, {"\"big\"", "1048577 bytes"},
               [&] { store->set("big", largest + "v"); });
  EXPECT_EQ(store->get(longest_key, in_ms(20'000)).size(), kMaxValueBytes);
}

TEST_P(AnyStore, PrefixesKeepUsersApart) {
  const auto store = view();
  const auto a = make_prefix_store(store, "a");
  const auto ab = make_prefix_store(store, "a/b");
  a->set("b/c", "from a");
  ab->set("c", "from a/b");
  store->set("c", "from the store");
  EXPECT_EQ(a->get("b/c", in_ms(5000)), "from a");
  EXPECT_EQ(ab->get("c", in_ms(5000)), "from a/b");
  EXPECT_EQ(store->get("c", in_ms(5000)), "from the store");
  expect_error(Code::kRendezvous, {"already set"}, [&] { a->set("b/c", "again"); });
}

INSTANTIATE_TEST_SUITE_P(Kinds, AnyStore,
                         testing::Values(Kind{"Local", {}}, Kind{"Unix", {"yes", "", 0, ""}},
                                         Kind{"Tcp4", {"", "127.0.0.1", 0, kToken}},
                                         Kind{"Tcp6", {"", "::1", 0, kToken}},
                                         Kind{"TcpName", {"", "localhost", 0, kToken}}),
                         [](const auto& kind) { return kind.param.name; });

TEST(StoreOfSeveralProcesses, WorksOverAUnixSocket) {
  const StoreAddress address{unique_name("processes"), "", 0, ""};
  std::vector<pid_t> children;
  for (int rank = 1; rank < 4; ++rank) {
    const pid_t child = ::fork();
    if (child == 0) {
      int result = 1;
      try {
        const auto store = connect_store(address, in_ms(20'000));  // before there is a server
        store->set("child " + std::to_string(rank), "here");
        result = store->get("go", in_ms(20'000)) == "now" ? 0 : 2;
      } catch (const std::exception& error) {
        std::fprintf(stderr, "%s\n", error.what());
      }
      ::_exit(result);
    }
    children.push_back(child);
  }
  pause_ms(100);
  const StoreServer server(address);
  EXPECT_EQ(server.port(), 0);
  const auto store = connect_store(address, in_ms(5000));
  for (int rank = 1; rank < 4; ++rank) {
    EXPECT_EQ(store->get("child " + std::to_string(rank), in_ms(20'000)), "here");
  }
  store->set("go", "now");
  for (const pid_t child : children) {
    int status = 0;
    ::waitpid(child, &status, 0);
    EXPECT_EQ(status, 0);
  }
}

TEST(StoreServer, ANameInUseIsAnError) {
  const StoreAddress unix_address{unique_name("twice"), "", 0, ""};
  const StoreServer first(unix_address);
  expect_error(Code::kRendezvous, {unix_address.unix_name, "in use"},
               [&] { const StoreServer second(unix_address); });
  StoreAddress tcp{"", "127.0.0.1", 0, kToken};
  const StoreServer third(tcp);
  tcp.port = third.port();
  expect_error(Code::kRendezvous, {"127.0.0.1:" + std::to_string(tcp.port), "another port"},
               [&] { const StoreServer fourth(tcp); });
  expect_error(Code::kRendezvous, {"192.0.2.1:0", "not an address of this host"}, [&] {
    const StoreServer foreign({"", "192.0.2.1", 0, kToken});
  });
  expect_error(Code::kRendezvous, {"1 to 107"}, [&] {
    const StoreServer longest({std::string(108, 'n'), "", 0, ""});
  });
}

TEST(StoreServer, TcpWithoutATokenIsRefused) {
  expect_error(Code::kRendezvous, {"token", "LOCKSTEP_TOKEN"}, [] {
    const StoreServer server({"", "127.0.0.1", 0, ""});
  });
}

TEST(StoreServer, APortIsFreeAgainAtOnce) {
  StoreAddress address{"", "127.0.0.1", 0, kToken};
  for (int round = 0; round < 5; ++round) {
    const StoreServer server(address);
    address.port = server.port();
    const auto store = connect_store(address, in_ms(5000));
    store->set("round", std::to_string(round));
  }
}

TEST(StoreClient, WaitsForAServerThatComesLater) {
  StoreAddress address{"", "127.0.0.1", 0, kToken};
  address.port = StoreServer(address).port();  // free again
  std::unique_ptr<StoreServer> server;
  std::thread late([&] {
    pause_ms(300);
    server = std::make_unique<StoreServer>(address);
  });
  const auto store = connect_store(address, in_ms(10'000));
  late.join();
  store->set("key", "value");
  EXPECT_EQ(store->get("key", in_ms(5000)), "value");
}

TEST(StoreClient, NobodyThereIsAnErrorAtTheDeadline) {
  StoreAddress address{"", "127.0.0.1", 0, kToken};
  address.port = StoreServer(address).port();
  const int64_t before = monotonic_ns();
  expect_error(Code::kRendezvous, {"127.0.0.1:" + std::to_string(address.port), "refused"},
               [&] { connect_store(address, in_ms(300)); });
  EXPECT_GE(monotonic_ns() - before, 200'000'000);
  EXPECT_LT(monotonic_ns() - before, 3'000'000'000);
  expect_error(Code::kRendezvous, {"Unix socket", "refused"}, [&] {
    connect_store({unique_name("nobody"), "", 0, ""}, in_ms(100));
  });
}

TEST(StoreClient, AnUnknownHostIsAnErrorAtOnce) {
  const int64_t before = monotonic_ns();
  expect_error(Code::kRendezvous, {"no-such-host.invalid", "cannot resolve"}, [] {
    connect_store({"", "no-such-host.invalid", 29500, kToken}, in_ms(600'000));
  });
  EXPECT_LT(monotonic_ns() - before, 30'000'000'000);
}

TEST(StoreClient, AWrongTokenIsAnErrorAtOnce) {
  StoreAddress address{"", "127.0.0.1", 0, kToken};
  const StoreServer server(address);
  address.port = server.port();
  address.token = "another secret";
  const int64_t before = monotonic_ns();
  expect_error(Code::kRendezvous, {"refused our token", "LOCKSTEP_TOKEN"},
               [&] { connect_store(address, in_ms(60'000)); });
  address.token = "";
  expect_error(Code::kRendezvous, {"needs a token"},
               [&] { connect_store(address, in_ms(60'000)); });
  EXPECT_LT(monotonic_ns() - before, 10'000'000'000);
}

TEST(StoreClient, AServerThatEndsIsALostConnectionAtOnce) {
  for (const std::string host : {"", "127.0.0.1"}) {
    StoreAddress address{host.empty() ? unique_name("ends") : "", host, 0, kToken};
    auto server = std::make_unique<StoreServer>(address);
    address.port = server->port();
    const auto store = connect_store(address, in_ms(5000));
    std::thread ending([&] {
      pause_ms(100);
      server.reset();
    });
    const int64_t before = monotonic_ns();
    expect_error(Code::kRendezvous, {"lost"}, [&] { store->get("never", in_ms(60'000)); });
    ending.join();
    expect_error(Code::kRendezvous, {"cannot reach"}, [&] { store->set("key", "value"); });
    EXPECT_LT(monotonic_ns() - before, 10'000'000'000);
  }
}

TEST(StoreClient, AServerOfAnotherKindIsNamedAtOnce) {
  const Socket listener = listen_tcp({"127.0.0.1", 0});
  const int port = bound_port(listener);
  std::thread http([&] {
    pollfd item{listener.get(), POLLIN, 0};
    ::poll(&item, 1, 10'000);
    const Socket peer(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    const std::string answer = "HTTP/1.1 400 Bad Request\r\n\r\n";
    EXPECT_GT(::send(peer.get(), answer.data(), answer.size(), MSG_NOSIGNAL), 0);
    pause_ms(300);
  });
  expect_error(Code::kRendezvous, {"127.0.0.1:" + std::to_string(port), "not lockstep"}, [&] {
    connect_store({"", "127.0.0.1", port, kToken}, in_ms(60'000));
  });
  http.join();
}

TEST(StoreClient, AServerThatNeverAnswersIsAnErrorAtTheDeadline) {
  const Socket listener = listen_tcp({"127.0.0.1", 0});  // the kernel accepts, nobody else does
  expect_error(Code::kRendezvous, {"does not answer"}, [&] {
    connect_store({"", "127.0.0.1", bound_port(listener), kToken}, in_ms(300));
  });
}

// Both directions: another user's client is dropped, and another user's server is not trusted.
TEST(UnixStore, IsForOneUserOnly) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs root, to become another user";
  const StoreAddress ours{unique_name("ours"), "", 0, ""};
  const StoreAddress theirs{unique_name("theirs"), "", 0, ""};
  int ready[2];
  int done[2];
  ASSERT_EQ(::pipe(ready), 0);
  ASSERT_EQ(::pipe(done), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    int result = 1;
    try {
      if (::setuid(65534) != 0) ::_exit(3);
      const StoreServer server(theirs);
      if (::write(ready[1], "x", 1) != 1) ::_exit(4);
      char byte = 0;
      if (::read(done[0], &byte, 1) != 1) ::_exit(5);
      try {
        connect_store(ours, in_ms(5000))->set("stolen", "value");
      } catch (const Error& error) {
        result = error.code() == Code::kRendezvous ? 0 : 6;
      }
    } catch (const std::exception& error) {
      std::fprintf(stderr, "child: %s\n", error.what());
    }
    ::_exit(result);
  }
  const StoreServer server(ours);
  char byte = 0;
  ASSERT_EQ(::read(ready[0], &byte, 1), 1);
  expect_error(Code::kRendezvous, {theirs.unix_name, "another user"},
               [&] { connect_store(theirs, in_ms(5000)); });
  ASSERT_EQ(::write(done[1], "x", 1), 1);
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  const auto store = connect_store(ours, in_ms(5000));
  store->set("stolen", "not");  // nobody has
  for (const int fd : {ready[0], ready[1], done[0], done[1]}) ::close(fd);
}

// More than may be unauthenticated at a time, all at once; some leave while they wait.
TEST(StoreServer, ServesManyThatComeAtOnce) {
  constexpr int kThreads = 8;
  constexpr int kEach = 40;
  static_assert(kThreads * kEach > Hub::kMaxUnauthenticated);
  const StoreServer server({.unix_name = "", .host = "127.0.0.1", .port = 0, .token = kToken});
  const auto connect = [&] {
    return connect_store({"", "127.0.0.1", server.port(), kToken}, in_ms(20'000));
  };
  std::atomic<int> ready{0};
  std::atomic<int> served{0};
  std::vector<std::thread> threads;
  for (int thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&, thread] {
      std::vector<std::shared_ptr<Store>> clients;
      for (int i = 0; i < kEach; ++i) clients.push_back(connect());
      for (int i = 0; i < kEach; ++i) {
        clients[static_cast<size_t>(i)]->set(fmt::format("{}/{}", thread, i), "here");
      }
      for (int i = 2; i < 5; ++i) {
        EXPECT_THROW(clients[static_cast<size_t>(i)]->get("all", 0), Error) << "hangs up";
      }
      ++ready;
      served += clients[1]->get("all", in_ms(20'000)) == "here" ? 1 : 0;
    });
  }
  while (ready < kThreads) std::this_thread::yield();
  connect()->set("all", "here");
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(served, kThreads);
}

TEST(StoreServer, IsFullAtABound) {
  const StoreAddress address{unique_name("full"), "", 0, ""};
  const StoreServer server(address);
  const auto store = connect_store(address, in_ms(5000));
  const std::string value(kMaxValueBytes, 'v');
  int taken = 0;
  expect_error(Code::kRendezvous, {"no room"}, [&] {
    for (; taken < 400; ++taken) store->set("key " + std::to_string(taken), value);
  });
  EXPECT_EQ(taken, 255);
  EXPECT_EQ(store->get("key 0", in_ms(5000)), value);
}

TEST(StoreAddressText, IsParsed) {
  EXPECT_EQ(parse_store_address("node1:29500", "t").host, "node1");
  EXPECT_EQ(parse_store_address("[fd00::1]:80", "t").host, "fd00::1");
  EXPECT_EQ(parse_store_address("[fd00::1]:80", "t").port, 80);
  EXPECT_EQ(endpoint_text("fd00::1", 80), "[fd00::1]:80");
  EXPECT_EQ(endpoint_text("node1", 80), "node1:80");
  for (const char* bad : {"", "node1", ":80", "node1:", "node1:x", "node1:80x", "node1:65536",
                          "node1:-1", "fd00::1", "fd00::1:80", "[]:80"}) {
    expect_error(Code::kUsage, {bad, "host:port"}, [&] { parse_store_address(bad, "t"); });
  }
}

}  // namespace
}  // namespace lockstep::test::store_test
