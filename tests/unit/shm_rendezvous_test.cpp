#include "comm/shm/shm_rendezvous.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>

#include <future>

#include "shm_support.hpp"
#include "support.hpp"

namespace lockstep::test::shm_rendezvous_test {
namespace {

// A rank that joins in a thread of its own.
std::future<std::string> join(const std::string& session, int rank, int size, double seconds) {
  return std::async(std::launch::async, [=]() -> std::string {
    try {
      auto backend = make_shm_backend({session, rank, size, in_seconds(seconds)});
      backend->barrier(within(20));
      return "joined";
    } catch (const Error& error) {
      const auto* of_rank = dynamic_cast<const RankError*>(&error);
      const int blamed = of_rank == nullptr ? -1 : of_rank->blamed_rank();
      return (error.code() == Code::kRendezvous ? "" : "another code: ") + error.block() +
             "\nblamed: " + std::to_string(blamed);
    }
  });
}

bool holds(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(ShmRendezvous, RanksMayComeInAnyOrder) {
  const std::string session = fresh_session();
  auto second = join(session, 1, 3, 20);
  ::usleep(20'000);
  auto third = join(session, 2, 3, 20);
  ::usleep(20'000);
  auto first = join(session, 0, 3, 20);
  EXPECT_EQ(first.get(), "joined");
  EXPECT_EQ(second.get(), "joined");
  EXPECT_EQ(third.get(), "joined");
}

TEST(ShmRendezvous, EveryoneLearnsWhoIsMissing) {
  const std::string session = fresh_session();
  auto first = join(session, 0, 4, 0.3);
  auto third = join(session, 2, 4, 20);
  const std::string expected = "ranks 0, 2 came, missing: 1, 3";
  const std::string said_by_first = first.get();
  const std::string said_by_third = third.get();
  EXPECT_TRUE(holds(said_by_first, expected)) << said_by_first;
  EXPECT_TRUE(holds(said_by_third, expected)) << said_by_third;
  EXPECT_TRUE(holds(said_by_first, "blamed: 1")) << said_by_first;
  EXPECT_TRUE(holds(said_by_third, "blamed: 1")) << said_by_third;
}

TEST(ShmRendezvous, AMemberThatGivesUpFirstKnowsTheMissingToo) {
  const std::string session = fresh_session();
  auto first = join(session, 0, 3, 2);
  auto second = join(session, 1, 3, 0.3);
  const std::string said = second.get();
  EXPECT_TRUE(holds(said, "ranks 0, 1 came, missing: 2")) << said;
  const std::string said_by_first = first.get();
  EXPECT_TRUE(holds(said_by_first, "rank 1 (process")) << said_by_first;
  EXPECT_TRUE(holds(said_by_first, "gave up before the rendezvous was complete")) << said_by_first;
  EXPECT_TRUE(holds(said_by_first, "ranks 0, 1 came, missing: 2")) << said_by_first;
  for (const std::string& text : {said, said_by_first}) {
    EXPECT_TRUE(holds(text, "blamed: 2")) << "who is missing, not who waited for it\n" << text;
  }
}

TEST(ShmRendezvous, AMemberThatEndsIsNamed) {
  const std::string session = fresh_session();
  auto first = join(session, 0, 4, 20);
  OwnedDescriptor second;
  while (!second) second = connect_to(socket_name(session));
  send_message(second->get(), MessageKind::kHello, {1, 4, kShmLayoutVersion});
  auto third = join(session, 2, 4, 20);
  SocketMessage present;
  while (present.numbers.size() < 3) {
    if (receive_message(second->get(), present) == Received::kNothing) ::usleep(1000);
  }
  EXPECT_EQ(present.numbers, (std::vector<int64_t>{0, 1, 2}));
  second.reset();
  for (const std::string& said : {first.get(), third.get()}) {
    EXPECT_TRUE(holds(said, "rank 1 (process")) << said;
    EXPECT_TRUE(holds(said, "ended before the rendezvous was complete")) << said;
    EXPECT_TRUE(holds(said, "blamed: 1")) << said;
  }
}

// As where rank 0's process is stopped: the system takes connections in its name.
TEST(ShmRendezvous, ARankZeroThatDoesNotAnswerIsNamed) {
  const std::string session = fresh_session();
  const OwnedDescriptor listener = listen_at(socket_name(session));
  const std::string said = join(session, 1, 3, 0.2).get();
  EXPECT_TRUE(holds(said, "rank 0 does not answer")) << said;
  EXPECT_TRUE(holds(said, "blamed: 0")) << said;
}

TEST(ShmRendezvous, WithoutRankZeroThereIsNoRendezvous) {
  const std::string said = join(fresh_session(), 1, 2, 0.1).get();
  EXPECT_TRUE(holds(said, "rank 1 of 2 found no rank 0")) << said;
  EXPECT_TRUE(holds(said, "blamed: 0")) << said;
}

TEST(ShmRendezvous, WhoeverDoesNotFitIsRefusedAndTheJobGoesOn) {
  const std::string session = fresh_session();
  auto first = join(session, 0, 3, 20);
  auto second = join(session, 1, 3, 20);
  ::usleep(50'000);
  const std::string twice = join(session, 1, 3, 20).get();
  EXPECT_TRUE(holds(twice, "rank 1 is here already: process")) << twice;
  const std::string size = join(session, 2, 4, 20).get();
  EXPECT_TRUE(holds(size, "rank 2 came with world size 4, rank 0 has 3")) << size;
  const std::string zero = join(session, 0, 3, 20).get();
  EXPECT_TRUE(holds(zero, "somebody is rank 0 of session")) << zero;
  auto third = join(session, 2, 3, 20);
  EXPECT_EQ(first.get(), "joined");
  EXPECT_EQ(second.get(), "joined");
  EXPECT_EQ(third.get(), "joined");
}

TEST(ShmRendezvous, UnauthenticatedPeersDelayNobody) {
  const std::string session = fresh_session();
  auto first = join(session, 0, 2, 20);
  OwnedDescriptor silent;
  while (!silent) silent = connect_to(socket_name(session));
  const OwnedDescriptor loud = connect_to(socket_name(session));
  ASSERT_EQ(::send(loud->get(), "GET / HTTP/1.1", 14, 0), 14);
  const OwnedDescriptor lost = connect_to(socket_name(session));
  send_message(lost->get(), MessageKind::kWelcome, {1, 2, 3});
  EXPECT_EQ(join(session, 1, 2, 20).get(), "joined");
  EXPECT_EQ(first.get(), "joined");
}

TEST(ShmRendezvous, SessionsStayApart) {
  auto first = join(fresh_session(), 0, 1, 20);
  auto other = join(fresh_session(), 0, 1, 20);
  EXPECT_EQ(first.get(), "joined");
  EXPECT_EQ(other.get(), "joined");
}

TEST(ShmRendezvous, NamesOfAnyLengthFitAndDiffer) {
  const std::string lengthy(200, 'a');
  EXPECT_LE(socket_name(lengthy).size(), 107U);
  EXPECT_NE(socket_name(lengthy + "b"), socket_name(lengthy + "c"));
  EXPECT_EQ(socket_name(lengthy), socket_name(lengthy));
}

TEST(ShmRendezvous, ImpossibleSizesAreRefused) {
  expect_error(Code::kBackend, {"cannot serve 0 ranks"}, [] { make_shm_thread_backends(0); });
  expect_error(Code::kBackend, {"cannot serve 251 ranks", "gloo"},
               [] { make_shm_thread_backends(251); });
  expect_error(Code::kRendezvous, {"no rank 2 in a world of 2"}, [] {
    make_shm_backend({"x", 2, 2, in_seconds(1)});
  });
}

TEST(ShmMemory, AFileCannotShrinkUnderItsUsers) {
  const OwnedDescriptor file = make_memory_file("test", 8192);
  EXPECT_NE(::ftruncate(file->get(), 4096), 0);
  EXPECT_NE(::ftruncate(file->get(), 16384), 0);
  EXPECT_EQ(::fcntl(file->get(), F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
}

TEST(ShmMemory, AMappingIsSharedInsideAPool) {
  MappingPool pool;
  OwnedDescriptor file = make_memory_file("test", 8192);
  auto again = std::make_unique<Descriptor>(::dup(file->get()));
  auto third = std::make_unique<Descriptor>(::dup(file->get()));
  const auto mapping = pool.map(std::move(file));
  EXPECT_EQ(pool.map(std::move(again)), mapping);
  MappingPool other;
  EXPECT_NE(other.map(std::move(third))->data(), mapping->data());
}

// Pages of shared memory that this process has mapped.
int64_t mapped_segments() {
  const std::string maps = test::read_bytes("/proc/self/maps");
  int64_t count = 0;
  for (size_t at = maps.find("lockstep-segment"); at != std::string::npos;
       at = maps.find("lockstep-segment", at + 1)) {
    ++count;
  }
  return count;
}

TEST(ShmMemory, IsZeroedAlignedAndFreedWithTheLastHandle) {
  const int64_t before = mapped_segments();
  test::run_threads(3, [before](Backend& backend) -> std::string {
    auto memory = backend.allocate(5000, within(20));
    const auto* bytes = static_cast<const char*>(memory->data());
    if (memory->bytes() != 5000) return "another size";
    if (reinterpret_cast<uintptr_t>(bytes) % 4096 != 0) return "not aligned";
    for (int i = 0; i < 5000; ++i) {
      if (bytes[i] != 0) return "not zeroed";
    }
    backend.barrier(within(20));
    if (mapped_segments() != before + 1) return "threads do not share the mapping";
    backend.barrier(within(20));
    if (backend.rank() != 0) memory.reset();
    backend.barrier(within(20));
    backend.barrier(within(20));
    if (mapped_segments() != before + 1) return "unmapped although rank 0 holds it";
    backend.barrier(within(20));
    memory.reset();
    for (int i = 0; i < 3; ++i) backend.barrier(within(20));
    if (mapped_segments() != before) return "still mapped";
    backend.barrier(within(20));
    return "";
  });
}

TEST(ShmMemory, OutlivesItsCommunicator) {
  std::shared_ptr<RegisteredMemory> memory;
  {
    auto backends = make_shm_thread_backends(1);
    memory = backends[0]->allocate(100, within(20));
  }
  static_cast<char*>(memory->data())[99] = 1;
}

}  // namespace
}  // namespace lockstep::test::shm_rendezvous_test
