#include "cli/doctor/doctor.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <thread>

#include "cli/doctor/facts.hpp"
#include "lockstep/detail/board.hpp"
#include "lockstep/units.hpp"
#include "support.hpp"

namespace lockstep::cli::doctor_test {
namespace {

using nlohmann::json;

// A machine without any fault.
json healthy() {
  return {
      {"lockstep", "0.1.0"},
      {"machine",
       {{"cores_allowed", 4},
        {"cores_online", 8},
        {"cpu_quota_cores", nullptr},
        {"memory_total_bytes", 16_GiB},
        {"memory_available_bytes", 8_GiB},
        {"memory_limit_bytes", nullptr},
        {"shared_memory", {{"size_bytes", 8_GiB}, {"free_bytes", 8_GiB}, {"writable", true}}},
        {"open_files", 20000},
        {"processes", nullptr},
        {"host", {{"name", "box"}, {"problem", ""}}},
        {"environment", json::object()},
        {"transports",
         {{"gloo", "/usr/lib/lockstep/lockstep-gloo.so"}, {"mpi", ""}, {"mpirun", ""}}},
        {"driver", nullptr},
        {"leftover_boards", json::array()},
        {"unknown_boards", json::array()}}},
      {"probe",
       {{"lockstep", "0.1.0"},
        {"torch",
         {{"built", "2.11.0"},
          {"loaded", "2.11.0"},
          {"libraries", {"/opt/torch/lib/libc10.so", "/opt/torch/lib/libtorch_cpu.so"}},
          {"cxx11_abi", true},
          {"cuda_built", false},
          {"config", "BLAS_INFO=generic"}}},
        {"blas",
         {{"libraries", {"/usr/lib/openblas-openmp/libblas.so.3"}}, {"gflops_one_thread", 90.0}}},
        {"cuda", {{"code", false}, {"architectures", nullptr}, {"nccl", false}, {"ipc", nullptr}}},
        {"threads_used_of_one", 1.0},
        {"gpus_usable", 0}}}};
}

Finding finding_of(const json& facts, const std::string& check) {
  const auto findings = diagnose(facts);
  const auto found = std::find_if(findings.begin(), findings.end(),
                                  [&](const Finding& finding) { return finding.check == check; });
  return found == findings.end() ? Finding{"no such check", Level::kFail, "", ""} : *found;
}

// Changes one fact and tells what the check says then.
Finding with(const char* pointer, const json& value, const std::string& check) {
  json facts = healthy();
  facts[json::json_pointer(pointer)] = value;
  return finding_of(facts, check);
}

bool mentions(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(Diagnose, AHealthyMachinePassesEverything) {
  const auto findings = diagnose(healthy());
  EXPECT_GE(findings.size(), 14U);
  for (const auto& finding : findings) {
    EXPECT_EQ(finding.level, Level::kPass) << finding.check << ": " << finding.value;
    EXPECT_EQ(finding.remedy, "") << finding.check;
    EXPECT_NE(finding.value, "") << finding.check;
  }
}

TEST(Diagnose, AMissingFactNeverPassesAndHasARemedy) {
  json no_facts = {{"machine", json::object()}, {"probe", json::object()}};
  for (const auto& finding : diagnose(no_facts)) {
    // Limits are the exception: none is "no limit".
    if (finding.check == "open files" || finding.check == "processes") continue;
    if (finding.check == "lockstep" || finding.check == "environment") continue;
    EXPECT_NE(finding.level, Level::kPass) << finding.check << " passes without any fact";
    EXPECT_NE(finding.remedy, "") << finding.check;
  }
}

TEST(Diagnose, ProbeThatFailedIsAFailureAndSaysWhy) {
  json facts = healthy();
  facts["probe"] = {{"error", "libtorch.so: cannot open"}};
  const Finding finding = finding_of(facts, "lockstep");
  EXPECT_EQ(finding.level, Level::kFail);
  EXPECT_TRUE(mentions(finding.value, "libtorch.so: cannot open"));
  EXPECT_EQ(finding_of(facts, "cores").level, Level::kPass) << "the machine is still judged";
}

TEST(Diagnose, ProbeOfAnotherVersionFails) {
  EXPECT_EQ(with("/probe/lockstep", "0.0.9", "lockstep").level, Level::kFail);
}

TEST(Diagnose, TwoLibtorchesFail) {
  const Finding finding =
      with("/probe/torch/libraries", {"/opt/torch/lib/libc10.so", "/usr/lib/libtorch_cpu.so.1.13"},
           "libtorch");
  EXPECT_EQ(finding.level, Level::kFail);
  EXPECT_TRUE(mentions(finding.value, "/opt/torch/lib and /usr/lib")) << finding.value;
  EXPECT_TRUE(mentions(finding.remedy, "LOCKSTEP_TORCH"));
}

TEST(Diagnose, AnotherLibtorchThanBuiltWithFails) {
  const Finding finding = with("/probe/torch/loaded", "1.13.1", "libtorch");
  EXPECT_EQ(finding.level, Level::kFail);
  EXPECT_TRUE(mentions(finding.value, "built with 2.11.0, but 1.13.1 is loaded"));
}

TEST(Diagnose, AVersionSuffixIsNoDifference) {
  EXPECT_EQ(with("/probe/torch/loaded", "2.11.0+cu130", "libtorch").level, Level::kPass);
}

TEST(Diagnose, OldAbiFails) {
  EXPECT_EQ(with("/probe/torch/cxx11_abi", false, "C++ ABI").level, Level::kFail);
}

TEST(Diagnose, ReferenceBlasFailsEvenBesideAnOpenBlas) {
  // As found on Debian: libtorch calls the first, something else pulled in the second.
  const Finding finding = with(
      "/probe/blas/libraries",
      {"/usr/lib/x/blas/libblas.so.3.11.0", "/usr/lib/x/openblas-pthread/libopenblasp-r0.3.21.so"},
      "BLAS");
  EXPECT_EQ(finding.level, Level::kFail);
  EXPECT_TRUE(mentions(finding.value, "REFERENCE BLAS")) << finding.value;
  EXPECT_TRUE(mentions(finding.remedy, "apt-get install libopenblas0-openmp"));
}

TEST(Diagnose, PthreadOpenBlasFails) {
  const Finding finding =
      with("/probe/blas/libraries", {"/usr/lib/x/openblas-pthread/libblas.so.3"}, "BLAS");
  EXPECT_EQ(finding.level, Level::kFail);
  EXPECT_TRUE(mentions(finding.value, "ignores thread budgets"));
}

TEST(Diagnose, SerialOpenBlasWarns) {
  const Finding finding =
      with("/probe/blas/libraries", {"/usr/lib/x/openblas-serial/libblas.so.3"}, "BLAS");
  EXPECT_EQ(finding.level, Level::kWarn);
}

TEST(Diagnose, MklInsideLibtorchIsRecognised) {
  json facts = healthy();
  facts["probe"]["blas"]["libraries"] = json::array();
  facts["probe"]["torch"]["config"] = "Build settings: BLAS_INFO=mkl, BUILD_TYPE=Release";
  const Finding finding = finding_of(facts, "BLAS");
  EXPECT_EQ(finding.level, Level::kPass);
  EXPECT_TRUE(mentions(finding.value, "MKL"));
}

TEST(Diagnose, SlowBlasWarnsWhateverItIs) {
  EXPECT_EQ(with("/probe/blas/gflops_one_thread", 6.0, "BLAS").level, Level::kWarn);
}

TEST(Diagnose, ThreadBudgetThatDoesNotHoldFails) {
  EXPECT_EQ(with("/probe/threads_used_of_one", 1.98, "thread budget").level, Level::kFail);
  EXPECT_EQ(with("/probe/threads_used_of_one", 1.02, "thread budget").level, Level::kPass);
}

TEST(Diagnose, QuotaBelowTheCoresWarnsWithADeviceCount) {
  const Finding tight = with("/machine/cpu_quota_cores", 2.5, "cores");
  EXPECT_EQ(tight.level, Level::kWarn);
  EXPECT_TRUE(mentions(tight.remedy, "cpu:2"));
  EXPECT_TRUE(mentions(with("/machine/cpu_quota_cores", 0.5, "cores").remedy, "cpu:1"));
  EXPECT_EQ(with("/machine/cpu_quota_cores", 4.0, "cores").level, Level::kPass);
}

TEST(Diagnose, LittleMemoryWarns) {
  EXPECT_EQ(with("/machine/memory_available_bytes", 500_MiB, "memory").level, Level::kWarn);
  EXPECT_EQ(with("/machine/memory_limit_bytes", 512_MiB, "memory").level, Level::kWarn);
}

TEST(Diagnose, SharedMemorySmallWarnsAbsentFails) {
  json facts = healthy();
  facts["machine"]["shared_memory"]["size_bytes"] = 64_MiB;
  facts["machine"]["shared_memory"]["free_bytes"] = 64_MiB;
  EXPECT_EQ(finding_of(facts, "shared memory").level, Level::kWarn);
  EXPECT_TRUE(mentions(finding_of(facts, "shared memory").remedy, "--shm-size"));
  EXPECT_TRUE(mentions(with("/machine/shared_memory/free_bytes", 1_MiB, "shared memory").remedy,
                       "remove files"));
  EXPECT_EQ(with("/machine/shared_memory/writable", false, "shared memory").level, Level::kFail);
  EXPECT_EQ(with("/machine/shared_memory", nullptr, "shared memory").level, Level::kFail);
}

TEST(Diagnose, LowLimitsWarn) {
  EXPECT_EQ(with("/machine/open_files", 256, "open files").level, Level::kWarn);
  EXPECT_EQ(with("/machine/processes", 64, "processes").level, Level::kWarn);
}

TEST(Diagnose, HostNameThatDoesNotResolveWarns) {
  const Finding finding = with("/machine/host/problem", "Name or service not known", "host name");
  EXPECT_EQ(finding.level, Level::kWarn);
  EXPECT_TRUE(mentions(finding.remedy, "127.0.1.1 box"));
}

json with_gpu(bool built, int usable) {
  json facts = healthy();
  facts["machine"]["driver"] = {{"version", "580.1"},
                                {"cuda_version", "13.0"},
                                {"gpus",
                                 {{{"name", "H200"},
                                   {"memory_bytes", 141_GiB},
                                   {"compute_capability", "9.0"},
                                   {"may_be_shared", true}}}}};
  facts["probe"]["cuda"] = {
      {"code", built}, {"architectures", "80-real,90"}, {"nccl", built}, {"ipc", built}};
  facts["probe"]["torch"]["cuda_built"] = built;
  facts["probe"]["gpus_usable"] = usable;
  return facts;
}

TEST(Diagnose, CudaInAllItsStates) {
  const Finding good = finding_of(with_gpu(true, 1), "CUDA");
  EXPECT_EQ(good.level, Level::kPass);
  EXPECT_TRUE(mentions(good.value, "1 of 1: H200 (141 GiB), driver 580.1 for CUDA 13.0"))
      << good.value;
  EXPECT_EQ(finding_of(with_gpu(false, 0), "CUDA").level, Level::kWarn) << "a GPU stays idle";
  EXPECT_EQ(finding_of(with_gpu(true, 0), "CUDA").level, Level::kFail) << "a GPU cannot be used";
  json hidden = with_gpu(true, 0);
  hidden["machine"]["environment"]["CUDA_VISIBLE_DEVICES"] = "";
  EXPECT_EQ(finding_of(hidden, "CUDA").level, Level::kWarn) << "the user hid it";
  EXPECT_EQ(with("/probe/torch/cuda_built", true, "CUDA").level, Level::kPass) << "no GPU here";
}

TEST(Diagnose, GpuCodeIsOnlyAskedForWhereLibtorchHasCuda) {
  EXPECT_EQ(finding_of(healthy(), "GPU code").check, "no such check");
  EXPECT_EQ(finding_of(with_gpu(false, 0), "GPU ranks").check, "no such check");
}

TEST(Diagnose, GpuCodeSuitsTheGpuOrFails) {
  const Finding good = finding_of(with_gpu(true, 1), "GPU code");
  EXPECT_EQ(good.level, Level::kPass);
  EXPECT_EQ(good.value, "built for 80-real,90, which suits H200 (9.0)");
  json old = with_gpu(true, 1);
  old["machine"]["driver"]["gpus"][0]["compute_capability"] = "7.5";
  const Finding bad = finding_of(old, "GPU code");
  EXPECT_EQ(bad.level, Level::kFail);
  EXPECT_TRUE(mentions(bad.value, "H200 (compute capability 7.5) cannot run")) << bad.value;
  EXPECT_TRUE(mentions(bad.remedy, "CMAKE_CUDA_ARCHITECTURES"));
  json without = with_gpu(true, 1);
  without["probe"]["cuda"]["code"] = false;
  EXPECT_EQ(finding_of(without, "GPU code").level, Level::kWarn);
  EXPECT_TRUE(mentions(finding_of(without, "GPU code").remedy, "LOCKSTEP_CUDA=ON"));
  json unknown = with_gpu(true, 1);
  unknown["probe"].erase("cuda");
  EXPECT_EQ(finding_of(unknown, "GPU code").level, Level::kWarn);
  EXPECT_EQ(finding_of(unknown, "GPU ranks").level, Level::kWarn);
}

TEST(Diagnose, ArchitecturesAsCMakeWritesThem) {
  EXPECT_TRUE(gpu_code_serves("80-real,90", "8.0"));
  EXPECT_TRUE(gpu_code_serves("80-real,90", "8.9")) << "machine code of the same major version";
  EXPECT_TRUE(gpu_code_serves("80-real,90", "12.0")) << "90 has intermediate code";
  EXPECT_FALSE(gpu_code_serves("80-real,90-real", "12.0"));
  EXPECT_FALSE(gpu_code_serves("80", "999999999.9")) << "no GPU is like that";
  EXPECT_FALSE(gpu_code_serves("80-real,90", "7.5"));
  EXPECT_FALSE(gpu_code_serves("86-real", "8.0"));
  EXPECT_TRUE(gpu_code_serves("75-virtual", "9.0"));
  EXPECT_TRUE(gpu_code_serves("90a", "9.0"));
  EXPECT_FALSE(gpu_code_serves("90a", "10.0")) << "of that GPU only";
  EXPECT_FALSE(gpu_code_serves("", "9.0"));
}

TEST(Diagnose, RanksOnGpusInAllTheirStates) {
  const auto ranks = [](const std::function<void(json&)>& change) {
    json facts = with_gpu(true, 1);
    change(facts);
    return finding_of(facts, "GPU ranks");
  };
  const Finding good = ranks([](json&) {});
  EXPECT_EQ(good.level, Level::kPass);
  EXPECT_TRUE(mentions(good.value, "NCCL where each rank has a GPU; ranks may share a GPU (ipc)"));
  const Finding no_nccl = ranks([](json& facts) { facts["probe"]["cuda"]["nccl"] = false; });
  EXPECT_TRUE(mentions(no_nccl.value, "no NCCL")) << no_nccl.value;
  const Finding no_ipc = ranks([](json& facts) { facts["probe"]["cuda"]["ipc"] = false; });
  EXPECT_EQ(no_ipc.level, Level::kWarn);
  EXPECT_TRUE(mentions(no_ipc.value, "CUDA IPC is not supported"));
  const Finding exclusive =
      ranks([](json& facts) { facts["machine"]["driver"]["gpus"][0]["may_be_shared"] = false; });
  EXPECT_EQ(exclusive.level, Level::kWarn);
  EXPECT_TRUE(mentions(exclusive.value, "GPU 0 takes one process only")) << exclusive.value;
}

TEST(Diagnose, ThreadVariablesAreNoted) {
  const Finding finding = with("/machine/environment/OMP_NUM_THREADS", "7", "environment");
  EXPECT_EQ(finding.level, Level::kWarn);
  EXPECT_TRUE(mentions(finding.value, "OMP_NUM_THREADS=7"));
}

TEST(Diagnose, LeftoverBoardsAreListedWithTheirRemoval) {
  const Finding finding = with("/machine/leftover_boards", {"/dev/shm/lockstep-0-a"}, "boards");
  EXPECT_EQ(finding.level, Level::kWarn);
  EXPECT_EQ(finding.remedy, "rm /dev/shm/lockstep-0-a");
  const Finding odd = with("/machine/leftover_boards", {"/dev/shm/lockstep-0-a b"}, "boards");
  EXPECT_EQ(odd.remedy, "rm '/dev/shm/lockstep-0-a b'");
}

TEST(Diagnose, WhatIsNoBoardOfThisUserIsNeverToBeRemoved) {
  const std::string problem = "/dev/shm/lockstep-0-x is not a board, or is still being made";
  const Finding finding = with("/machine/unknown_boards", {problem}, "boards");
  EXPECT_EQ(finding.level, Level::kWarn);
  EXPECT_NE(finding.value.find(problem), std::string::npos) << finding.value;
  EXPECT_EQ(finding.remedy.find("rm "), std::string::npos) << finding.remedy;
}

// A file that only has a board's name is a fact of its own, apart from boards to remove.
TEST(MachineFacts, TellAForeignFileFromALeftoverBoard) {
  const std::string name = "doctor" + std::to_string(::getpid());
  const std::string path = Board::default_path(name);
  test::write_bytes(path, "precious");
  const json facts = machine_facts();
  std::filesystem::remove(path);
  EXPECT_EQ(facts.at("leftover_boards").dump().find(path), std::string::npos);
  EXPECT_NE(facts.at("unknown_boards").dump().find(path), std::string::npos);
}

TEST(BusyCores, SeesAThreadThatSpins) {
  std::atomic<bool> stop = false;
  std::thread spinner([&stop] {
    while (!stop) {
    }
  });
  const double busy = busy_cores();
  stop = true;
  spinner.join();
  EXPECT_GT(busy, 0.5);
  EXPECT_LE(busy, static_cast<double>(::sysconf(_SC_NPROCESSORS_ONLN)) + 0.01);
}

TEST(MachineFacts, AreCompleteOnThisMachine) {
  const json facts = machine_facts();
  EXPECT_GE(facts.at("cores_allowed").get<int>(), 1);
  EXPECT_GE(facts.at("cores_online").get<int>(), facts.at("cores_allowed").get<int>());
  EXPECT_GT(facts.at("memory_total_bytes").get<int64_t>(),
            facts.at("memory_available_bytes").get<int64_t>());
  EXPECT_NE(facts.at("host").at("name").get<std::string>(), "");
}

}  // namespace
}  // namespace lockstep::cli::doctor_test
