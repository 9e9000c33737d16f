// Communicator and Mesh with tensors; what moves the bytes is tested in backend_*_test.cpp.

#include "lockstep/communicator.hpp"

#include <algorithm>
#include <cctype>
#include <cmath>

#include "lockstep/mean_over_ranks.hpp"
#include "lockstep/memory.hpp"
#include "lockstep/mesh.hpp"
#include "lockstep/world.hpp"
#include "rank_threads.hpp"
#include "world/gpu_backends.hpp"

namespace lockstep::test::communicator_test {
namespace {

TEST(Communicator, ReducesTensorsOfEveryShapeAndType) {
  for (const int size : {1, 2, 3, 5}) {
    run_ranks(size, [&](const Communicator& comm) {
      for (const auto dtype :
           {torch::kFloat32, torch::kFloat64, torch::kBFloat16, torch::kFloat16, torch::kInt64}) {
        const auto tensor = torch::full({3, 2}, comm.rank() + 1, dtype);
        comm.all_reduce(tensor);
        EXPECT_TRUE(torch::equal(tensor, torch::full({3, 2}, size * (size + 1) / 2, dtype)));
      }
      const auto weighted = torch::full({5}, static_cast<float>(comm.rank()));
      comm.all_reduce(weighted, ReduceOp::kMean,
                      {.weight = comm.rank() == 0 ? 0.0 + (size == 1) : 1.0});
      EXPECT_FLOAT_EQ(weighted[4].item<float>(), size == 1 ? 0.0F : static_cast<float>(size) / 2);
    });
  }
}

TEST(Communicator, GathersScattersBroadcastsAndSends) {
  run_ranks(3, [](const Communicator& comm) {
    const auto all = torch::empty({3, 2}, torch::kInt64);
    comm.all_gather(all, torch::full({2}, comm.rank(), torch::kInt64));
    EXPECT_TRUE(torch::equal(all, torch::tensor({{0, 0}, {1, 1}, {2, 2}})));
    const auto part = torch::empty({2}, torch::kInt64);
    comm.reduce_scatter(part, all);
    EXPECT_TRUE(torch::equal(part, torch::full({2}, 3 * comm.rank(), torch::kInt64)));
    const auto everybody = torch::full({4}, static_cast<float>(comm.rank()));
    comm.broadcast(everybody, 2);
    EXPECT_FLOAT_EQ(everybody[3].item<float>(), 2.0F);
    const int next = (comm.rank() + 1) % 3;
    const int before = (comm.rank() + 2) % 3;
    comm.send(torch::full({2}, comm.rank(), torch::kInt64), next, {.tag = 7});
    const auto message = torch::empty({2}, torch::kInt64);
    comm.recv(message, before, {.tag = 7});
    EXPECT_EQ(message[0].item<int64_t>(), before);
    comm.barrier();
    const auto stats = comm.stats();
    EXPECT_EQ(stats.all_reduces, 0);
    EXPECT_EQ(stats.calls, 6);
  });
}

TEST(Communicator, SeveralReductionsMayBeInFlight) {
  run_ranks(2, [](const Communicator& comm) {
    std::vector<torch::Tensor> tensors;
    std::vector<Work> works;
    for (int i = 0; i < 10; ++i) {
      tensors.push_back(comm.allocate(1000, torch::kFloat32).fill_(i + comm.rank()));
      works.push_back(comm.begin_all_reduce(tensors.back()));
    }
    while (!works.back().advance()) std::this_thread::yield();
    for (auto& work : works) work.wait();
    for (int i = 0; i < 10; ++i) {
      EXPECT_FLOAT_EQ(tensors[static_cast<size_t>(i)][999].item<float>(),
                      static_cast<float>(2 * i + 1));
    }
  });
}

TEST(Communicator, ScattersAndGathersMayBeInFlightAndInPlace) {
  for (const int size : {1, 2, 3}) {
    run_ranks(size, [&](const Communicator& comm) {
      const int64_t count = 3000;
      const auto all = comm.allocate(count * size, torch::kFloat32);
      const auto own = all.narrow(0, comm.rank() * count, count);
      const auto apart = torch::arange(count * size, torch::kFloat32);
      const auto part = torch::empty({count});
      all.fill_(comm.rank() + 1);
      Work scatter = comm.begin_reduce_scatter(own, all);
      Work other = comm.begin_reduce_scatter(part, apart, ReduceOp::kMean);
      while (!scatter.advance()) std::this_thread::yield();
      EXPECT_FLOAT_EQ(own[count - 1].item<float>(), static_cast<float>(size * (size + 1)) / 2);
      own.add_(comm.rank());
      Work gather = comm.begin_all_gather(all, own);
      other.wait();
      EXPECT_TRUE(torch::allclose(part, apart.narrow(0, comm.rank() * count, count)));
      gather.wait();
      EXPECT_FLOAT_EQ(all[count * size - 1].item<float>(),
                      static_cast<float>(size * (size + 1)) / 2 + static_cast<float>(size - 1));
      EXPECT_EQ(comm.stats().all_reduces, 0);
    });
  }
}

TEST(Communicator, ExchangesBlocksOfEqualAndOfDifferentSizes) {
  for (const int size : {1, 2, 3, 5}) {
    run_ranks(size, [&](const Communicator& comm) {
      const int rank = comm.rank();
      for (const auto dtype : {torch::kFloat32, torch::kFloat64, torch::kBFloat16, torch::kInt64}) {
        const auto given = torch::full({size, 2}, 10 * rank, dtype) +
                           torch::arange(size, torch::kInt64).to(dtype).unsqueeze(1);
        const auto taken = torch::empty({size, 2}, dtype);
        comm.all_to_all(taken, given);
        const auto expected = (torch::arange(size, torch::kInt64) * 10 + rank).to(dtype);
        EXPECT_TRUE(torch::equal(taken, expected.unsqueeze(1).expand({size, 2})));
      }
      // Rank r gives p + 1 rows to rank p, and so takes r + 1 from each.
      std::vector<int64_t> input_rows;
      for (int peer = 0; peer < size; ++peer) input_rows.push_back(peer + 1);
      const std::vector<int64_t> output_rows(static_cast<size_t>(size), rank + 1);
      const auto input = torch::full({size * (size + 1) / 2, 3}, rank, torch::kInt64);
      const auto output = torch::empty({size * (rank + 1), 3}, torch::kInt64);
      comm.all_to_all(output, input, output_rows, input_rows);
      for (int peer = 0; peer < size; ++peer) {
        EXPECT_EQ(output[peer * (rank + 1)][2].item<int64_t>(), peer);
      }
      const auto none = torch::empty({0, 3});
      const std::vector<int64_t> no_rows(static_cast<size_t>(size), 0);
      comm.all_to_all(none, none, no_rows, no_rows);
    });
  }
}

TEST(Communicator, GathersScattersAndReducesAtARoot) {
  for (const int size : {1, 2, 3, 5}) {
    run_ranks(size, [&](const Communicator& comm) {
      const int root = size / 2;
      const bool is_root = comm.rank() == root;
      const auto all = is_root ? torch::empty({size, 2}) : torch::Tensor();
      comm.gather(all, torch::full({2}, static_cast<float>(comm.rank())), root);
      if (is_root) {
        EXPECT_FLOAT_EQ(all[size - 1][1].item<float>(), static_cast<float>(size - 1));
      }
      const auto part = torch::empty({2});
      comm.scatter(part, all, root);
      EXPECT_FLOAT_EQ(part[0].item<float>(), static_cast<float>(comm.rank()));
      const auto value = torch::full({3}, static_cast<float>(comm.rank() + 1));
      comm.reduce(value, root);
      EXPECT_FLOAT_EQ(value[2].item<float>(), is_root ? static_cast<float>(size * (size + 1)) / 2
                                                      : static_cast<float>(comm.rank() + 1));
    });
  }
}

TEST(Communicator, GathersTensorsAndTextsOfDifferentSizes) {
  for (const int size : {1, 2, 3, 5}) {
    run_ranks(size, [&](const Communicator& comm) {
      const auto parts = comm.all_gather(torch::full({comm.rank(), 2}, comm.rank(), torch::kInt64));
      ASSERT_EQ(parts.size(), static_cast<size_t>(size));
      for (int64_t peer = 0; peer < size; ++peer) {
        EXPECT_TRUE(torch::equal(parts[static_cast<size_t>(peer)],
                                 torch::full({peer, 2}, peer, torch::kInt64)));
      }
      const auto scalars = comm.all_gather(torch::tensor(static_cast<float>(comm.rank())));
      EXPECT_EQ(scalars.back().dim(), 0);
      EXPECT_FLOAT_EQ(scalars.back().item<float>(), static_cast<float>(size - 1));
      const std::string mine(static_cast<size_t>(comm.rank()) * 70'000, 'a');
      const auto texts = comm.all_gather_text(mine);
      EXPECT_EQ(texts.back().size(), static_cast<size_t>(size - 1) * 70'000);
      EXPECT_EQ(texts.front(), "");
      const auto gathered = comm.gather_text(std::to_string(comm.rank()), size - 1);
      EXPECT_EQ(gathered.size(), comm.rank() == size - 1 ? static_cast<size_t>(size) : 0U);
      if (!gathered.empty()) {
        EXPECT_EQ(gathered.back(), std::to_string(size - 1));
      }
      const std::string told("with\0a zero", 11);
      EXPECT_EQ(comm.broadcast_text(comm.rank() == 0 ? told : "other"), told);
      EXPECT_EQ(comm.broadcast_text("", size - 1), "");
    });
  }
}

TEST(Communicator, MessagesMayBeInFlightInBothDirections) {
  run_ranks(3, [](const Communicator& comm) {
    std::vector<torch::Tensor> received;
    std::vector<Work> works;
    for (int peer = 0; peer < 3; ++peer) {
      if (peer == comm.rank()) continue;
      const auto sent = torch::full({300'000}, static_cast<float>(comm.rank() + 10));
      works.push_back(comm.begin_send(sent, peer, {.tag = 4}));
      received.push_back(torch::empty({300'000}));
      works.push_back(comm.begin_recv(received.back(), peer, {.tag = 4}));
    }
    for (auto& work : works) work.wait();
    const int first = comm.rank() == 0 ? 1 : 0;
    EXPECT_FLOAT_EQ(received[0][299'999].item<float>(), static_cast<float>(first + 10));
  });
}

TEST(Communicator, DifferentSizesOfAnExchangeAreNamedOnEveryRank) {
  const auto outcomes = outcomes_of_ranks(2, [](const Communicator& comm) {
    const std::vector<int64_t> rows{1, comm.rank() == 0 ? 2 : 1};
    const std::vector<int64_t> expected{1, 1};
    comm.all_to_all(torch::empty({2}), torch::ones({rows[0] + rows[1]}), expected, rows);
  });
  for (const auto& outcome : outcomes) {
    EXPECT_EQ(outcome.code(), Code::kCallMismatch) << outcome.text();
    EXPECT_NE(outcome.text().find("rank 0 gives 2 elements to rank 1, which takes 1"),
              std::string::npos)
        << outcome.text();
  }
  const auto comm = Communicator::self();
  expect_error(Code::kTensorMismatch, {"all_to_all", "[2]", "[3]"},
               [&] { comm.all_to_all(torch::ones({3}), torch::ones({3}), {3}, {2}); });
  expect_error(Code::kTensorMismatch, {"gather", "undefined"},
               [&] { comm.gather(torch::Tensor(), torch::ones({3}), 0); });
}

TEST(Communicator, WhatFollowsAReductionRunsOnceWhenItIsDone) {
  run_ranks(2, [](const Communicator& comm) {
    const auto tensor = torch::full({3}, static_cast<float>(comm.rank() + 1));
    std::vector<float> seen;
    const auto look = [&] { seen.push_back(tensor[2].item<float>()); };
    Work work = comm.begin_all_reduce(tensor).then(look).then(look);
    while (!work.advance()) std::this_thread::yield();
    work.wait();
    EXPECT_EQ(seen, (std::vector<float>{3, 3}));
    work = std::move(work).then(look);
    EXPECT_EQ(seen.size(), 3U) << "at once where it is done already";
    EXPECT_TRUE(Work().advance());
  });
}

TEST(Communicator, AllocatedMemoryIsChargedToTheRanksAccount) {
  const auto comm = Communicator::self();
  const int64_t before = host_memory().live_bytes;
  {
    const auto tensor = comm.allocate(1 << 20, torch::kFloat32);
    EXPECT_EQ(tensor.abs().sum().item<float>(), 0.0F);
    EXPECT_GE(host_memory().live_bytes - before, 4 << 20);
  }
  EXPECT_EQ(host_memory().live_bytes, before);
}

TEST(Communicator, OneTensorIsSharedByAllRanksAndChargedOnce) {
  for (const int size : {1, 2, 3, 5}) {
    const int64_t before = host_memory().live_bytes;
    std::atomic<int64_t> charged = 0;
    run_ranks(size, [&](const Communicator& comm) {
      ASSERT_TRUE(comm.can_share());
      const auto weights = comm.allocate_shared(1001, torch::kFloat64);
      EXPECT_EQ(weights.abs().sum().item<double>(), 0.0);
      comm.barrier();
      if (comm.rank() == 0) charged = host_memory().live_bytes - before;
      if (comm.rank() == size - 1) weights.fill_(2.5);
      comm.barrier();
      EXPECT_EQ(weights.sum().item<double>(), 2502.5);
      comm.barrier();
    });
    EXPECT_GE(charged.load(), 1001 * 8);
    EXPECT_LT(charged.load(), 1001 * 8 * 2) << "charged to each of " << size << " ranks";
    EXPECT_EQ(host_memory().live_bytes, before);
  }
}

TEST(Communicator, SharedMemoryIsRefusedWhereItCannotBe) {
  expect_error(Code::kBackend, {"cuda", "can_share"}, [] {
    Communicator::self().allocate_shared(3, torch::device(torch::Device("cuda:0")));
  });
}

TEST(Communicator, RefusesTensorsItCannotMove) {
  const auto comm = Communicator::self();
  expect_error(Code::kTensorMismatch, {"undefined"}, [&] { comm.all_reduce(torch::Tensor()); });
  expect_error(Code::kTensorMismatch, {"[2, 3]", "contiguous"}, [&] {
    comm.all_reduce(torch::ones({3, 2}).t());
  });
  expect_error(Code::kTensorMismatch, {"complexfloat"},
               [&] { comm.all_reduce(torch::ones({2}, torch::kComplexFloat)); });
  expect_error(Code::kTensorMismatch, {"all_gather", "3", "4"},
               [&] { comm.all_gather(torch::ones({4}), torch::ones({3})); });
  expect_error(Code::kUsage, {"broadcast", "rank 4"}, [&] { comm.broadcast(torch::ones({3}), 4); });
}

TEST(Communicator, DifferentCallsAreNamedOnEveryRank) {
  const auto outcomes = outcomes_of_ranks(3, [](const Communicator& comm) {
    const auto tensor = torch::ones({comm.rank() == 2 ? 7 : 8});
    comm.all_reduce(tensor, ReduceOp::kSum, {.label = "bucket 3"});
  });
  for (const auto& outcome : outcomes) {
    EXPECT_EQ(outcome.code(), Code::kCallMismatch) << outcome.text();
    for (const char* part : {"all_reduce", "bucket 3", "7", "8", "rank"}) {
      EXPECT_NE(outcome.text().find(part), std::string::npos) << outcome.text();
    }
  }
}

TEST(MeanOverRanks, WeighsEachRankByItsRowsInOneCollective) {
  for (const int size : {1, 2, 3, 5}) {
    run_ranks(size, [&](const Communicator& comm) {
      // Rank r has r rows, all of value r; rank 0 has none, and so no mean.
      const double rows = size == 1 ? 1 : comm.rank();
      const double loss = rows == 0 ? std::nan("") : comm.rank();
      const auto means = mean_over_ranks(
          comm, {{"loss", torch::tensor(loss)}, {"one", 1}, {"accuracy", 2 * loss}}, rows);
      double sum = 0;
      double total = 0;
      for (int rank = 0; rank < size; ++rank) {
        sum += rank * rank;
        total += rank;
      }
      const double expected = size == 1 ? 0 : sum / total;
      EXPECT_DOUBLE_EQ(means.at("loss"), expected);
      EXPECT_DOUBLE_EQ(means.at("accuracy"), 2 * expected);
      EXPECT_DOUBLE_EQ(means.at("one"), 1);
      EXPECT_EQ(comm.stats().all_reduces, 1);
    });
  }
}

TEST(MeanOverRanks, RefusesWhatHasNoMean) {
  const auto comm = Communicator::self();
  expect_error(Code::kUsage, {"mean of loss", "zero"}, [&] {
    mean_over_ranks(comm, {{"loss", 1.0}}, 0);
  });
  expect_error(Code::kUsage, {"-1"}, [&] { mean_over_ranks(comm, {{"loss", 1.0}}, -1); });
  expect_error(Code::kTensorMismatch, {"[2]"}, [&] {
    mean_over_ranks(comm, {{"loss", torch::ones({2})}});
  });
  const auto outcomes = outcomes_of_ranks(2, [](const Communicator& ranks) {
    mean_over_ranks(ranks, {{ranks.rank() == 0 ? "loss" : "accuracy", 1.0}});
  });
  for (const auto& outcome : outcomes) {
    EXPECT_EQ(outcome.code(), Code::kCallMismatch);
    EXPECT_NE(outcome.text().find("mean of accuracy"), std::string::npos) << outcome.text();
  }
}

// Ranks on GPUs of these letters, ' ' is the CPU. A GPU reaches the others of its case.
std::vector<GpuInfo> cards_of(const std::string& gpus) {
  std::vector<GpuInfo> infos;
  for (const char gpu : gpus) {
    GpuInfo& info = infos.emplace_back();
    if (gpu == ' ') continue;
    info.on_gpu = 1;
    info.shares = 1;
    info.uuid[15] = gpu;
    std::copy_n("0000:1b:00.0", 13, info.bus_id);
    info.bus_id[6] = gpu;
    for (const char other : gpus) {
      if (other == gpu || other == ' ' || std::isupper(other) != std::isupper(gpu)) continue;
      info.reached.at(static_cast<size_t>(info.reached_count++))[15] = other;
    }
  }
  return infos;
}

TEST(GpuBackendChoice, FollowsWhoSharesAGpu) {
  const auto choose = [](const char* asked, const char* gpus, bool one_host, bool has_nccl = true) {
    return choose_gpu_backend(asked, cards_of(gpus), one_host, has_nccl);
  };
  EXPECT_EQ(choose("auto", "abcd", true), "nccl");
  EXPECT_EQ(choose("auto", "abcd", false), "nccl");
  EXPECT_EQ(choose("auto", "abcd", true, /*has_nccl=*/false), "ipc");
  EXPECT_EQ(choose("auto", "abcd", false, /*has_nccl=*/false), "");
  EXPECT_EQ(choose("auto", "aBcD", true, /*has_nccl=*/false), "");
  EXPECT_EQ(choose("auto", "aaaa", true), "ipc");
  EXPECT_EQ(choose("auto", "abca", true), "ipc");
  EXPECT_EQ(choose("auto", "aaBB", true), "") << "the two GPUs do not reach each other";
  EXPECT_EQ(choose("auto", "aBcB", true), "") << "nor do all of these three";
  EXPECT_EQ(choose("auto", "aBcD", true), "nccl") << "which finds other ways";
  EXPECT_EQ(choose("auto", "aabb", false), "");
  EXPECT_EQ(choose("auto", std::string(64, 'a').c_str(), true), "ipc");
  EXPECT_EQ(choose("auto", std::string(65, 'a').c_str(), true), "") << "more than ipc serves";
  auto alone = cards_of("aa");
  alone[1].shares = 0;
  EXPECT_EQ(choose_gpu_backend("auto", alone, true, true), "") << "without CUDA IPC";
  EXPECT_EQ(choose("auto", "ab d", true), "");
  EXPECT_EQ(choose("auto", "    ", true), "");
  EXPECT_EQ(choose("auto", "a", true), "");
  EXPECT_EQ(choose("nccl", "a", true), "nccl");
  auto hosts = cards_of("aa");
  for (GpuInfo& info : hosts) info.names_host = 1;
  EXPECT_EQ(choose_gpu_backend("nccl", hosts, true, true), "nccl") << "each a host of its own";
  EXPECT_EQ(choose_gpu_backend("auto", hosts, true, true), "ipc");
  hosts[0].names_host = 0;
  EXPECT_THROW(choose_gpu_backend("nccl", hosts, true, true), Error);
  EXPECT_EQ(choose("ipc", "abcd", true), "ipc");
  EXPECT_EQ(choose("ipc", "aa", true), "ipc");
}

TEST(GpuBackendChoice, NamesRanksAndGpuOfWhatCannotBe) {
  expect_error(Code::kBackend, {"nccl", "ranks 1, 3", "0000:1c:00.0", "ipc"},
               [] { choose_gpu_backend("nccl", cards_of("bcdc"), true, true); });
  expect_error(Code::kBackend, {"nccl", "ranks 0, 1", "gloo"},
               [] { choose_gpu_backend("nccl", cards_of("aab"), false, true); });
  expect_error(Code::kBackend, {"ipc", "one host"},
               [] { choose_gpu_backend("ipc", cards_of("ab"), false, true); });
  expect_error(Code::kBackend, {"ipc", "rank 2", "CPU", "cuda:0*2"},
               [] { choose_gpu_backend("ipc", cards_of("aa a"), true, true); });
  expect_error(Code::kBackend, {"nccl", "rank 0", "CPU", "a GPU of its own"},
               [] { choose_gpu_backend("nccl", cards_of("  "), true, true); });
}

TEST(GpuBackendChoice, AWorldWithoutGpusRefusesTheirBackends) {
  for (const char* backend : {"nccl", "ipc"}) {
    expect_error(Code::kBackend, {backend},
                 [&] { World::from_env({.devices = "cpu:1", .backend = backend}); });
  }
  expect_error(Code::kBackend, {"\"ucc\"", "nccl or ipc"},
               [] { World::from_env({.devices = "cpu:1", .backend = "ucc"}); });
}

// More ranks of one host than share memory: they connect over TCP.
TEST(HostBackendChoice, ALargeWorldOfOneHostIsNotRefused) {
  const std::vector<std::pair<std::string, std::string>> variables = {{"RANK", "1"},
                                                                      {"LOCAL_RANK", "1"},
                                                                      {"WORLD_SIZE", "254"},
                                                                      {"LOCAL_WORLD_SIZE", "254"},
                                                                      {"MASTER_ADDR", "127.0.0.1"},
                                                                      {"MASTER_PORT", "29500"}};
  for (const auto& [name, value] : variables) ::setenv(name.c_str(), value.c_str(), 1);
  const auto join = [](const std::string& backend) {
    World::from_env(
        {.devices = "cpu:254", .backend = backend, .timeout = std::chrono::milliseconds(100)});
  };
  expect_error(Code::kRendezvous, {"the store of rank 0"}, [&] { join("auto"); });
  expect_error(Code::kBackend, {"254 ranks", "1 to 250", "gloo"}, [&] { join("shm"); });
  for (const auto& [name, value] : variables) ::unsetenv(name.c_str());
}

TEST(Mesh, AxesAreGroupsOfTheRanksThatDifferInThemOnly) {
  run_ranks(6, [](const Communicator& world) {
    const Mesh mesh(world, {{"dp", 2}, {"tp", 3}});
    EXPECT_EQ(mesh.coordinate("dp"), world.rank() / 3);
    EXPECT_EQ(mesh.coordinate("tp"), world.rank() % 3);
    EXPECT_EQ(mesh.axis("tp").size(), 3);
    const auto along_tp = torch::full({1}, world.rank(), torch::kInt64);
    mesh.axis("tp").all_reduce(along_tp);
    EXPECT_EQ(along_tp.item<int64_t>(), world.rank() < 3 ? 3 : 12);
    const auto along_dp = torch::full({1}, world.rank(), torch::kInt64);
    mesh.axis("dp").all_reduce(along_dp);
    EXPECT_EQ(along_dp.item<int64_t>(), 2 * (world.rank() % 3) + 3);
    EXPECT_EQ(mesh.axis("dp").world_ranks(),
              (std::vector<int>{world.rank() % 3, world.rank() % 3 + 3}));
  });
}

TEST(Mesh, APlaneIsTheRanksThatDifferInItsAxesOnly) {
  run_ranks(8, [](const Communicator& world) {
    const Mesh mesh(world, {{"dp", 2}, {"pp", 2}, {"tp", 2}});
    const int dp = world.rank() / 4;
    const int pp = world.rank() / 2 % 2;
    const int tp = world.rank() % 2;
    using Ranks = std::vector<int>;
    const auto model = mesh.plane({"pp", "tp"});
    EXPECT_EQ(model.world_ranks(), (Ranks{4 * dp, 4 * dp + 1, 4 * dp + 2, 4 * dp + 3}));
    EXPECT_EQ(model.rank(), 2 * pp + tp);
    // The order of the names does not matter, so that ranks may differ in it.
    const auto across = world.rank() % 3 == 0 ? mesh.plane({"tp", "dp"}) : mesh.plane({"dp", "tp"});
    EXPECT_EQ(across.world_ranks(), (Ranks{2 * pp, 2 * pp + 1, 2 * pp + 4, 2 * pp + 5}));
    const auto sum = torch::full({1}, world.rank(), torch::kInt64);
    across.all_reduce(sum);
    EXPECT_EQ(sum.item<int64_t>(), 8 * pp + 10);
    EXPECT_EQ(mesh.plane({"pp"}).world_ranks(), mesh.axis("pp").world_ranks());
    EXPECT_EQ(mesh.plane({"dp", "pp", "tp"}).world_ranks(), world.world_ranks());
  });
}

TEST(Mesh, RefusesPlanesItDoesNotHave) {
  const Mesh mesh(Communicator::self(), {{"dp", 1}, {"pp", 1}});
  expect_error(Code::kWorld, {"no axis pq", "did you mean"}, [&] { mesh.plane({"dp", "pq"}); });
  expect_error(Code::kWorld, {"axis dp twice"}, [&] { mesh.plane({"dp", "dp"}); });
  expect_error(Code::kWorld, {"names no axis"}, [&] { mesh.plane({}); });
}

TEST(Mesh, RefusesAxesThatDoNotFit) {
  const auto comm = Communicator::self();
  expect_error(Code::kWorld, {"dp 2 x pp 2", "4", "1"}, [&] {
    Mesh(comm, {{"dp", 2}, {"pp", 2}});
  });
  expect_error(Code::kWorld, {"dp"}, [&] { Mesh(comm, {{"dp", 1}, {"dp", 1}}); });
  expect_error(Code::kWorld, {"size 0"}, [&] { Mesh(comm, {{"dp", 0}}); });
  expect_error(Code::kWorld, {"dq", "did you mean dp"}, [&] {
    Mesh(comm, {{"dp", 1}}).axis("dq");
  });
}

}  // namespace
}  // namespace lockstep::test::communicator_test
