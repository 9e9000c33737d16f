// Jobs whose number of hosts changes: MIN:MAX.

#include "launch/coordinator.hpp"
#include "launch/rendezvous.hpp"
#include "rendezvous_support.hpp"

namespace lockstep::test::elastic_hosts_test {
namespace {

constexpr HostCount kTwoToThree{2, 3};

TEST(HostCount, IsANumberOrARange) {
  EXPECT_EQ(parse_host_count("3"), (HostCount{3, 3}));
  EXPECT_EQ(parse_host_count("1:3"), (HostCount{1, 3}));
  EXPECT_EQ(parse_host_count("2:2"), (HostCount{2, 2}));
  EXPECT_EQ(parse_host_count("1:2048"), (HostCount{1, 2048}));
  for (const char* bad : {"", ":", "1:", ":2", "0", "0:2", "3:2", "-1", "1:2:3", "a", "2049"}) {
    EXPECT_FALSE(parse_host_count(bad)) << bad;
  }
  EXPECT_EQ((HostCount{1, 3}).text(), "1:3");
  EXPECT_EQ((HostCount{1, 3}).words(), "1 to 3");
  EXPECT_EQ((HostCount{3, 3}).text(), "3");
  EXPECT_TRUE((HostCount{1, 2}).several());
  EXPECT_FALSE((HostCount{1, 1}).several());
}

TEST(Attendance, AllBeginAtOnceAndFewerAfterTheLastCall) {
  constexpr int64_t kCall = 30;
  const auto may = [](int ready, int stopping, int64_t now, HostCount wanted = kTwoToThree) {
    return may_begin({ready, stopping, 1000}, wanted, kCall, now);
  };
  EXPECT_TRUE(may(3, 0, 1000)) << "all are here";
  EXPECT_FALSE(may(2, 0, 1029)) << "another may come";
  EXPECT_TRUE(may(2, 0, 1030)) << "nobody came";
  EXPECT_FALSE(may(1, 0, 99'999)) << "too few, however long they wait";
  EXPECT_FALSE(may(2, 1, 99'999)) << "one still ends its ranks";
  EXPECT_FALSE(may(2, 0, 99'999, {3, 3})) << "a fixed number has no last call";
  EXPECT_TRUE(may(3, 0, 1000, {3, 3}));
  EXPECT_TRUE(may(1, 0, 1030, {1, 3}));
}

// Node n of those that come offers n + 1 ranks.
RendezvousOptions elastic_options(int64_t last_call_ms) {
  RendezvousOptions options = options_for(kTwoToThree, free_port());
  options.last_call_ns = last_call_ms * 1'000'000;
  return options;
}

TEST(ElasticHosts, BeginWithThoseWhoCame) {
  auto links = start_job(2, elastic_options(200));
  for (size_t node = 0; node < 2; ++node) {
    const JobLayout& layout = links[node]->layout();
    EXPECT_EQ(layout.hosts, (std::vector<std::string>{"host0", "host1"}));
    EXPECT_EQ(layout.world_size(), 3);
    EXPECT_EQ(layout.node_rank, static_cast<int>(node));
  }
  expect_finish(links);
}

TEST(ElasticHosts, DoNotWaitWhenAllAreHere) {
  auto links = start_job(3, elastic_options(600'000));
  EXPECT_EQ(links[2]->layout().world_size(), 6);
  expect_finish(links);
}

TEST(ElasticHosts, GoOnWithoutALostHost) {
  auto links = start_job(3, elastic_options(200));
  links[1].reset();
  for (const size_t other : {size_t{0}, size_t{2}}) {
    const RemoteFailure failure = expect_failure(*links[other]);
    EXPECT_EQ(failure.restart, Restart::kMayHelp);
    EXPECT_NE(failure.text.find("host host1 (node 1) was lost"), std::string::npos) << failure.text;
  }
  links.erase(links.begin() + 1);
  rejoin_all(links, 2000);
  for (size_t node = 0; node < 2; ++node) {
    const JobLayout& layout = links[node]->layout();
    EXPECT_EQ(layout.attempt, 1);
    EXPECT_EQ(layout.hosts, (std::vector<std::string>{"host0", "host2"}));
    EXPECT_EQ(layout.local_world_sizes, (std::vector<int>{1, 3}));
    EXPECT_EQ(layout.node_rank, static_cast<int>(node)) << "numbered without gaps";
  }
  links[1]->report_failure({.node_rank = 0, .rank = 3, .exit_code = 9, .text = "again"});
  EXPECT_EQ(expect_failure(*links[0]).node_rank, 1) << "its number in this attempt";
}

TEST(ElasticHosts, AReplacementTakesTheLostHostsPlace) {
  const auto options = elastic_options(600'000);  // only a third host can end the wait
  auto links = start_job(3, options);
  links[1].reset();
  expect_failure(*links[0]);
  expect_failure(*links[2]);
  auto zero = std::async(std::launch::async, [&] { links[0]->rejoin(2000, in_ms(20'000)); });
  auto two = std::async(std::launch::async, [&] { links[2]->rejoin(1, in_ms(20'000)); });
  links[1] = NodeLink::join(options, offer_of("spare", 1, 5));
  zero.get();
  two.get();
  EXPECT_EQ(links[1]->layout().hosts, (std::vector<std::string>{"host0", "spare", "host2"}));
  EXPECT_EQ(links[1]->layout().attempt, 1);
  EXPECT_EQ(links[2]->layout().first_rank(), 6);
  expect_finish(links);
}

TEST(ElasticHosts, ALateHostWaitsForTheNextAttempt) {
  auto options = elastic_options(200);
  auto links = start_job(2, options);
  std::promise<std::string> told;
  options.on_wait = [&, first = true](const std::string& line) mutable {
    if (first) told.set_value(line);
    first = false;
  };
  auto late = join_later(options, offer_of("late"));
  EXPECT_NE(told.get_future().get().find("the job runs on 2 hosts now"), std::string::npos);
  links[0]->report_failure({.node_rank = 0, .rank = 0, .exit_code = 9, .text = "failed"});
  expect_failure(*links[1]);
  rejoin_all(links, 2000);
  links.push_back(late.get());
  EXPECT_EQ(links[2]->layout().hosts, (std::vector<std::string>{"host0", "host1", "late"}));
  EXPECT_EQ(links[2]->layout().attempt, 1);
  expect_finish(links);
}

TEST(ElasticHosts, ALateHostLearnsThatTheJobHasFinished) {
  auto options = elastic_options(200);
  auto links = start_job(2, options);
  std::promise<void> waits;
  options.on_wait = [&, first = true](const std::string&) mutable {
    if (first) waits.set_value();
    first = false;
  };
  auto late = join_later(options, offer_of("late"));
  waits.get_future().wait();
  expect_finish(links);
  EXPECT_EQ(late.get(), nullptr);
}

TEST(ElasticHosts, ALateHostThatLeavesIsNoFailure) {
  auto options = elastic_options(200);
  auto links = start_job(2, options);
  options.deadline_ns = in_ms(500);
  expect_error(Code::kRendezvous, {"needed no further host", "it runs on 2"},
               [&] { NodeLink::join(options, offer_of("late")); });
  EXPECT_FALSE(test::next_event(*links[0], 300));
  expect_finish(links);
}

TEST(ElasticHosts, TooFewAreNamed) {
  auto links = start_job(2, elastic_options(200));
  links[1].reset();
  expect_failure(*links[0]);
  expect_error(Code::kRendezvous,
               {"1 of at least 2 hosts", "missing: 1 more", "here: host0 (node 0)",
                "lost: host1: it closed the connection"},
               [&] { links[0]->rejoin(2000, in_ms(600)); });
}

TEST(ElasticHosts, NothingBeginsWithoutTheCoordinatorsHost) {
  auto options = elastic_options(0);
  options.nnodes = {1, 2};
  auto links = start_job(1, options);
  EXPECT_EQ(links[0]->layout().hosts, (std::vector<std::string>{"host0"}));
  std::promise<void> waits;
  options.on_wait = [&, first = true](const std::string&) mutable {
    if (first) waits.set_value();
    first = false;
  };
  auto late = join_later(options, offer_of("late"));
  waits.get_future().wait();
  links[0].reset();
  expect_error(Code::kRendezvous, {"ended before enough hosts had joined"}, [&] { late.get(); });
}

TEST(ElasticHosts, NoMoreThanTheMostMayJoin) {
  const auto options = elastic_options(200);
  auto links = start_job(3, options);
  expect_error(Code::kRendezvous, {"all 3 hosts", "already"},
               [&] { NodeLink::join(options, offer_of("fourth")); });
  expect_finish(links);
}

}  // namespace
}  // namespace lockstep::test::elastic_hosts_test
