// MasterWeights: low-precision parameters, updated in float32.

#include "lockstep/master_weights.hpp"

#include <limits>
#include <set>

#include "ddp_nets.hpp"
#include "lockstep/distributed_data_parallel.hpp"
#include "lockstep/grad_scaler.hpp"
#include "lockstep/optim.hpp"
#include "master_weights_support.hpp"
#include "rank_threads.hpp"

namespace lockstep::test::master_weights_test {
namespace {

torch::nn::Sequential make_net() {
  torch::manual_seed(3);
  return torch::nn::Sequential(
      torch::nn::Linear(7, 5),
      torch::nn::LayerNorm(torch::nn::LayerNormOptions(std::vector<int64_t>{5})),
      torch::nn::Linear(5, 3));
}

TEST(MasterWeights, MatricesAndTheirBiasesBecomeLowAndNormsDoNot) {
  auto net = make_net();
  const auto before = net->parameters()[0].detach().clone();
  const MasterWeights masters(*net);
  std::set<std::string> low;
  for (const auto& item : net->named_parameters()) {
    if (item.value().scalar_type() == torch::kBFloat16) low.insert(item.key());
    EXPECT_EQ(masters.holds(item.value()), item.value().scalar_type() == torch::kBFloat16);
    EXPECT_TRUE(item.value().requires_grad());
  }
  EXPECT_EQ(low, (std::set<std::string>{"0.weight", "0.bias", "2.weight", "2.bias"}));
  EXPECT_TRUE(torch::equal(masters.of(net->parameters()[0]), before));
  EXPECT_TRUE(torch::equal(net->parameters()[0], before.to(torch::kBFloat16)));
  EXPECT_TRUE(masters.of(net->parameters()[2]).is_same(net->parameters()[2]));
  EXPECT_EQ(masters.bytes(), 4 * (7 * 5 + 5 + 5 * 3 + 3));
}

TEST(MasterWeights, AChoiceByNameAndDtype) {
  auto net = make_net();
  const MasterWeights masters(
      *net, {.dtype = torch::kHalf, .which = [](const std::string& name, const torch::Tensor&) {
               return name == "1.bias";
             }});
  for (const auto& item : net->named_parameters()) {
    EXPECT_EQ(item.value().scalar_type(), item.key() == "1.bias" ? torch::kHalf : torch::kFloat32);
  }
}

TEST(MasterWeights, RefusalsNameTheParameterAndChangeNothing) {
  auto net = make_net();
  expect_error(Code::kUsage, {"float32", "kBFloat16"},
               [&] { const MasterWeights masters(*net, {.dtype = torch::kFloat32}); });
  net->ptr<torch::nn::LinearImpl>(2)->to(torch::kFloat64);
  const auto all = [](const std::string&, const torch::Tensor&) { return true; };
  expect_error(Code::kTensorMismatch, {"2.weight", "float64", "which"},
               [&] { const MasterWeights masters(*net, {.which = all}); });
  EXPECT_EQ(net->parameters()[0].scalar_type(), torch::kFloat32);
}

// The master walks as float32 training does on the same gradients, to the bit; the parameter is its
// rounding.
TEST(MasterWeights, MastersWalkAsFloat32Does) {
  check_masters_walk_as_float32(make_net);
}

TEST(MasterWeights, UpdatesTooSmallForTheParameterAddUp) {
  torch::nn::Linear net(torch::nn::LinearOptions(1, 1).bias(false));
  torch::nn::init::ones_(net->weight);
  const MasterWeights masters(*net);
  Sgd optimizer(net->parameters(), {.lr = 1, .masters = masters});
  for (int step = 0; step < 16; ++step) {
    net->weight.mutable_grad() = torch::full({1, 1}, -1.0 / 1024, torch::kBFloat16);
    optimizer.step();
  }
  EXPECT_EQ(net->weight.item<float>(), 1 + 1.0F / 64) << "bf16 cannot add 1/1024 to 1";
}

TEST(MasterWeights, ClipsByTheNormOfLowGradients) {
  torch::nn::Linear net(torch::nn::LinearOptions(2, 1).bias(false));
  torch::nn::init::zeros_(net->weight);
  const MasterWeights masters(*net);
  Sgd optimizer(net->parameters(), {.lr = 1, .masters = masters});
  net->weight.mutable_grad() = torch::tensor({{3.0, 4.0}}).to(torch::kBFloat16);
  optimizer.step({.max_norm = 1.0});
  expect_close(masters.of(net->weight), torch::tensor({{-0.6F, -0.8F}}), "master");
  EXPECT_TRUE(torch::equal(net->weight.grad(), torch::tensor({{0.6, 0.8}}).to(torch::kBFloat16)));
}

struct Owner : torch::nn::Module {
  explicit Owner(const torch::Tensor& given) { weight = register_parameter("weight", given); }
  torch::Tensor weight;
};

TEST(MasterWeights, ASharedWeightIsHeldAndUpdatedOnce) {
  const auto first = std::make_shared<Owner>(torch::randn({3, 3}));
  const auto second = std::make_shared<Owner>(first->weight);
  torch::nn::Module net;
  net.register_module("first", first);
  net.register_module("second", second);
  const MasterWeights masters(net);
  EXPECT_EQ(masters.bytes(), 4 * 9);
  EXPECT_TRUE(first->weight.is_same(second->weight));
  Sgd optimizer(net.parameters(), {.lr = 1, .masters = masters});
  const auto before = masters.of(first->weight).clone();
  first->weight.mutable_grad() = torch::ones({3, 3}, torch::kBFloat16);
  optimizer.step();
  EXPECT_TRUE(torch::equal(masters.of(second->weight), before - 1));
}

TEST(MasterWeights, ASavedOptimizerGoesOnWithTheSameBits) {
  for (const auto& [name, make] : master_optimizers()) {
    SCOPED_TRACE(name);
    check_saved_optimizer_goes_on(make_net, make, torch::kCPU);
    auto net = make_net();
    const MasterWeights masters(*net);
    const auto with = make(net->parameters(), masters);
    const auto other_net = make_net();
    const auto without = make(other_net->parameters(), std::nullopt);
    set_gradients(net->parameters(), 1);
    with->step();
    set_gradients(other_net->parameters(), 2);
    without->step();
    const std::string before = saved(*with);
    expect_error(Code::kFileFormat, {"no master weights", "take_from_parameters"},
                 [&] { load(*with, saved(*without)); });
    EXPECT_TRUE(saved(*with) == before) << "a refused state has changed the optimizer";
  }
}

TEST(MasterWeights, RestoreAndTakeFromParameters) {
  auto net = make_net();
  MasterWeights masters(*net);
  const auto weight = net->parameters()[0];
  {
    const torch::NoGradGuard no_grad;
    weight.fill_(0.5);
  }
  masters.take_from_parameters();
  EXPECT_TRUE(torch::equal(masters.of(weight), torch::full({5, 7}, 0.5)));
  masters.of(weight).add_(1.0 / 1024);
  masters.restore(*net);
  EXPECT_EQ(weight.scalar_type(), torch::kFloat32);
  EXPECT_TRUE(torch::equal(weight, torch::full({5, 7}, 0.5 + 1.0 / 1024)));
  EXPECT_FALSE(masters.holds(weight));
  weight.square().sum().backward();
  EXPECT_EQ(weight.grad().scalar_type(), torch::kFloat32);
}

TEST(MasterWeights, AModelThatWasConvertedSinceIsRefused) {
  auto net = make_net();
  const MasterWeights masters(*net);
  Sgd optimizer(net->parameters(), {.lr = 1, .masters = masters});
  net->to(torch::kFloat32);
  net->parameters()[0].mutable_grad() = torch::ones({5, 7});
  expect_error(Code::kTensorMismatch, {"parameter 0 of group 0", "master", "float32"},
               [&] { optimizer.step(); });
}

// Unscaled in fp16, gradients of 1e-8 would be zero.
TEST(MasterWeights, AScalerAcceptsHalfGradientsOfHeldParameters) {
  const auto make_zero_net = [] {  // so that the smallest update is seen
    const auto net = make_net();
    for (auto& parameter : net->parameters()) torch::nn::init::zeros_(parameter);
    return net;
  };
  for (const auto& [name, make] : master_optimizers()) {
    SCOPED_TRACE(name);
    const LowAndFull both(make_zero_net, torch::kHalf, make);
    const auto parameters = both.low->parameters();
    GradScaler scaler;
    GradScaler full_scaler;
    scaler.name_parameters(*both.low);
    for (int step = 1; step <= 4; ++step) {
      scaler.scale(torch::ones({}));
      full_scaler.scale(torch::ones({}));
      both.set_gradients(step, 65536 * 1e-8);
      if (step == 2) {
        parameters[4].mutable_grad()[1][1] = std::numeric_limits<double>::infinity();
      }
      both.copy_gradients();
      if (step == 3) {
        expect_error(Code::kTensorMismatch, {"0.weight", "fp16", "unscale_", "max_norm"},
                     [&] { scaler.unscale_(*both.ours); });
      }
      scaler.step(*both.ours, {.zero_grad = true});
      full_scaler.step(*both.expected, {.zero_grad = true});
      scaler.update();
      full_scaler.update();
    }
    both.expect_masters_as_full();
    EXPECT_TRUE(both.masters.of(parameters[0]).ne(0).all().item<bool>());
    ASSERT_EQ(scaler.skipped_steps().size(), 1U);
    EXPECT_EQ(scaler.skipped_steps()[0].parameter, "2.weight");
  }
}

TEST(MasterWeights, RanksOfADistributedModelStayTheSame) {
  run_ranks(2, [](const Communicator& comm) {
    TwoLayers net;
    const MasterWeights masters(*net);
    DistributedDataParallel ddp(net, comm);
    AdamW optimizer(ddp.parameters(), {.lr = 0.01, .masters = masters});
    for (int step = 0; step < 4; ++step) {
      ddp(rows(4, 6, step + comm.rank()).to(torch::kBFloat16)).square().mean().backward();
      EXPECT_EQ(net->first->weight.grad().scalar_type(), torch::kBFloat16);
      optimizer.step({.max_norm = 1.0, .zero_grad = true});
    }
    ddp.check_replicas();
    EXPECT_FALSE(
        torch::equal(masters.of(net->first->weight), net->first->weight.to(torch::kFloat32)))
        << "the master is no finer than the parameter";
  });
}

}  // namespace
}  // namespace lockstep::test::master_weights_test
