#include "launch/rendezvous.hpp"

#include <unistd.h>

#include "net/connection.hpp"
#include "net/store.hpp"
#include "rendezvous_support.hpp"

namespace lockstep::test::rendezvous_test {
namespace {

class Hosts : public testing::TestWithParam<int> {};

TEST_P(Hosts, AgreeOnOneLayout) {
  const int nnodes = GetParam();
  auto links = start_job(nnodes);
  std::vector<int> sizes;
  int first = 0;
  for (int node = 0; node < nnodes; ++node) sizes.push_back(node + 1);
  for (int node = 0; node < nnodes; ++node) {
    const JobLayout& layout = links[static_cast<size_t>(node)]->layout();
    EXPECT_EQ(layout.node_rank, node);
    EXPECT_EQ(layout.local_world_sizes, sizes);
    EXPECT_EQ(layout.hosts.at(static_cast<size_t>(node)), "host" + std::to_string(node));
    EXPECT_EQ(layout.world_size(), nnodes * (nnodes + 1) / 2);
    EXPECT_EQ(layout.first_rank(), first);
    EXPECT_EQ(layout.master_addr, "127.0.0.1");
    EXPECT_EQ(layout.master_port, 1000);
    EXPECT_EQ(layout.attempt, 0);
    EXPECT_EQ(layout.session, links[0]->layout().session);
    EXPECT_EQ(layout.session.size(), 32U);
    first += node + 1;
    const auto store = connect_store(parse_store_address(layout.store, kToken), in_ms(5000));
    store->set("node " + std::to_string(node), layout.session);
    EXPECT_EQ(store->get("node 0", in_ms(5000)), layout.session);
  }
  expect_finish(links);
}

INSTANTIATE_TEST_SUITE_P(Counts, Hosts, testing::Values(1, 2, 3, 5));

TEST(Rendezvous, WorksOverIPv6) {
  auto options = options_for(2, free_port("::1"));
  options.host = "::1";
  auto links = start_job(2, options);
  for (const auto& link : links) {
    EXPECT_EQ(link->layout().master_addr, "::1");
    EXPECT_EQ(link->layout().store.substr(0, 6), "[::1]:");
    connect_store(parse_store_address(link->layout().store, kToken), in_ms(5000));
  }
  expect_finish(links);
}

// By a name, node 0 listens at all its addresses, and says by which one the others came.
TEST(Rendezvous, AHostNameServesAllAddresses) {
  auto options = options_for(2, free_port());
  char name[256] = {};
  ASSERT_EQ(::gethostname(name, sizeof name - 1), 0);
  options.host = name;
  options.serve = true;
  auto node_0 = join_later(options, offer_of("a"));
  options.host = "127.0.0.1";
  options.serve = false;
  std::vector<Link> links;
  links.push_back(NodeLink::join(options, offer_of("b")));
  links.push_back(node_0.get());
  EXPECT_EQ(links[0]->layout().master_addr, "127.0.0.1");
  EXPECT_EQ(links[1]->layout().master_addr, "127.0.0.1");
  expect_finish(links);
}

TEST(Rendezvous, RanksAreGivenByArrivalAmongTheFreeOnes) {
  const int port = free_port();
  auto node_0 = join_later(options_for(4, port, true), offer_of("zero"));
  auto two = join_later(options_for(4, port), offer_of("two", 2));
  pause_ms(200);
  auto early = join_later(options_for(4, port), offer_of("early"));
  pause_ms(200);
  auto late = join_later(options_for(4, port), offer_of("late"));
  const std::vector<std::string> hosts = {"zero", "early", "two", "late"};
  EXPECT_EQ(node_0.get()->layout().hosts, hosts);
  EXPECT_EQ(two.get()->layout().node_rank, 2);
  EXPECT_EQ(early.get()->layout().node_rank, 1);
  EXPECT_EQ(late.get()->layout().node_rank, 3);
}

TEST(Rendezvous, AHostMayComeBeforeNodeZero) {
  const int port = free_port();
  auto early = join_later(options_for(2, port), offer_of("early"));
  pause_ms(300);
  std::vector<Link> links;
  links.push_back(NodeLink::join(options_for(2, port, true), offer_of("zero")));
  links.push_back(early.get());
  expect_finish(links);
}

// Each of these is refused by name on its own side; then the right host comes and the job runs.
TEST(Rendezvous, MismatchesAreRefusedAndDisturbNobody) {
  const int port = free_port();
  auto node_0 = join_later(options_for(3, port, true), offer_of("zero"));
  auto node_1 = join_later(options_for(3, port), offer_of("one", 1));
  pause_ms(200);
  const auto refused = [&](std::initializer_list<std::string> fragments, auto&& change) {
    RendezvousOptions options = options_for(3, port);
    NodeOffer offer = offer_of("wrong");
    change(options, offer);
    const int64_t before = monotonic_ns();
    expect_error(Code::kRendezvous, fragments, [&] { NodeLink::join(options, offer); });
    EXPECT_LT(monotonic_ns() - before, 5'000'000'000) << "at once";
  };
  refused({"node rank 1", "taken by one"}, [](auto&, auto& offer) { offer.node_rank = 1; });
  refused({"node rank 0", "taken by zero"}, [](auto&, auto& offer) { offer.node_rank = 0; });
  refused({"--nnodes is 2 on this host, but 3 on node 0 (zero)"}, [](auto& options, auto&) {
    options.nnodes = {2, 2};
  });
  refused({"--nnodes is 2:3 on this host, but 3 on node 0 (zero)"}, [](auto& options, auto&) {
    options.nnodes = {2, 3};
  });
  refused({"--host-timeout is 5.00 s on this host, but 10.0 s"},
          [](auto& options, auto&) { options.lost_after_ns = 5'000'000'000; });
  refused({"--heartbeat is 1.00 s on this host, but 100 ms"},
          [](auto& options, auto&) { options.heartbeat_ns = 1'000'000'000; });
  refused({"--rdzv-id is \"other\" on this host, but \"job\""},
          [](auto& options, auto&) { options.job_id = "other"; });
  refused({"--max-restarts is 7 on this host, but 2"},
          [](auto& options, auto&) { options.max_restarts = 7; });
  refused({"refused our token", "LOCKSTEP_TOKEN"},
          [](auto& options, auto&) { options.token = "not the secret of the others"; });

  Connection old = Connection::open_tcp({"127.0.0.1", port}, kToken, kMaxNodeMessage, in_ms(5000));
  JoinMessage join_of_old = join_of(options_for(3, port), offer_of("old"));
  join_of_old.version = "0.0.9";
  old.post(encode(join_of_old));
  std::optional<RefusedMessage> answer;
  while (!answer) {
    const auto payload = old.receive(in_ms(5000));
    ASSERT_TRUE(payload);
    const NodeMessage message = decode_node_message(*payload);
    if (const auto* refusal = std::get_if<RefusedMessage>(&message)) answer = *refusal;
  }
  EXPECT_NE(answer->why.find("version is 0.0.9 on this host"), std::string::npos) << answer->why;

  std::vector<Link> links;
  links.push_back(NodeLink::join(options_for(3, port), offer_of("two", 2)));
  refused({"all 3 hosts", "already"}, [](auto&, auto&) {});
  links.push_back(node_0.get());
  links.push_back(node_1.get());
  expect_finish(links);
}

TEST(Rendezvous, ImpossibleOffersAreRefusedBeforeAnythingStarts) {
  const int port = free_port();
  expect_error(Code::kUsage, {"node rank 2", "2 hosts"},
               [&] { NodeLink::join(options_for(2, port), offer_of("a", 2)); });
  expect_error(Code::kUsage, {"node rank 1 cannot serve"},
               [&] { NodeLink::join(options_for(2, port, true), offer_of("a", 1)); });
  expect_error(Code::kUsage, {"0 hosts"},
               [&] { NodeLink::join(options_for(0, port), offer_of("a")); });
  auto options = options_for(2, port);
  options.token = "";
  expect_error(Code::kUsage, {"token"}, [&] { NodeLink::join(options, offer_of("a")); });
  options = options_for(2, port, true);
  options.host = "no-such-host.invalid";
  expect_error(Code::kRendezvous, {"no-such-host.invalid"},
               [&] { NodeLink::join(options, offer_of("a")); });
}

TEST(Rendezvous, TheDeadlineNamesWhoCameAndWhoDidNot) {
  const int port = free_port();
  auto serve = options_for(4, port, true);
  auto follow = options_for(4, port);
  serve.deadline_ns = in_ms(1500);  // long before node 2 would give up by itself
  auto node_0 = join_later(serve, offer_of("zero", 0));
  auto node_2 = join_later(follow, offer_of("two", 2));
  auto foreign = options_for(4, port);
  foreign.token = "not the secret of the others";
  EXPECT_THROW(NodeLink::join(foreign, offer_of("thief")), Error);
  EXPECT_THROW(NodeLink::join(foreign, offer_of("thief")), Error);
  expect_error(
      Code::kRendezvous,
      {"2 of 4 hosts came to 127.0.0.1:" + std::to_string(port), "missing: node 1, node 3",
       "here: ", "zero (node 0)", "two (node 2)", "turned away: 127.0.0.1: ", "token (2 times)"},
      [&] { node_0.get(); });
  EXPECT_THROW(node_2.get(), Error);

  auto alone = options_for(2, port);
  alone.deadline_ns = in_ms(300);
  expect_error(Code::kRendezvous, {"cannot reach 127.0.0.1:" + std::to_string(port), "refused"},
               [&] { NodeLink::join(alone, offer_of("alone")); });
}

TEST(Rendezvous, AHostThatLeavesAsTheJobStartsIsLost) {
  const int port = free_port();
  auto node_0 = join_later(options_for(2, port, true), offer_of("zero"));
  {
    Connection left =
        Connection::open_tcp({"127.0.0.1", port}, kToken, kMaxNodeMessage, in_ms(5000));
    left.post(encode(join_of(options_for(2, port), offer_of("leaves", 1))));
    left.wait(Connection::Until::kWritten, in_ms(5000));
  }
  const auto first = node_0.get();  // both were here, and then one was gone
  EXPECT_EQ(expect_failure(*first).rank, -1);
}

TEST(Rendezvous, AHostThatLeavesWhileOthersAreAwaitedIsNoFailure) {
  const int port = free_port();
  auto node_0 = join_later(options_for(3, port, true), offer_of("zero"));
  {
    auto hasty = options_for(3, port);
    hasty.deadline_ns = in_ms(300);
    EXPECT_THROW(NodeLink::join(hasty, offer_of("hasty", 1)), Error);
  }
  auto node_1 = join_later(options_for(3, port), offer_of("patient", 1));
  std::vector<Link> links;
  links.push_back(NodeLink::join(options_for(3, port), offer_of("two", 2)));
  links.push_back(node_0.get());
  links.push_back(node_1.get());
  EXPECT_EQ(links[0]->layout().hosts.at(1), "patient");
  expect_finish(links);
}

TEST(NodeMessages, SurviveTheJourney) {
  const NodeMessage join =
      JoinMessage{"1.2.3", "id", {2, 4}, 5, 6, 7, offer_of("a \"quoted\" host", 3, 8, 77)};
  const auto read = std::get<JoinMessage>(decode_node_message(encode(join)));
  EXPECT_EQ(read.version, "1.2.3");
  EXPECT_EQ(read.nnodes, (HostCount{2, 4}));
  EXPECT_EQ(read.max_restarts, 5);
  EXPECT_EQ(read.heartbeat_ns, 6);
  EXPECT_EQ(read.lost_after_ns, 7);
  EXPECT_EQ(read.offer.host, "a \"quoted\" host");
  EXPECT_EQ(read.offer.node_rank, 3);
  EXPECT_EQ(read.offer.master_port, 77);
  const auto failed = std::get<FailedMessage>(
      decode_node_message(encode(FailedMessage{{1, 2, 3, std::string(100'000, 'x')}})));
  EXPECT_EQ(failed.failure.text.size(), 4096U) << "long texts are cut";
}

TEST(NodeMessages, NumbersOutOfRangeAreRefused) {
  for (const char* bad :
       {R"({"type":"rejoin","master_port":65536})", R"({"type":"rejoin","master_port":-1})",
        R"({"type":"rejoin","master_port":"1"})", R"({"type":"rejoin"})", R"({"type":"what"})",
        R"({"type":"rejoin","master_port":1.5})", R"({"type":"rejoin","master_port":1e300})",
        R"({"type":"status","running":0,"present":[[1e300,"a"]],"lost":[],"turned_away":[]})",
        R"({"type":"layout","node_rank":1,"local_world_sizes":[1],"hosts":["a"],"master_addr":"",)"
        R"("master_port":1,"attempt":0,"session":"s","store_port":1})"}) {
    expect_error(Code::kRendezvous, {"not a launcher's"}, [&] { decode_node_message(bad); });
  }
}

TEST(NodeMessages, ALayoutHasAsManyRanksAsCanBeCounted) {
  const auto layout = [](const std::string& sizes) {
    return R"({"type":"layout","node_rank":1,"local_world_sizes":)" + sizes +
           R"(,"hosts":["a","b"],"master_addr":"","master_port":1,"attempt":0,"session":"s",)"
           R"("store_port":1})";
  };
  const auto good = std::get<LayoutMessage>(decode_node_message(layout("[2,3]")));
  EXPECT_EQ(good.layout.world_size(), 5);
  for (const char* sizes : {"[2,-3]", "[0,1]", "[2,1.5]", "[2,2147483647]", "[true,1]", "[1]"}) {
    expect_error(Code::kRendezvous, {"not a launcher's"},
                 [&] { decode_node_message(layout(sizes)); });
  }
}

}  // namespace
}  // namespace lockstep::test::rendezvous_test
