#include "lockstep/device_plan.hpp"

#include <sched.h>
#include <stdlib.h>

#include <numeric>
#include <set>

#include "support.hpp"

namespace lockstep::test::device_plan_test {
namespace {

Hardware machine(int cores, int gpus = 0) {
  Hardware hardware;
  hardware.cores.resize(static_cast<size_t>(cores));
  std::iota(hardware.cores.begin(), hardware.cores.end(), 0);
  hardware.gpus = gpus;
  return hardware;
}

std::vector<std::string> names(const std::vector<SlotPlan>& slots) {
  std::vector<std::string> result;
  for (const auto& slot : slots) result.push_back(slot.name());
  return result;
}

std::vector<std::string> homes(const std::vector<SlotPlan>& slots) {
  std::vector<std::string> result;
  for (const auto& slot : slots) result.push_back(slot.physical());
  return result;
}

using Texts = std::vector<std::string>;

TEST(DevicePlan, DefaultIsEveryGpuOrTwoOnTheCpu) {
  EXPECT_EQ(names(plan_devices("", machine(4))), (Texts{"cpu:0", "cpu:1"}));
  EXPECT_EQ(names(plan_devices("", machine(4, 3))), (Texts{"cuda:0", "cuda:1", "cuda:2"}));
}

TEST(DevicePlan, CpuWithoutANumberIsOneDevice) {
  const auto slots = plan_devices("cpu", machine(4));
  ASSERT_EQ(slots.size(), 1U);
  EXPECT_EQ(slots[0].name(), "cpu:0");
  EXPECT_EQ(slots[0].threads, 4);
  EXPECT_EQ(slots[0].physical(), "cores 0-3");
  EXPECT_EQ(slots, plan_devices("cpu:1", machine(4)));
}

struct Budget {
  int cores;
  int devices;
  int threads;  // of each device
  int shared_by;
};

class DeviceBudget : public testing::TestWithParam<Budget> {};

TEST_P(DeviceBudget, DividesCoresWithoutOverlap) {
  const auto& [cores, devices, threads, shared_by] = GetParam();
  const auto slots = plan_devices("cpu:" + std::to_string(devices), machine(cores));
  ASSERT_EQ(static_cast<int>(slots.size()), devices);
  std::set<int> taken;
  for (int index = 0; index < devices; ++index) {
    const SlotPlan& slot = slots[static_cast<size_t>(index)];
    EXPECT_EQ(slot.kind, DeviceKind::kCpu);
    EXPECT_EQ(slot.index, index);
    EXPECT_EQ(slot.gpu, -1);
    EXPECT_EQ(slot.threads, threads);
    EXPECT_EQ(slot.shared_by, shared_by);
    EXPECT_EQ(slot.cores.size(), shared_by == 1 ? static_cast<size_t>(threads) : 0U);
    for (const int core : slot.cores) EXPECT_TRUE(taken.insert(core).second) << "core " << core;
  }
}

INSTANTIATE_TEST_SUITE_P(Machines, DeviceBudget,
                         testing::Values(Budget{2, 1, 2, 1}, Budget{2, 2, 1, 1}, Budget{2, 3, 1, 3},
                                         Budget{2, 5, 1, 5}, Budget{4, 1, 4, 1}, Budget{4, 2, 2, 1},
                                         Budget{4, 3, 1, 1}, Budget{4, 4, 1, 1}, Budget{4, 5, 1, 5},
                                         Budget{5, 2, 2, 1}, Budget{5, 3, 1, 1}, Budget{5, 5, 1, 1},
                                         Budget{64, 2, 32, 1}, Budget{64, 3, 21, 1},
                                         Budget{64, 64, 1, 1}, Budget{64, 65, 1, 65},
                                         Budget{64, 256, 1, 256}));

TEST(DevicePlan, WithoutANameGpusServeAndAreSharedWhereTheyAreTooFew) {
  EXPECT_EQ(default_devices(machine(4), 3), "cpu:3");
  EXPECT_EQ(default_devices(machine(4, 1), 1), "cuda:0");
  EXPECT_EQ(default_devices(machine(4, 1), 3), "cuda:0*3");
  EXPECT_EQ(default_devices(machine(4, 2), 3), "cuda:0*2,1");
  EXPECT_EQ(default_devices(machine(4, 2), 5), "cuda:0*3,1*2");
  EXPECT_EQ(default_devices(machine(4, 8), 2), "cuda:0,1");
}

TEST(DevicePlan, CpuDevicesSayWhereTheyLive) {
  EXPECT_EQ(homes(plan_devices("cpu:2", machine(2))), (Texts{"core 0", "core 1"}));
  EXPECT_EQ(homes(plan_devices("cpu:2", machine(5))), (Texts{"cores 0-1", "cores 2-3"}));
  EXPECT_EQ(homes(plan_devices("cpu:3", machine(2))),
            (Texts{"all cores, shared", "all cores, shared", "all cores, shared"}));
}

TEST(DevicePlan, UsesTheCoresTheProcessMayRunOn) {
  Hardware hardware;
  hardware.cores = {1, 2, 3, 8, 9, 12};
  EXPECT_EQ(homes(plan_devices("cpu:1", hardware)), (Texts{"cores 1-3,8-9,12"}));
  EXPECT_EQ(homes(plan_devices("cpu:3", hardware)),
            (Texts{"cores 1-2", "cores 3,8", "cores 9,12"}));
}

TEST(DevicePlan, ThreadsFollowOmpNumThreads) {
  Hardware hardware = machine(8, 2);
  hardware.threads_per_device = 3;
  for (const auto& slot : plan_devices("cpu:2", hardware)) {
    EXPECT_EQ(slot.threads, 3);
    EXPECT_EQ(slot.cores.size(), 4U);
  }
  for (const auto& slot : plan_devices("cpu:16", hardware)) EXPECT_EQ(slot.threads, 3);
  for (const auto& slot : plan_devices("cuda", hardware)) EXPECT_EQ(slot.threads, 3);
}

TEST(DevicePlan, CudaNamesGpus) {
  EXPECT_EQ(names(plan_devices("cuda", machine(8, 2))), (Texts{"cuda:0", "cuda:1"}));
  const auto slots = plan_devices("cuda:1,0", machine(8, 2));
  EXPECT_EQ(names(slots), (Texts{"cuda:1", "cuda:0"}));
  EXPECT_EQ(homes(slots), (Texts{"GPU 1", "GPU 0"}));
  EXPECT_EQ(slots[0].kind, DeviceKind::kCuda);
  EXPECT_EQ(slots[0].index, 0);
  EXPECT_EQ(slots[0].gpu, 1);
  EXPECT_EQ(slots[0].shared_by, 1);
  EXPECT_EQ(slots[0].threads, 1);
  EXPECT_EQ(slots[1].index, 1);
}

TEST(DevicePlan, CudaSlotsThatShareAGpuSaySo) {
  const auto slots = plan_devices("cuda:0*2,1,2*3", machine(8, 3));
  EXPECT_EQ(names(slots),
            (Texts{"cuda:0#0", "cuda:0#1", "cuda:1", "cuda:2#0", "cuda:2#1", "cuda:2#2"}));
  EXPECT_EQ(slots[1].shared_by, 2);
  EXPECT_EQ(slots[1].slot_on_gpu, 1);
  EXPECT_EQ(slots[2].shared_by, 1);
  EXPECT_EQ(slots[5].shared_by, 3);
  for (size_t index = 0; index < slots.size(); ++index) {
    EXPECT_EQ(slots[index].index, static_cast<int>(index));
  }
  EXPECT_EQ(names(plan_devices("cuda:0*1", machine(8, 1))), (Texts{"cuda:0"}));
}

TEST(DevicePlan, RefusesNumbersThatAreNone) {
  for (const std::string count : {"", "0", "-1", "+2", "1.5", " 2", "2 ", "x", "0x2", "257",
                                  "99999999999999999999", "4,", "2*2"}) {
    const std::string spec = "cpu:" + count;
    expect_error(Code::kDeviceSpec,
                 {"--devices \"" + spec + "\"", "\"" + count + "\" is not a number of devices",
                  "1 to 256", "help: write cpu:4"},
                 [&] { plan_devices(spec, machine(4)); });
  }
  for (const std::string count : {"", "0", "-2", "257", "2*2", "x"}) {
    expect_error(Code::kDeviceSpec, {"\"" + count + "\" is not a number of devices"},
                 [&] { plan_devices("cuda:0*" + count, machine(4, 1)); });
  }
}

TEST(DevicePlan, RefusesGpuNumbersThatAreNone) {
  for (const std::string list : {"", ",", "0,", ",0", "-1", "x", "0 ,1", "*2", "4294967296"}) {
    expect_error(Code::kDeviceSpec, {"is not a GPU number", "help: write"},
                 [&] { plan_devices("cuda:" + list, machine(4, 2)); });
  }
}

TEST(DevicePlan, RefusesAGpuNamedTwiceAndSaysHowToShare) {
  expect_error(Code::kDeviceSpec, {"GPU 1 is named twice", "cuda:1*2"},
               [] { plan_devices("cuda:1,0,1", machine(4, 2)); });
  expect_error(Code::kDeviceSpec, {"GPU 0 is named twice"},
               [] { plan_devices("cuda:0*2,0", machine(4, 2)); });
}

TEST(DevicePlan, RefusesMoreDevicesThanItCanHold) {
  expect_error(Code::kDeviceSpec, {"more than 256 devices"},
               [] { plan_devices("cuda:0*200,1*57", machine(4, 2)); });
  EXPECT_EQ(plan_devices("cuda:0*200,1*56", machine(4, 2)).size(), 256U);
}

TEST(DevicePlan, RefusesGpusThatAreNotThere) {
  expect_error(Code::kDeviceMissing, {"there is no GPU 0", "no GPU that libtorch can use", "cpu:2"},
               [] { plan_devices("cuda", machine(4)); });
  expect_error(Code::kDeviceMissing, {"there is no GPU 0"},
               [] { plan_devices("cuda:0", machine(4)); });
  expect_error(Code::kDeviceMissing, {"there is no GPU 1", "one GPU, number 0", "cuda:0*2"},
               [] { plan_devices("cuda:0,1", machine(4, 1)); });
  expect_error(Code::kDeviceMissing, {"there is no GPU 9", "GPUs 0 to 1"},
               [] { plan_devices("cuda:9*2", machine(4, 2)); });
}

TEST(DevicePlan, RefusesOtherKindsWithAGuess) {
  const auto plan = [](const char* spec) { return [=] { plan_devices(spec, machine(4, 1)); }; };
  expect_error(Code::kDeviceSpec, {"\"cpuu\" is not a kind of device", "did you mean cpu?"},
               plan("cpuu:2"));
  expect_error(Code::kDeviceSpec, {"did you mean cuda?"}, plan("cud"));
  expect_error(Code::kDeviceSpec, {"\"gpu\"", "did you mean cuda?"}, plan("gpu:0"));
  expect_error(Code::kDeviceSpec, {"\"tpu7000\" is not a kind", "help: write cpu:4"},
               plan("tpu7000"));
  expect_error(Code::kDeviceSpec, {"\"\" is not a kind"}, plan(":2"));
  expect_error(Code::kDeviceSpec, {"\" cpu\" is not a kind"}, plan(" cpu"));
}

class OmpNumThreads : public testing::Test {
 protected:
  void SetUp() override {
    if (const char* text = ::getenv("OMP_NUM_THREADS")) before_ = text;
  }
  void TearDown() override {
    before_ ? ::setenv("OMP_NUM_THREADS", before_->c_str(), 1) : ::unsetenv("OMP_NUM_THREADS");
  }

