// Random numbers of GPUs in checkpoints: a rank's go on wherever the rank is.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>

#include "checkpoint/renamed.hpp"
#include "gpu_test.hpp"
#include "lockstep/checkpoint.hpp"
#include "support.hpp"

namespace lockstep::test::checkpoint_cuda_test {
namespace {

using CudaCheckpoint = GpuTest;

torch::nn::Linear net_on(torch::Device gpu) {
  torch::nn::Linear net(4, 4);
  net->to(gpu);
  return net;
}

torch::Tensor numbers_on(torch::Device gpu) {
  return torch::rand({64}, torch::TensorOptions(gpu)).cpu();
}

// Saves in the middle of the GPU's sequence and returns the numbers that come next.
torch::Tensor save_on(torch::Device gpu, const std::string& folder) {
  torch::manual_seed(1);
  auto net = net_on(gpu);
  numbers_on(gpu);
  Checkpoint checkpoint(folder);
  checkpoint.add("model", *net).save(5);
  checkpoint.finish();
  return numbers_on(gpu);
}

// The first numbers of a run that resumes, with another seed.
torch::Tensor resume_on(torch::Device gpu, const std::string& folder) {
  torch::manual_seed(22);
  auto net = net_on(gpu);
  Checkpoint checkpoint(folder);
  checkpoint.add("model", *net);
  EXPECT_EQ(checkpoint.resume(), 5);
  return numbers_on(gpu);
}

TEST_F(CudaCheckpoint, AGpusRandomNumbersGoOn) {
  const ScratchFolder scratch;
  const auto expected = save_on(kGpu, scratch.file("a"));
  EXPECT_TRUE(torch::equal(resume_on(kGpu, scratch.file("a")), expected));
}

// Earlier versions named the generator by the GPU's index in the process.
TEST_F(CudaCheckpoint, SoTheyDoFromAnEarlierVersionsGpu5) {
  const ScratchFolder scratch;
  const auto expected = save_on(kGpu, scratch.file("a"));
  bool found = false;
  copy_renamed(scratch.file("a"), scratch.file("b"), [&](const std::string& name) {
    if (name != "rank0.cuda:0") return name;
    found = true;
    return std::string("rank0.cuda:5");
  });
  EXPECT_TRUE(found) << "the rank's first GPU";
  EXPECT_TRUE(torch::equal(resume_on(kGpu, scratch.file("b")), expected));
}

TEST_F(CudaCheckpoint, SoTheyDoOnAnotherGpu) {
  if (torch::cuda::device_count() < 2) GTEST_SKIP() << "needs two GPUs";
  const ScratchFolder scratch;
  const auto expected = save_on(torch::Device(torch::kCUDA, 1), scratch.file("a"));
  EXPECT_TRUE(torch::equal(resume_on(kGpu, scratch.file("a")), expected));
}

}  // namespace
}  // namespace lockstep::test::checkpoint_cuda_test
