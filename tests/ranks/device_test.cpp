// Logical devices: thread budgets, memory accounts, and the modes and random numbers that follow
// work onto workers.

#include "lockstep/device.hpp"

#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <thread>

#include "device/cpu_allocator.hpp"
#include "lockstep/error.hpp"
#include "lockstep/memory.hpp"
#include "lockstep/trace.hpp"
#include "tensor_support.hpp"
#include "torch_compat.hpp"

namespace lockstep::test::device_test {
namespace {

using test::expect_error;

double cpu_seconds_of(int who) {
  rusage usage{};
  getrusage(who, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

// A matrix product large enough that a BLAS with no budget would use every core.
void multiply(int times) {
  const auto a = torch::ones({512, 512});
  for (int i = 0; i < times; ++i) torch::mm(a, a);
}

// Processor time of the whole process divided by that of the worker. Unlike wall time, it does not
// depend on other programs.
TEST(Budget, AWorkerWithOneThreadComputesOnOneThread) {
  Hardware hardware = detect_hardware();
  hardware.threads_per_device = 1;  // even if two devices had several cores each
  const Devices devices(plan_devices("cpu:2", hardware));
  devices[0].run("warm up", [] { multiply(1); });
  const double process_before = cpu_seconds_of(RUSAGE_SELF);
  double worker = 0;
  devices[0].run("multiply", [&] {
    const double before = cpu_seconds_of(RUSAGE_THREAD);
    multiply(60);
    worker = cpu_seconds_of(RUSAGE_THREAD) - before;
  });
  const double process = cpu_seconds_of(RUSAGE_SELF) - process_before;
  EXPECT_GT(worker, 0.02) << "the work was too small to tell";
  EXPECT_LT(process, 1.1 * worker) << "other threads computed too: the BLAS ignores the budget";
}

TEST(Budget, TwoWorkersRunOnTheirOwnCores) {
  const Devices devices("cpu:2");
  if (devices[0].plan().cores.empty()) GTEST_SKIP() << "needs two cores";
  const auto cores_of = [](Device& device) {
    return device.run("look", [] {
      cpu_set_t mask;
      sched_getaffinity(0, sizeof(mask), &mask);
      std::vector<int> cores;
      for (int core = 0; core < CPU_SETSIZE; ++core) {
        if (CPU_ISSET(core, &mask)) cores.push_back(core);
      }
      return cores;
    });
  };
  EXPECT_EQ(cores_of(devices[0]), devices[0].plan().cores);
  EXPECT_EQ(cores_of(devices[1]), devices[1].plan().cores);
  EXPECT_NE(cores_of(devices[0]), cores_of(devices[1]));
}

// libtorch keeps a process-wide number besides each thread's own. A thread starts with the former.
TEST(Budget, SurvivesOtherThreadsThatChangeTheProcessWideNumber) {
  const Devices devices("cpu:2");
  torch::set_num_threads(devices[0].plan().threads + 2);
  EXPECT_EQ(devices[0].run("look", [] { return torch::get_num_threads(); }),
            devices[0].plan().threads);
  torch::set_num_threads(1);
}

TEST(Budget, UseDeviceRestoresTheThread) {
  const int threads = torch::get_num_threads();
  cpu_set_t before, after;
  sched_getaffinity(0, sizeof(before), &before);
  {
    const Devices devices("cpu:2");
    const UseDevice home(devices[0]);
    EXPECT_EQ(current_device(), &devices[0]);
    EXPECT_EQ(torch::get_num_threads(), devices[0].plan().threads);
    const UseDevice again(devices[0]);
    const UseDevice other(devices[1]);
    EXPECT_EQ(current_device(), &devices[1]);
  }
  sched_getaffinity(0, sizeof(after), &after);
  EXPECT_EQ(current_device(), nullptr);
  EXPECT_EQ(torch::get_num_threads(), threads);
  EXPECT_TRUE(CPU_EQUAL(&before, &after));
}

TEST(Memory, IsExactLiveAndPeakPerDevice) {
  const Devices devices("cpu:2");
  torch::Tensor kept;
  devices[1].run("allocate", [&] {
    kept = torch::empty({1000});            // 4000 bytes
    const auto gone = torch::empty({500});  // 2000 bytes
  });
  EXPECT_EQ(devices[1].memory().live_bytes, 4000);
  EXPECT_EQ(devices[1].memory().peak_bytes, 6000);
  EXPECT_EQ(devices[0].memory().peak_bytes, 0);
  devices[1].reset_peak_memory();
  EXPECT_EQ(devices[1].memory().peak_bytes, 4000);
  kept.reset();  // freed here, credited there
  EXPECT_EQ(devices[1].memory().live_bytes, 0);
}

TEST(Memory, KnowsWhoseATensorIs) {
  const Devices devices("cpu:2");
  const auto mine = devices[0].run("make", [] { return torch::ones({4}); });
  const auto hosts = torch::ones({4});
  float numbers[4] = {};
  const auto foreign = torch::from_blob(numbers, {4});
  EXPECT_TRUE(devices[0].owns(mine));
  EXPECT_TRUE(devices[0].owns(mine.view({2, 2}))) << "a view is where its storage is";
  EXPECT_FALSE(devices[1].owns(mine));
  EXPECT_FALSE(devices[1].owns(hosts)) << "nobody claimed it";
  EXPECT_FALSE(devices[1].owns(foreign));
}

TEST(Memory, WhatNoDeviceAskedForIsTheHosts) {
  const Devices devices("cpu:1");  // installs the allocator
  const int64_t before = host_memory().live_bytes;
  const auto tensor = torch::empty({1000});
  EXPECT_EQ(host_memory().live_bytes - before, 4000);
  EXPECT_EQ(devices[0].memory().live_bytes, 0);
}

TEST(Memory, ATensorMayOutliveItsDevice) {
  torch::Tensor survivor;
  {
    const Devices devices("cpu:1");
    survivor = devices[0].run("make", [] { return torch::full({100'000}, 2.0); });
  }
  EXPECT_EQ(survivor.sum().item<double>(), 200'000);
}

TEST(Memory, LargeBlocksThatRecurAreReused) {
  const Devices devices("cpu:1");
  devices[0].run("cycle", [&] {
    const auto other = torch::empty({1 << 18});
    for (int i = 0; i < 2; ++i) torch::empty({1 << 20});  // the size recurs
    const void* first = torch::empty({1 << 20}).data_ptr();
#if !defined(__SANITIZE_ADDRESS__)
    const auto small = torch::empty({1 << 12});  // malloc would cut it from the freed block
    EXPECT_EQ(torch::empty({1 << 20}).data_ptr(), first)
        << "the freed block waits for the same size";
#endif
    (void)first;
  });
  EXPECT_EQ(devices[0].memory().live_bytes, 0);
}

int64_t resident_bytes() {
  std::ifstream file("/proc/self/statm");
  int64_t total_pages = 0;
  int64_t resident_pages = 0;
  file >> total_pages >> resident_pages;
  return resident_pages * sysconf(_SC_PAGESIZE);
}

#if !defined(__SANITIZE_ADDRESS__)

// Blocks that are allocated once and freed are returned to the system, inside a device and outside.
TEST(Memory, WhatWasNeededOnceIsNotKept) {
  constexpr int64_t kBlock = int64_t{40} << 20;
  constexpr int kBlocks = 15;
  const Devices devices("cpu:2");
  const auto fill = [] {
    std::vector<torch::Tensor> blocks;
    for (int i = 0; i < kBlocks; ++i) blocks.push_back(torch::ones({kBlock}, torch::kUInt8));
    return resident_bytes();
  };
  const int64_t before = resident_bytes();
  int64_t most = 0;
  for (size_t i = 0; i < devices.size(); ++i) most = devices[i].run("fill", fill);
  EXPECT_GE(most - before, kBlock * kBlocks) << "the blocks were never there";
  fill();
  EXPECT_LT(resident_bytes() - before, 2 * kBlock);
}

// Blocks of a step are kept for the next one and returned when no step needs them any more.
TEST(Memory, KeptBlocksThatNobodyAsksForGoBack) {
  constexpr size_t kLarge = size_t{1} << 20;
  CpuPool& pool = CpuPool::make(make_memory_account());
  CpuPool& busy = CpuPool::make(make_memory_account());
  const auto step = [&] {
    void* a = pool.take(kLarge);
    void* b = pool.take(kLarge);
    CpuPool::give_back(a);
    CpuPool::give_back(b);
  };
  const auto pass_a_period = [&] {
    for (uint64_t i = 0; i < CpuPool::kPeriod; ++i) {
      CpuPool::give_back(busy.take(CpuPool::kSmallestKept));
    }
  };
  step();
  EXPECT_EQ(pool.kept_bytes(), 0U) << "nothing says that these will be needed again";
  step();
  EXPECT_EQ(pool.kept_bytes(), 2 * kLarge);
  pass_a_period();
  step();
  EXPECT_EQ(pool.kept_bytes(), 2 * kLarge) << "they were needed in this period";
  CpuPool::give_back(pool.take(kLarge));
  pass_a_period();
  CpuPool::give_back(pool.take(kLarge));
  pass_a_period();
  EXPECT_EQ(pool.kept_bytes(), kLarge) << "only one of the two was needed in the last period";
  pass_a_period();
  EXPECT_EQ(pool.kept_bytes(), 0U);
}

TEST(Memory, LiveAndKeptBytesStayWithinThePeak) {
  CpuPool& pool = CpuPool::make(make_memory_account());
  constexpr size_t kUnit = CpuPool::kSmallestKept;
  for (int round = 0; round < 3; ++round) {
    for (size_t units = 1; units <= 50; ++units) CpuPool::give_back(pool.take(units * kUnit));
  }
  EXPECT_GT(pool.kept_bytes(), 0U);
  EXPECT_LE(pool.kept_bytes(), 50 * kUnit);
  void* largest = pool.take(50 * kUnit);
  EXPECT_EQ(pool.kept_bytes(), 0U);
  CpuPool::give_back(largest);
}

// A limit on address space that leaves room for one block but not for two.
TEST(Memory, WhatOnePoolKeepsDoesNotMakeAnotherFail) {
  constexpr int64_t kBlock = int64_t{3} << 29;
  const auto in_child = [] {
    const Devices devices("cpu:2");
    std::ifstream file("/proc/self/statm");
    int64_t total_pages = 0;
    file >> total_pages;
    const auto limit = static_cast<rlim_t>(total_pages * sysconf(_SC_PAGESIZE) + kBlock * 3 / 2);
    const rlimit address_space{limit, limit};
    setrlimit(RLIMIT_AS, &address_space);
    const auto allocate_and_free = [] {
      for (int i = 0; i < 3; ++i) torch::empty({kBlock}, torch::kUInt8);
    };
    allocate_and_free();
    for (size_t i = 0; i < devices.size(); ++i) {
      const UseDevice home(devices[i]);
      allocate_and_free();
    }
    allocate_and_free();
  };
  const pid_t child = fork();
  if (child == 0) {
    try {
      in_child();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "%s\n", describe(error).c_str());
      _exit(1);
    }
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

#endif

TEST(Memory, ManyThreadsAllocateAndFreeEachOthersBlocks) {
  const Devices devices("cpu:3");
  std::vector<torch::Tensor> blocks(300);
  std::vector<std::future<void>> running;
  for (size_t d = 0; d < 3; ++d) {
    running.push_back(devices[d].submit("fill", [&, d] {
      for (size_t i = d; i < blocks.size(); i += 3)
        blocks[i] = torch::full({10'000}, static_cast<double>(i));
    }));
  }
  for (auto& each : running) each.get();
  running.clear();
  for (size_t d = 0; d < 3; ++d) {
    running.push_back(devices[d].submit("free", [&, d] {
      for (size_t i = (d + 1) % 3; i < blocks.size(); i += 3) {
        EXPECT_EQ(blocks[i][9'999].item<double>(), static_cast<double>(i));
        blocks[i].reset();
      }
    }));
  }
  for (auto& each : running) each.get();
  for (size_t d = 0; d < 3; ++d) EXPECT_EQ(devices[d].memory().live_bytes, 0) << "device " << d;
}

TEST(Modes, GradModeFollowsWork) {
  const Devices devices("cpu:1");
  const auto look = [] { return torch::GradMode::is_enabled(); };
  EXPECT_TRUE(devices[0].run("look", look));
  {
    const torch::NoGradGuard no_grad;
    EXPECT_FALSE(devices[0].run("look", look));
    const torch::AutoGradMode enabled(true);
    EXPECT_TRUE(devices[0].run("look", look));
  }
  const c10::InferenceMode inference;
  EXPECT_TRUE(devices[0].run("look", [] { return c10::InferenceMode::is_enabled(); }));
}

TEST(Modes, AutocastFollowsWorkAndLeavesWithIt) {
  const Devices devices("cpu:1");
  const auto multiply_dtype = [] {
    return torch::mm(torch::ones({4, 4}), torch::ones({4, 4})).scalar_type();
  };
  EXPECT_EQ(devices[0].run("multiply", multiply_dtype), torch::kFloat32);
  compat::enable_cpu_autocast(true);
  EXPECT_EQ(devices[0].run("multiply", multiply_dtype), torch::kBFloat16);
  compat::enable_cpu_autocast(false);
  at::autocast::clear_cache();
  EXPECT_EQ(devices[0].run("multiply", multiply_dtype), torch::kFloat32);
}

TEST(Random, WorkersDrawTheSameNumbersEveryRunWhateverTheirTiming) {
  const auto draw = [](int jitter) {
    const Devices devices("cpu:3");
    torch::manual_seed(11);
    std::vector<std::future<torch::Tensor>> running;
    for (int round = 0; round < 4; ++round) {
      for (size_t d = 0; d < 3; ++d) {
        running.push_back(devices[d].submit("draw", [=] {
          std::this_thread::sleep_for(
              std::chrono::microseconds(jitter * static_cast<int>((d * 7 + round) % 3)));
          const auto dropped = torch::dropout(torch::ones({64}), 0.5, true);
          return torch::cat({dropped, torch::randn({8}), torch::rand({8}),
                             torch::randperm(8).to(torch::kFloat32), torch::empty({8}).uniform_(),
                             torch::bernoulli(torch::full({8}, 0.5))});
        }));
      }
    }
    std::vector<torch::Tensor> drawn;
    for (auto& each : running) drawn.push_back(each.get());
    return torch::stack(drawn);
  };
  const auto first = draw(0);
  EXPECT_TRUE(torch::equal(first, draw(300)));
  for (int64_t i = 1; i < first.size(0); ++i)
    EXPECT_FALSE(torch::equal(first[0], first[i])) << "task " << i;
}

TEST(Random, TheSeedGovernsWorkersAndTheirWorkLeavesTheCallersSequenceAlone) {
  const Devices devices("cpu:1");
  const auto draw = [&] { return devices[0].run("draw", [] { return torch::rand({8}); }); };
  torch::manual_seed(1);
  const auto one = draw();
  const auto next_here = torch::rand({4});
  torch::manual_seed(2);
  EXPECT_FALSE(torch::equal(one, draw()));
  torch::manual_seed(1);
  EXPECT_TRUE(torch::equal(next_here, torch::rand({4})))
      << "the worker's numbers came out of the caller's sequence";
  torch::manual_seed(1);
  EXPECT_TRUE(torch::equal(one, draw()));
}

// Seeding again with the same seed restores the generator's state, and must be noticed
// nevertheless.
TEST(Random, WhatFollowsASeedingIsAlwaysTheSame) {
  const Devices devices("cpu:2");
  const auto draw = [&] {
    std::vector<torch::Tensor> drawn;
    for (int round = 0; round < 3; ++round) {
      for (size_t i = 0; i < devices.size(); ++i) {
        drawn.push_back(devices[i].run("draw", [] { return torch::rand({8}); }));
      }
      if (round == 1) drawn.push_back(torch::rand({3}));
    }
    return torch::cat(drawn);
  };
  torch::manual_seed(7);
  const auto expected = draw();
  const auto expect_same = [&](const char* what) {
    torch::manual_seed(7);
    EXPECT_TRUE(torch::equal(draw(), expected)) << "after " << what;
  };
  torch::manual_seed(7);
  expect_same("nothing");
  expect_same("the same");
  torch::manual_seed(7);
  devices[1].run("draw", [] { return torch::rand({8}); });
  expect_same("a task of one device");
  torch::manual_seed(7);
  torch::rand({5});
  expect_same("numbers drawn here");
  torch::rand({2000});
  expect_same("many numbers drawn here");
  torch::manual_seed(8);
  draw();
  expect_same("another seed");
}

TEST(Random, WorkInBetweenChangesNoNumberOfTheCallersSequence) {
  const Devices devices("cpu:1");
  const auto draw = [&](bool with_work) {
    torch::manual_seed(7);
    std::vector<torch::Tensor> drawn;
    for (int64_t i = 0; i < 1500; ++i) {  // past mt19937's 624 words twice, from every position
      if (with_work) devices[0].run("nothing", [] {});
      drawn.push_back(torch::rand({1}));
      if (i % 7 == 0) drawn.push_back(torch::randn({1}));
    }
    return torch::cat(drawn);
  };
  EXPECT_TRUE(torch::equal(draw(false), draw(true)));
}

TEST(Random, AnExplicitGeneratorIsObeyed) {
  const Devices devices("cpu:1");
  auto generator = at::detail::createCPUGenerator(99);
  const auto expected = torch::rand({8}, at::detail::createCPUGenerator(99));
  EXPECT_TRUE(
      torch::equal(devices[0].run("draw", [&] { return torch::rand({8}, generator); }), expected));
}

TEST(Worker, RunsInOrderReturnsValuesAndRethrows) {
  const Devices devices("cpu:1");
  std::vector<int> order;
  for (int i = 0; i < 20; ++i) devices[0].submit("note", [&, i] { order.push_back(i); });
  EXPECT_EQ(devices[0].run("sum", [] { return 40 + 2; }), 42);
  EXPECT_EQ(order.size(), 20U);
  EXPECT_TRUE(std::is_sorted(order.begin(), order.end()));
  EXPECT_THROW(devices[0].run("fail", [] { throw std::runtime_error("no"); }), std::runtime_error);
  EXPECT_EQ(devices[0].run("nested", [&] { return devices[0].run("inside", [] { return 7; }); }),
            7);
}

TEST(Worker, BusyTimeGrowsWithWorkAndNotWithWaiting) {
  const Devices devices("cpu:2");
  devices[0].run("multiply", [] { multiply(30); });
  const double busy = devices[0].busy_seconds();
  EXPECT_GT(busy, 0);
  EXPECT_LT(devices[1].busy_seconds(), busy);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_LT(devices[0].busy_seconds() - busy, 0.01);
  const UseDevice here(devices[1]);
  multiply(30);
  EXPECT_GT(devices[1].busy_seconds(), 0.3 * busy)
      << "a thread under UseDevice works for the device";
}

TEST(Worker, TimeWithoutACoreIsCounted) {
  const Hardware hardware = detect_hardware();
  SlotPlan plan = plan_devices("cpu:1", hardware).front();
  plan.cores = {hardware.cores.front()};
  plan.threads = 1;
  const Devices one({plan});
  const Devices other({plan});  // on the same core
  if (!one[0].queued_seconds()) GTEST_SKIP() << "no /proc/self/task/*/schedstat";
  std::thread rival([&other] { other[0].run("multiply", [] { multiply(60); }); });
  one[0].run("multiply", [] { multiply(60); });
  rival.join();
  EXPECT_GT(*one[0].queued_seconds() + *other[0].queued_seconds(), 0);
}

TEST(Worker, TasksAppearInTheTimeline) {
  Trace trace;
  trace.enable();
  const Devices devices("cpu:2");
  devices[1].record_to(&trace, 3);
  devices[1].run("forward", [] { multiply(1); });
  const auto spans = trace.spans();
  ASSERT_EQ(spans.size(), 1U) << "whoever has the result finds the span too";
  EXPECT_EQ(spans[0].name, "forward");
  EXPECT_EQ(spans[0].rank, 3);
  EXPECT_EQ(spans[0].device, 1);
  EXPECT_GT(spans[0].end_ns, spans[0].begin_ns);
}

TEST(Worker, AForkedChildIsToldThatItHasNone) {
  const Devices devices("cpu:1");
  const pid_t child = fork();
  if (child == 0) {
    try {
      devices[0].submit("never", [] {});
      _exit(1);
    } catch (const Error& error) {
      _exit(error.code() == Code::kEngine ? 0 : 2);
    }
  }
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

TEST(Devices, ABadSpecIsAnError) {
  expect_error(Code::kDeviceSpec, {"cpu:0"}, [] { Devices devices("cpu:0"); });
  expect_error(Code::kDeviceMissing, {"GPU 99"}, [] { Devices devices("cuda:99"); });
}

}  // namespace
}  // namespace lockstep::test::device_test
