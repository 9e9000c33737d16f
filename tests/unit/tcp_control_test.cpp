#include "comm/network/tcp_control.hpp"

#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <future>

#include "base/file.hpp"
#include "comm/backend.hpp"
#include "comm/network/network_core.hpp"
#include "net_support.hpp"

namespace lockstep::test::tcp_control_test {
namespace {

using Frame = TcpControl::Frame;

constexpr std::array kFromRank0 = {0};
constexpr std::array kFromRank1 = {1};

// Two ends of a connection.
std::array<Socket, 2> connected() {
  std::array<int, 2> ends{};
  EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends.data()), 0);
  return {Socket(ends[0]), Socket(ends[1])};
}

// The link of one of two ranks.
std::unique_ptr<TcpControl> link_of(int rank, Socket socket) {
  std::vector<Socket> sockets(2);
  sockets[static_cast<size_t>(1 - rank)] = std::move(socket);
  return std::make_unique<TcpControl>(rank, std::move(sockets));
}

std::string payload_of(int number) {
  return std::to_string(number) + std::string(100, 'x');
}

void expect_frames(TcpControl& link, int count) {
  for (int number = 0; number < count; ++number) {
    const auto got = link.gather(Frame::kMessage, kFromRank0, in_ms(20'000));
    const auto* frames = std::get_if<std::vector<std::string>>(&got);
    ASSERT_NE(frames, nullptr) << "frame " << number << " of " << count;
    ASSERT_EQ(frames->front(), payload_of(number));
  }
}

// As a rank does that is stopped for a while: what it has not read is more than a connection holds.
TEST(TcpControl, APeerThatReadsLateGetsEveryFrameInOrder) {
  constexpr int kFrames = 20'000;
  auto [here, there] = connected();
  const auto sender = link_of(0, std::move(here));
  for (int number = 0; number < kFrames; ++number) {
    sender->send(1, Frame::kMessage, payload_of(number));
  }
  const auto receiver = link_of(1, std::move(there));
  expect_frames(*receiver, kFrames);
}

TEST(TcpControl, WhatIsNotYetReadAtTheEndStillArrives) {
  constexpr int kFrames = 20'000;
  auto [here, there] = connected();
  auto sender = link_of(0, std::move(here));
  for (int number = 0; number < kFrames; ++number) {
    sender->send(1, Frame::kMessage, payload_of(number));
  }
  const auto receiver = link_of(1, std::move(there));
  sender.reset();
  expect_frames(*receiver, kFrames);
  const auto trouble = receiver->find_trouble(in_ms(20'000));
  EXPECT_EQ(trouble.kind, TcpControl::Trouble::Kind::kGone);
  EXPECT_TRUE(trouble.left) << "its last word arrived, too";
}

TEST(TcpControl, WhatAPeerThatEndedHasNotReadIsDropped) {
  auto [here, there] = connected();
  const auto link = link_of(0, std::move(here));
  for (int number = 0; number < 20'000; ++number) {
    link->send(1, Frame::kMessage, payload_of(number));
  }
  there.close();
  EXPECT_EQ(link->find_trouble(in_ms(20'000)).kind, TcpControl::Trouble::Kind::kGone);
  link->send(1, Frame::kMessage, payload_of(0));
}

// A rank of another group name, or of another program: the call fails with a code.
TEST(TcpControl, BytesThatAreNoCallAreAnErrorThatNamesTheirRank) {
  if (find_module(kGlooModule.file).empty()) GTEST_SKIP() << "no gloo here";
  const auto store = make_local_store();
  for (const std::string& said : {std::string("short"), std::string(sizeof(Fingerprint), '\xff')}) {
    const auto shared = make_prefix_store(store, said);
    auto other = std::async(std::launch::async, [&] {
      const Group group = Group::world(1, 2);
      TcpRendezvous met = rendezvous(*shared, group, "127.0.0.1", in_ms(20'000));
      TcpControl link(1, std::move(met.sockets));
      const TransportData data(*find_backend("gloo"), group, "127.0.0.1", link, in_ms(20'000));
      link.send(0, Frame::kFingerprint, said);
      link.find_trouble(in_ms(20'000));  // until rank 0 has ended
    });
    {
      const auto backend = make_network_backend("gloo", {.store = shared,
                                                         .rank = 0,
                                                         .size = 2,
                                                         .address = "127.0.0.1",
                                                         .deadline_ns = in_ms(20'000)});
      expect_error(Code::kInternal, {"what rank 1 has sent is not a call"}, [&] {
        backend->barrier({in_ms(20'000), ""});
      });
    }
    other.get();
  }
}

// The exit code of what a child process did.
template <class Body>
int in_child(Body&& body) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(body());
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST(OpenFiles, ALimitIsRaisedAsFarAsItIsNeededAndMayBe) {
  const auto limited_to = [](rlim_t soft, rlim_t hard) {
    const rlimit limit{soft, hard};
    ::setrlimit(RLIMIT_NOFILE, &limit);
  };
  const auto limit = [] {
    rlimit now{};
    ::getrlimit(RLIMIT_NOFILE, &now);
    return now.rlim_cur;
  };
  EXPECT_EQ(in_child([&] {
              limited_to(512, 1024);
              const bool few = make_room_for_files(10);
              const bool unchanged = limit() == 512;
              const bool many = make_room_for_files(600);
              const bool raised = limit() > 600 && limit() < 1024;
              const bool too_many = make_room_for_files(2000);
              return few && unchanged && many && raised && !too_many && limit() == 1024 ? 0 : 1;
            }),
            0);
}

// As ranks of a large world, which inherit the usual limit of 1024, or of a small one here.
TEST(OpenFiles, RanksRaiseTheirLimitForAWorldOverTcp) {
  if (find_module(kGlooModule.file).empty()) GTEST_SKIP() << "no gloo here";
  constexpr int kRanks = 4;
  StoreAddress address;
  address.unix_name = unique_name("files");
  std::vector<pid_t> children;
  for (int rank = 0; rank < kRanks; ++rank) {
    children.push_back(::fork());
    if (children.back() != 0) continue;
    const int free = ::dup(0);
    const rlimit limit{static_cast<rlim_t>(free) + 16, 4096};
    ::close(free);
    int code = 1;
    try {
      ::setrlimit(RLIMIT_NOFILE, &limit);
      std::unique_ptr<StoreServer> server;
      if (rank == 0) server = std::make_unique<StoreServer>(address);
      const auto backend =
          make_network_backend("gloo", {.store = connect_store(address, in_ms(20'000)),
                                        .rank = rank,
                                        .size = kRanks,
                                        .address = "127.0.0.1",
                                        .deadline_ns = in_ms(20'000)});
      backend->barrier({in_ms(20'000), ""});
      backend->barrier({in_ms(20'000), ""});
      code = 0;
    } catch (const std::exception& error) {
      ::write(STDERR_FILENO, error.what(), std::string_view(error.what()).size());
    }
    ::_exit(code);
  }
  for (const pid_t child : children) {
    int status = 0;
    ::waitpid(child, &status, 0);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  }
}

}  // namespace
}  // namespace lockstep::test::tcp_control_test
