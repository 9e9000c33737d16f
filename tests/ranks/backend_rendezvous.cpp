#include <unistd.h>

#include <filesystem>

#include "backend_elements.hpp"
#include "backend_world.hpp"
#include "net/store.hpp"

// How ranks find each other, and what is left when they are gone.

namespace lockstep::test {
namespace {

using BackendRendezvous = BackendTest;

std::unique_ptr<Backend> rendezvous_alone(const WorldCase& world, int64_t deadline_ns) {
  if (world.backend == "shm") {
    return make_shm_backend({.session = "lockstep-test-alone-" + std::to_string(::getpid()),
                             .rank = 0,
                             .size = world.size,
                             .deadline_ns = deadline_ns});
  }
  const NetworkOptions gloo{.store = make_local_store(),
                            .rank = 0,
                            .size = world.size,
                            .address = "127.0.0.1",
                            .deadline_ns = deadline_ns};
  if (world.backend == "gloo") return make_network_backend("gloo", gloo);
  return make_two_level_backend({.network = gloo, .host = world.host_of(0)});
}

TEST_P(BackendRendezvous, RanksThatNeverStartAreNamed) {
  const auto caught =
      catch_error([&] { rendezvous_alone(GetParam(), monotonic_ns() + 300'000'000); });
  EXPECT_TRUE(caught.thrown);
  EXPECT_TRUE(caught.code == Code::kRendezvous || caught.code == Code::kRankAbsent) << caught.text;
  EXPECT_NE(caught.text.find("1, 2"), std::string::npos) << caught.text;
}

size_t entries_of(const char* folder) {
  return static_cast<size_t>(std::distance(std::filesystem::directory_iterator(folder),
                                           std::filesystem::directory_iterator()));
}

TEST_P(BackendRendezvous, NothingIsLeftBehind) {
  const auto use = [&] {
    run_ranks(GetParam(), [](Rank& rank) {
      const auto part = rank.comm->split(0, rank.rank, "part", rank.in_time());
      const auto memory = part->allocate(100'000, rank.in_time());
      const Elements elements(memory->data(), 25'000, Dtype::kF32);
      part->all_reduce(elements.buffer(), ReduceOp::kSum, 1, rank.in_time())->wait();
      const OwnElements own(5, Dtype::kF32);
      rank.comm->all_reduce(own->buffer(), ReduceOp::kSum, 1, rank.in_time())->wait();
    });
  };
  use();  // the module is loaded now, and the pools of the C library are filled
  const size_t files = entries_of("/proc/self/fd");
  const size_t threads = entries_of("/proc/self/task");
  for (int i = 0; i < 3; ++i) use();
  EXPECT_EQ(entries_of("/proc/self/fd"), files);
  EXPECT_EQ(entries_of("/proc/self/task"), threads);
}

TEST_P(BackendRendezvous, ARankMayLeaveAsSoonAsItHasMet) {
  for (int i = 0; i < 20; ++i) run_ranks(GetParam(), [](Rank&) {});
}

INSTANTIATE_TEST_SUITE_P(All, BackendRendezvous,
                         testing::ValuesIn(world_cases({3}, {Ranks::kThreads})), case_name);

}  // namespace
}  // namespace lockstep::test
