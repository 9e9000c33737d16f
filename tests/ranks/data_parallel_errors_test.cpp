// DataParallel refuses what it cannot do, by name and with a remedy, and can be used again
// afterwards.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "lockstep/data_parallel.hpp"
#include "ranks/nets.hpp"
#include "tensor_support.hpp"

namespace lockstep {
namespace {

using test::expect_close;
using test::expect_error;
using test::Many;
using test::Net;

struct PlainImpl : torch::nn::Module {
  PlainImpl() { linear = register_module("linear", torch::nn::Linear(2, 2)); }
  torch::Tensor forward(const torch::Tensor& x) { return linear(x); }
  torch::nn::Linear linear{nullptr};
};

TEST(DataParallelRefuses, AModuleWithoutCloneIsRefusedWithARemedyAndWorksWithAFactory) {
  const Devices devices("cpu:2");
  const UseDevice home(devices[0]);
  const auto plain = std::make_shared<PlainImpl>();
  expect_error(Code::kReplicate, {"Cloneable"},
               [&] { DataParallel<PlainImpl> parallel(plain, devices); });
  DataParallel<PlainImpl> parallel(plain, devices, [] { return std::make_shared<PlainImpl>(); });
  const auto x = torch::randn({4, 2});
  expect_close(parallel(x), plain->forward(x), "factory");
  expect_error(Code::kReplicate, {"of its own"},
               [&] { DataParallel<PlainImpl> wrong(plain, devices, [&] { return plain; }); });
}

struct FussyImpl : torch::nn::Cloneable<FussyImpl> {
  void reset() override {}
  torch::Tensor forward(const torch::Tensor& x) {
    if (current_device()->index() == 1) throw std::runtime_error("row 5 is bad");
    return x;
  }
};
TORCH_MODULE(Fussy);

TEST(DataParallelRefuses, AFailingReplicaIsNamedAndTheNextForwardWorks) {
  const Devices devices("cpu:3");
  const UseDevice home(devices[0]);
  Fussy fussy;
  DataParallel parallel(fussy, devices);
  expect_error(Code::kReplicaFailed, {"replica 1 on cpu:1: row 5 is bad"}, [&] {
    parallel(torch::zeros({6, 1}));
  });
  EXPECT_EQ(parallel(torch::zeros({1, 1})).size(0), 1) << "one row uses device 0 only";
}

TEST(DataParallelRefuses, RefusesInputsThatCannotBeDivided) {
  const Devices devices("cpu:2");
  const UseDevice home(devices[0]);
  Many many;
  DataParallel parallel(many, devices);
  const std::map<std::string, torch::Tensor> short_map{{"z", torch::ones({3, 1})}};
  expect_error(Code::kSplit, {"3 rows, others have 4"}, [&] {
    parallel(std::pair(torch::ones({4, 1}), torch::ones({4, 1})), short_map, 1.0);
  });
  Net net;
  DataParallel plain(net, devices);
  expect_error(Code::kSplit, {"a scalar"}, [&] { plain(torch::tensor(1.0)); });
}

TEST(DataParallelRefuses, AModuleOnAnotherDeviceIsRefused) {
  const Devices devices("cpu:2");
  Net net{nullptr};
  {
    const UseDevice other(devices[1]);
    net = Net();
  }
  expect_error(Code::kPlacement, {"\"first.weight\" is on cpu:1, not on cpu:0"},
               [&] { DataParallel parallel(net, devices); });
}

TEST(DataParallelRefuses, AModuleThatGrewIsRefused) {
  const Devices devices("cpu:2");
  const UseDevice home(devices[0]);
  Net net;
  DataParallel parallel(net, devices);
  net->register_parameter("late", torch::ones({1}));
  expect_error(Code::kReplicate, {"after DataParallel was made"}, [&] {
    parallel(torch::zeros({4, 6}));
  });
}

struct LopsidedImpl : torch::nn::Cloneable<LopsidedImpl> {
  void reset() override {}
  std::map<std::string, torch::Tensor> forward(const torch::Tensor& x) {
    return {{current_device()->index() == 0 ? "a" : "b", x}};
  }
};
TORCH_MODULE(Lopsided);

TEST(DataParallelRefuses, ReplicasThatReturnOtherKeysAreRefused) {
  const Devices devices("cpu:2");
  const UseDevice home(devices[0]);
  Lopsided lopsided;
  DataParallel parallel(lopsided, devices);
  expect_error(Code::kSplit, {"another arrangement"}, [&] { parallel(torch::zeros({4, 1})); });
}

}  // namespace
}  // namespace lockstep
