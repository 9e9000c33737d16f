// The state of lockstep's optimizers: torch::optim can load it and the other way round, and it lies
// in one piece of memory.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "optim_cases.hpp"
#include "tensor_support.hpp"

namespace lockstep::test {
namespace {

// Saved by one in the middle, loaded by the other, both ways.
TEST(Optim, StatesMoveBetweenOursAndTorchs) {
  for (const auto& pair : all_pairs()) {
    for (const bool to_ours : {true, false}) {
      const Tensors moved = odd_parameters();
      const Tensors stayed = odd_parameters();
      const auto first = to_ours ? pair.theirs(moved) : pair.ours(moved);
      const auto second = to_ours ? pair.ours(moved) : pair.theirs(moved);
      const auto whole = pair.theirs(stayed);
      for (int step = 0; step < 20; ++step) {
        if (step == 10) load(*second, saved(*first));
        set_gradients(moved, step);
        set_gradients(stayed, step);
        (step < 10 ? first : second)->step();
        whole->step();
      }
      expect_near(moved, stayed, 1e-6, pair.name + (to_ours ? " to ours" : " to torch's"));
    }
  }
}

TEST(Optim, ASavedStateIsAsSmallAsTorchs) {
  const auto both = side_by_side(adamw_pair("adamw", {}));
  both.steps(0, 0);
  const auto size = static_cast<double>(saved(*both.theirs).size());
  EXPECT_NEAR(static_cast<double>(saved(*both.ours).size()), size, 0.05 * size)
      << "the states share an allocation, but not a file record";
}

TEST(Optim, NewStatesShareOneAllocationAndAreAligned) {
  const Tensors parameters = odd_parameters();
  AdamW optimizer(parameters);
  set_gradients(parameters, 0);
  optimizer.step();
  uintptr_t least = UINTPTR_MAX;
  uintptr_t most = 0;
  int64_t bytes = 0;
  for (const auto& item : optimizer.state()) {
    const auto& state = static_cast<const torch::optim::AdamWParamState&>(*item.second);
    for (const auto& tensor : {state.exp_avg(), state.exp_avg_sq()}) {
      if (tensor.numel() == 0) continue;
      const auto address = reinterpret_cast<uintptr_t>(tensor.data_ptr());
      EXPECT_EQ(address % 64, 0U);
      least = std::min(least, address);
      most = std::max(most, address + static_cast<size_t>(tensor.numel()) * sizeof(float));
      bytes += (tensor.numel() * 4 + 63) / 64 * 64;
    }
  }
  EXPECT_LE(static_cast<int64_t>(most - least), bytes);
}

TEST(Optim, WithoutMomentumThereIsNoState) {
  const Tensors parameters = odd_parameters();
  Sgd optimizer(parameters, {.lr = 0.1, .weight_decay = 0.1});
  set_gradients(parameters, 0);
  optimizer.step();
  EXPECT_TRUE(optimizer.state().empty());
}

}  // namespace
}  // namespace lockstep::test
