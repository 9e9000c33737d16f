#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <filesystem>
#include <set>

#include "launch/rendezvous_messages.hpp"
#include "net/connection.hpp"
#include "net/store.hpp"
#include "rendezvous_support.hpp"

namespace lockstep::test::node_link_test {
namespace {

TEST(NodeLink, TheFirstFailureIsToldToAll) {
  auto links = start_job(3);
  links[1]->report_failure({.node_rank = 1,
                            .rank = 2,
                            .exit_code = 3,
                            .text = "exit 3\xff",
                            .restart = Restart::kSameAgain});
  for (auto& link : links) {
    const RemoteFailure failure = expect_failure(*link);
    EXPECT_EQ(failure.restart, Restart::kSameAgain);
    EXPECT_EQ(failure.node_rank, 1);
    EXPECT_EQ(failure.rank, 2);
    EXPECT_EQ(failure.exit_code, 3);
    EXPECT_EQ(failure.text.substr(0, 6), "exit 3");
  }
  links[2]->report_failure({.node_rank = 2, .rank = 5, .exit_code = 137, .text = "a victim"});
  links[0]->report_finished();
  EXPECT_FALSE(next_event(*links[0], 300));
  EXPECT_FALSE(next_event(*links[1], 0));
}

TEST(NodeLink, FinishedComesWhenAllHaveFinished) {
  auto links = start_job(3);
  links[0]->report_finished();
  links[1]->report_finished();
  links[1]->report_finished();  // twice counts once
  EXPECT_FALSE(next_event(*links[0], 300));
  links[2]->report_finished();
  for (auto& link : links) {
    const auto event = next_event(*link, 10'000);
    ASSERT_TRUE(event);
    EXPECT_EQ(event->kind, NodeEvent::Kind::kFinished);
  }
  links[0].reset();  // node 0 goes first
  EXPECT_FALSE(next_event(*links[1], 200)) << "the end of the rendezvous is no failure now";
}

// Its last words reach the others even when a launcher ends right after them.
// Every host hears of one such rank of another host, and of no more: thousands may leave so.
TEST(NodeLink, ARankThatLeavesEarlyIsToldToTheOtherHosts) {
  auto links = start_job(3);  // node 0 has rank 0, node 1 ranks 1 and 2, node 2 ranks 3 to 5
  const auto expect_left = [&](int node, int rank) {
    const auto event = next_event(*links[static_cast<size_t>(node)], 10'000);
    ASSERT_TRUE(event) << node;
    EXPECT_EQ(event->kind, NodeEvent::Kind::kLeft);
    EXPECT_EQ(event->left_rank, rank) << node;
  };
  links[1]->report_left(4);  // of another host: does not count
  links[1]->report_left(2);
  expect_left(0, 2);
  expect_left(2, 2);
  links[1]->report_left(1);
  links[2]->report_left(5);
  expect_left(0, 5);
  expect_left(1, 5);
  links[0]->report_left(0);
  expect_finish(links);
}

TEST(NodeLink, WhatALauncherSaysBeforeItEndsIsHeard) {
  for (int round = 0; round < 10; ++round) {
    for (const size_t speaker : {size_t{0}, size_t{1}}) {
      auto links = start_job(2);
      links[speaker]->report_failure(
          {.node_rank = static_cast<int>(speaker), .rank = 1, .exit_code = 9, .text = "boom"});
      links[speaker].reset();
      const RemoteFailure failure = expect_failure(*links[1 - speaker]);
      EXPECT_EQ(failure.exit_code, 9);
      EXPECT_EQ(failure.text, "boom");
    }
  }
}

TEST(NodeLink, AHostThatHangsUpIsLost) {
  auto links = start_job(3);
  const int64_t before = monotonic_ns();
  links[1].reset();
  for (const size_t other : {size_t{0}, size_t{2}}) {
    const RemoteFailure failure = expect_failure(*links[other]);
    EXPECT_EQ(failure.node_rank, 1);
    EXPECT_EQ(failure.rank, -1);
    EXPECT_NE(failure.text.find("host host1 (node 1) was lost"), std::string::npos) << failure.text;
  }
  EXPECT_LT(monotonic_ns() - before, 5'000'000'000) << "at once, not after ten seconds";
}

TEST(NodeLink, TheEndOfNodeZeroIsTheEndOfTheJob) {
  auto links = start_job(3);
  links[0].reset();
  for (const size_t other : {size_t{1}, size_t{2}}) {
    const RemoteFailure failure = expect_failure(*links[other]);
    EXPECT_EQ(failure.node_rank, 0);
    EXPECT_EQ(failure.rank, -1);
    EXPECT_EQ(failure.restart, Restart::kImpossible);
    EXPECT_NE(failure.text.find("host host0 (node 0), which coordinates the job, was lost"),
              std::string::npos)
        << failure.text;
  }
  expect_error(Code::kRendezvous, {"ended"}, [&] { links[1]->rejoin(1, in_ms(5000)); });
}

TEST(NodeLink, AFinishedHostMayLeave) {
  auto links = start_job(3);
  links[1]->report_finished();
  pause_ms(100);
  links[1].reset();
  EXPECT_FALSE(next_event(*links[0], 300));
  links[0]->report_finished();
  links[2]->report_finished();
  const auto event = next_event(*links[2], 10'000);
  ASSERT_TRUE(event);
  EXPECT_EQ(event->kind, NodeEvent::Kind::kFinished);
}

// A launcher in another process, so that it can be stopped or killed.
pid_t fork_host(const RendezvousOptions& options, const NodeOffer& offer) {
  const pid_t child = ::fork();
  if (child == 0) {
    int result = 1;
    try {
      const auto link = NodeLink::join(options, offer);
      const auto event = next_event(*link, 60'000);
      const bool failed = event && event->kind == NodeEvent::Kind::kFailed;
      result = failed && event->failure->rank == -1 ? 0 : 2;
    } catch (const std::exception& error) {
      std::fprintf(stderr, "child: %s\n", error.what());
    }
    ::_exit(result);
  }
  return child;
}

int wait_for(pid_t child) {
  int status = 0;
  ::waitpid(child, &status, 0);
  return status;
}

TEST(NodeLink, ASilentHostIsLostInTimeOnBothSides) {
  auto options = options_for(2, free_port());
  options.lost_after_ns = 1'500'000'000;
  const pid_t child = fork_host(options, offer_of("stopped", 1));
  options.serve = true;
  const auto link = NodeLink::join(options, offer_of("zero"));
  EXPECT_FALSE(next_event(*link, 3000)) << "a healthy host gives signs of life";
  ::kill(child, SIGSTOP);
  const int64_t before = monotonic_ns();
  const RemoteFailure failure = expect_failure(*link);
  const int64_t took_ns = monotonic_ns() - before;
  EXPECT_EQ(failure.node_rank, 1);
  EXPECT_EQ(failure.rank, -1);
  EXPECT_NE(failure.text.find("it was silent for 1.50 s"), std::string::npos) << failure.text;
  EXPECT_GT(took_ns, 1'000'000'000);
  EXPECT_LT(took_ns, 5'000'000'000);
  ::kill(child, SIGCONT);
  EXPECT_EQ(wait_for(child), 0) << "told when it woke up";
}

// Ranks notice a cut network before the launchers do, and blame a rank of the host that is cut off.
TEST(NodeLink, ALostHostIsTheRootCauseOfWhatItsRanksAreBlamedFor) {
  auto options = options_for(2, free_port());
  options.lost_after_ns = 1'500'000'000;
  const pid_t child = fork_host(options, offer_of("silent", 1));
  options.serve = true;
  const auto link = NodeLink::join(options, offer_of("zero"));
  ::kill(child, SIGSTOP);
  pause_ms(600);
  link->report_failure({.rank = 1, .text = "rank 1 of another host is at fault"});
  const RemoteFailure failure = expect_failure(*link);
  EXPECT_EQ(failure.rank, -1);
  EXPECT_NE(failure.text.find("host silent (node 1) was lost"), std::string::npos) << failure.text;
  ::kill(child, SIGCONT);
  EXPECT_EQ(wait_for(child), 0);
}

TEST(NodeLink, ARankOfALivingHostIsBlamedAtOnce) {
  auto links = start_job(2);
  links[0]->report_failure({.rank = 1, .text = "rank 1 of another host is at fault"});
  EXPECT_EQ(expect_failure(*links[1]).rank, 1);
  EXPECT_EQ(expect_failure(*links[0]).node_rank, 0) << "the answer to whoever reported it";
}

TEST(NodeLink, ASilentNodeZeroIsLostInTime) {
  auto options = options_for(2, free_port());
  options.lost_after_ns = 1'500'000'000;
  options.serve = true;
  const pid_t child = fork_host(options, offer_of("zero"));
  options.serve = false;
  const auto link = NodeLink::join(options, offer_of("one"));
  ::kill(child, SIGSTOP);
  const RemoteFailure failure = expect_failure(*link);
  EXPECT_EQ(failure.node_rank, 0);
  EXPECT_EQ(failure.rank, -1);
  EXPECT_NE(failure.text.find("it was silent"), std::string::npos) << failure.text;
  ::kill(child, SIGKILL);
  ::kill(child, SIGCONT);
  wait_for(child);
}

// A launcher that finishes when it is told to by a byte in `go`; 2: a failure was told first.
pid_t fork_patient_host(const RendezvousOptions& options, const NodeOffer& offer, int joined,
                        int go) {
  const pid_t child = ::fork();
  if (child == 0) {
    int result = 1;
    try {
      const auto link = NodeLink::join(options, offer);
      if (::write(joined, "x", 1) != 1) ::_exit(1);
      std::array<pollfd, 2> items = {pollfd{link->descriptor(), POLLIN, 0}, pollfd{go, POLLIN, 0}};
      ::poll(items.data(), items.size(), -1);
      link->report_finished();
      const auto event = next_event(*link, 60'000);
      result = event && event->kind == NodeEvent::Kind::kFinished ? 0 : 2;
    } catch (const std::exception& error) {
      std::fprintf(stderr, "child: %s\n", error.what());
    }
    ::_exit(result);
  }
  return child;
}

TEST(NodeLink, HostsThatWereAllStoppedBlameNobody) {
  auto options = options_for(2, free_port());
  options.lost_after_ns = 1'500'000'000;
  std::array<int, 2> joined{};
  std::array<int, 2> go{};
  ASSERT_EQ(::pipe(joined.data()), 0);
  ASSERT_EQ(::pipe(go.data()), 0);
  const pid_t one = fork_patient_host(options, offer_of("one", 1), joined[1], go[0]);
  options.serve = true;
  const pid_t zero = fork_patient_host(options, offer_of("zero", 0), joined[1], go[0]);
  char byte = 0;
  for (int host = 0; host < 2; ++host) ASSERT_EQ(::read(joined[0], &byte, 1), 1);
  for (const pid_t host : {zero, one}) ::kill(host, SIGSTOP);
  pause_ms(4000);
  for (const pid_t host : {one, zero}) {
    ::kill(host, SIGCONT);
    pause_ms(100);  // the first one back looks around alone
  }
  ASSERT_EQ(::write(go[1], "xx", 2), 2);
  EXPECT_EQ(wait_for(one), 0) << "nobody ran: nobody was lost";
  EXPECT_EQ(wait_for(zero), 0);
  for (const int end : {joined[0], joined[1], go[0], go[1]}) ::close(end);
}

TEST(NodeLink, AKilledHostIsLostAtOnce) {
  auto options = options_for(2, free_port());
  const pid_t child = fork_host(options, offer_of("killed", 1));
  options.serve = true;
  const auto link = NodeLink::join(options, offer_of("zero"));
  ::kill(child, SIGKILL);
  const int64_t before = monotonic_ns();
  EXPECT_EQ(expect_failure(*link).rank, -1);
  EXPECT_LT(monotonic_ns() - before, 3'000'000'000);
  wait_for(child);
}

TEST(NodeLink, RestartsInNewAttempts) {
  auto links = start_job(3);
  std::set<std::string> sessions = {links[0]->layout().session};
  const std::string first_store = links[0]->layout().store;
  connect_store(parse_store_address(first_store, kToken), in_ms(5000))->set("key", "old");
  for (int attempt = 1; attempt <= 2; ++attempt) {
    links[2]->report_failure({.node_rank = 2, .rank = 3, .exit_code = 1, .text = "failed"});
    expect_failure(*links[0]);  // the others find theirs untaken, and rejoin all the same
    rejoin_all(links, 2000 + attempt);
    for (size_t node = 0; node < 3; ++node) {
      const JobLayout& layout = links[node]->layout();
      EXPECT_EQ(layout.attempt, attempt);
      EXPECT_EQ(layout.node_rank, static_cast<int>(node));
      EXPECT_EQ(layout.master_port, 2000 + attempt);
      EXPECT_EQ(layout.session, links[0]->layout().session);
      EXPECT_FALSE(links[node]->take()) << "no event of the old attempt";
    }
    sessions.insert(links[0]->layout().session);
    // Each attempt has its own store.
    connect_store(parse_store_address(links[1]->layout().store, kToken), in_ms(5000))
        ->set("key", "new");
  }
  EXPECT_EQ(sessions.size(), 3U);
  links[0]->report_failure({.node_rank = 0, .rank = 0, .exit_code = 1, .text = "again"});
  expect_failure(*links[1]);
  expect_error(Code::kRendezvous, {"restarted 2 times", "--max-restarts"},
               [&] { links[1]->rejoin(1, in_ms(1000)); });
}

TEST(NodeLink, AFinishedJobAfterARestart) {
  auto links = start_job(2);
  links[0]->report_finished();
  links[1]->report_failure({.node_rank = 1, .rank = 1, .exit_code = 1, .text = "failed"});
  expect_failure(*links[0]);
  rejoin_all(links, 2000);
  links[1]->report_finished();
  EXPECT_FALSE(next_event(*links[1], 300)) << "node 0 finished the previous attempt, not this one";
  links[0]->report_finished();
  EXPECT_EQ(next_event(*links[1], 10'000).value().kind, NodeEvent::Kind::kFinished);
}

TEST(NodeLink, ARestartNamesTheHostThatDoesNotComeBack) {
  auto links = start_job(3);
  links[1].reset();
  expect_failure(*links[0]);
  expect_failure(*links[2]);
  auto other = std::async(std::launch::async,
                          [&] { EXPECT_THROW(links[2]->rejoin(1, in_ms(1000)), Error); });
  expect_error(Code::kRendezvous, {"2 of 3 hosts", "missing: node 1", "host0 (node 0)"},
               [&] { links[0]->rejoin(1, in_ms(900)); });
  other.get();
}

TEST(NodeLink, ALostHostMayBeReplaced) {
  const auto options = options_for(3, free_port());
  auto links = start_job(3, options);
  links[1].reset();
  expect_failure(*links[0]);
  expect_failure(*links[2]);
  auto zero = std::async(std::launch::async, [&] { links[0]->rejoin(2000, in_ms(20'000)); });
  auto two = std::async(std::launch::async, [&] { links[2]->rejoin(1, in_ms(20'000)); });
  links[1] = NodeLink::join(options, offer_of("spare"));
  zero.get();
  two.get();
  EXPECT_EQ(links[1]->layout().node_rank, 1);
  EXPECT_EQ(links[1]->layout().attempt, 1);
  EXPECT_EQ(links[0]->layout().hosts.at(1), "spare");
  expect_finish(links);
}

TEST(NodeLink, UnauthenticatedPeersDoNotDisturbARunningJob) {
  const auto options = options_for(2, free_port());
  auto links = start_job(2, options);
  std::vector<Socket> unauthenticated;
  for (const std::string bytes :
       {"GET / HTTP/1.1\r\n\r\n", "l", "", "lockstep", "\xff\xff\xff\xff\xff\xff\xff\xff"}) {
    int error = 0;
    unauthenticated.push_back(start_connect(resolve({"127.0.0.1", options.port}).at(0), error));
    pollfd item{unauthenticated.back().get(), POLLOUT, 0};
    ::poll(&item, 1, 2000);
    EXPECT_EQ(::send(unauthenticated.back().get(), bytes.data(), bytes.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(bytes.size()));
  }
  // One who knows the token and talks nonsense.
  for (const std::string payload : {"", "{", "[]", "{\"type\":\"layout\"}", "{\"type\":1}",
                                    "{\"type\":\"finished\"}", "{\"type\":\"rejoin\"}"}) {
    Connection insider =
        Connection::open_tcp({"127.0.0.1", options.port}, kToken, kMaxNodeMessage, in_ms(5000));
    insider.post(payload);
    EXPECT_THROW(
        {
          while (insider.receive(in_ms(5000))) {
          }
        },
        ConnectionLost)
        << payload;
  }
  EXPECT_FALSE(next_event(*links[0], 300));
  EXPECT_FALSE(next_event(*links[1], 0));
  expect_finish(links);
}

size_t entries(const char* folder) {
  return static_cast<size_t>(std::distance(std::filesystem::directory_iterator(folder),
                                           std::filesystem::directory_iterator()));
}

TEST(NodeLink, LeavesNoThreadAndNoDescriptor) {
  start_job(2);  // what is made once is made now
  const size_t descriptors = entries("/proc/self/fd");
  const size_t threads = entries("/proc/self/task");
  for (int i = 0; i < 10; ++i) start_job(3);
  EXPECT_EQ(entries("/proc/self/fd"), descriptors);
  for (int i = 0; i < 100 && entries("/proc/self/task") != threads; ++i) pause_ms(10);
  EXPECT_EQ(entries("/proc/self/task"), threads);
}

}  // namespace
}  // namespace lockstep::test::node_link_test