 private:
  std::optional<std::string> before_;
};

TEST_F(OmpNumThreads, IsTakenWhereItIsAPositiveNumber) {
  ::setenv("OMP_NUM_THREADS", "6", 1);
  EXPECT_EQ(Hardware::detect(0).threads_per_device, 6);
  for (const char* text : {"", "0", "-1", "many", "2,4"}) {
    ::setenv("OMP_NUM_THREADS", text, 1);
    EXPECT_EQ(Hardware::detect(0).threads_per_device, std::nullopt) << text;
  }
  ::unsetenv("OMP_NUM_THREADS");
  EXPECT_EQ(Hardware::detect(0).threads_per_device, std::nullopt);
}

TEST(Hardware, CoresAreThoseOfTheAffinityMask) {
  cpu_set_t allowed;
  ASSERT_EQ(::sched_getaffinity(0, sizeof(allowed), &allowed), 0);
  const Hardware hardware = Hardware::detect(3);
  EXPECT_EQ(hardware.gpus, 3);
  EXPECT_EQ(static_cast<int>(hardware.cores.size()), CPU_COUNT(&allowed));
  for (const int core : hardware.cores) EXPECT_TRUE(CPU_ISSET(core, &allowed));
}

}  // namespace
}  // namespace lockstep::test::device_plan_test
