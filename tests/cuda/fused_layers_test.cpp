// Fused layers on a GPU in float16 and bfloat16: outputs and the gradients of every input are those
// of the same layer in float64, which is made of libtorch's operations.

#include <gtest/gtest.h>
#include <torch/torch.h>
#if LOCKSTEP_CUDA
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

#include "lockstep/autocast.hpp"
#include "lockstep/fused_layers.hpp"
#include "tensor_support.hpp"

namespace lockstep::test::fused_layers_test {
namespace {

using torch::Tensor;
using Tensors = std::vector<Tensor>;
using Layer = std::function<Tensors(const Tensors&)>;

class FusedLayersCuda : public testing::TestWithParam<torch::ScalarType> {
 protected:
  void SetUp() override {
    if (!torch::cuda::is_available()) GTEST_SKIP() << "needs a GPU";
    torch::manual_seed(11);
  }
};

INSTANTIATE_TEST_SUITE_P(Dtypes, FusedLayersCuda, testing::Values(torch::kHalf, torch::kBFloat16),
                         [](const auto& at) { return std::string(toString(at.param)); });

double tolerance(torch::ScalarType dtype) {
  return dtype == torch::kHalf ? 5e-3 : 3e-2;
}

Tensor random(std::vector<int64_t> sizes, torch::ScalarType dtype, double scale = 1) {
  return (torch::randn(sizes, torch::kCUDA) * scale).to(dtype).requires_grad_();
}

// As many values are wrong by as much as rounding explains: on the whole, and each.
void expect_near(const Tensor& actual, const Tensor& expected, double limit,
                 const std::string& what) {
  ASSERT_TRUE(actual.defined()) << what;
  ASSERT_EQ(actual.sizes(), expected.sizes()) << what;
  const auto reference = expected.to(torch::kDouble);
  const auto difference = actual.to(torch::kDouble) - reference;
  const double size = reference.norm().item<double>();
  EXPECT_LE(difference.norm().item<double>(), limit * size + 1e-12) << what;
  EXPECT_LE(difference.abs().max().item<double>(),
            4 * limit * reference.abs().max().item<double>() + 1e-12)
      << what;
}

struct Results {
  Tensors outputs;
  Tensors gradients;  // of the inputs that require them
};

// Gradients that arrive are transposed in memory, as those of a user's view may be.
Results run(const Layer& layer, const Tensors& inputs) {
  Results results;
  results.outputs = layer(inputs);
  torch::manual_seed(5);
  Tensors arriving;
  for (const auto& output : results.outputs) {
    const auto gradient = torch::randn(output.sizes(), torch::kCUDA).to(output.scalar_type());
    arriving.push_back(
        gradient.dim() < 2 ? gradient : gradient.transpose(0, -1).contiguous().transpose(0, -1));
  }
  Tensors trained;
  for (const auto& input : inputs) {
    if (input.defined() && input.requires_grad()) trained.push_back(input);
  }
  results.gradients = torch::autograd::grad(results.outputs, trained, arriving);
  return results;
}

void expect_alike(const Results& actual, const Results& expected, torch::ScalarType dtype,
                  const std::string& what) {
  for (size_t i = 0; i < actual.outputs.size(); ++i) {
    expect_near(actual.outputs[i], expected.outputs[i], tolerance(dtype),
                what + ", output " + std::to_string(i));
  }
  for (size_t i = 0; i < actual.gradients.size(); ++i) {
    expect_near(actual.gradients[i], expected.gradients[i], tolerance(dtype),
                what + ", gradient " + std::to_string(i));
  }
}

void expect_as_in_double(const Layer& layer, const Tensors& inputs, torch::ScalarType dtype,
                         const std::string& what) {
  Tensors exact;
  for (const auto& input : inputs) {
    exact.push_back(input.defined()
                        ? input.detach().to(torch::kDouble).requires_grad_(input.requires_grad())
                        : input);
  }
  expect_alike(run(layer, inputs), run(layer, exact), dtype, what);
}

void expect_repeatable(const Layer& layer, const Tensors& inputs) {
  const auto first = run(layer, inputs);
  for (int i = 0; i < 3; ++i) {
    const auto again = run(layer, inputs);
    for (size_t o = 0; o < first.outputs.size(); ++o) {
      EXPECT_TRUE(torch::equal(first.outputs[o], again.outputs[o])) << "output " << o;
    }
    for (size_t g = 0; g < first.gradients.size(); ++g) {
      EXPECT_TRUE(torch::equal(first.gradients[g], again.gradients[g])) << "gradient " << g;
    }
  }
}

Layer linear_with(Activation activation) {
  return [activation](const Tensors& in) -> Tensors {
    return {lockstep::linear(in[0], in[1], in[2], activation)};
  };
}

TEST_P(FusedLayersCuda, Linear) {
  for (const auto& [rows, width, out] : std::vector<std::tuple<int64_t, int64_t, int64_t>>{
           {64, 128, 256}, {5, 24, 40}, {1, 8, 8}, {300, 136, 72}, {7, 13, 9}}) {
    for (const auto activation : {Activation::kNone, Activation::kRelu, Activation::kGeluTanh}) {
      for (const bool with_bias : {true, false}) {
        const auto bias = with_bias ? random({out}, GetParam()) : Tensor();
        const auto what = std::to_string(rows) + " x " + std::to_string(width) + " -> " +
                          std::to_string(out) + ", activation " +
                          std::to_string(static_cast<int>(activation)) +
                          (with_bias ? ", bias" : "");
        expect_as_in_double(
            linear_with(activation),
            {random({rows, width}, GetParam()), random({out, width}, GetParam(), 0.1), bias},
            GetParam(), what);
      }
    }
  }
}

TEST_P(FusedLayersCuda, LinearOfAnyShapeAndOfViews) {
  const auto weight = random({48, 32}, GetParam(), 0.1);
  const auto bias = random({48}, GetParam());
  expect_as_in_double(linear_with(Activation::kRelu),
                      {random({3, 5, 32}, GetParam()), weight, bias}, GetParam(),
                      "three dimensions");
  const Layer of_views = [](const Tensors& in) -> Tensors {
    // Transposed, and beginning at an address that does not divide by 16.
    return {lockstep::linear(in[0].t(), in[1].narrow(1, 1, 32), in[2])};
  };
  expect_as_in_double(of_views,
                      {random({32, 24}, GetParam()), random({48, 33}, GetParam(), 0.1), bias},
                      GetParam(), "views");
}

// The layers one by one in the same dtype: in float64 a ReLU would let other values pass where a
// layer before it was rounded, and each such value is a wrong gradient.
Tensors one_by_one(const Tensors& in, Activation between) {
  auto out = in[0];
  for (size_t layer = 0; layer < 3; ++layer) {
    if (layer > 0) out = between == Activation::kRelu ? torch::relu(out) : at::gelu(out, "tanh");
    out = torch::linear(out, in[1 + layer], in[4 + layer]);
  }
  return {out};
}

TEST_P(FusedLayersCuda, MultiLayer) {
  for (const auto between : {Activation::kRelu, Activation::kGeluTanh}) {
    for (const int64_t width : {64, 20}) {
      const Layer layer = [between](const Tensors& in) -> Tensors {
        return {multi_layer(in[0], {in[1], in[2], in[3]}, {in[4], in[5], in[6]}, between)};
      };
      const Layer plain = [between](const Tensors& in) { return one_by_one(in, between); };
      Tensors inputs = {random({96, 2 * width}, GetParam()),
                        random({width, 2 * width}, GetParam(), 0.1),
                        random({128, width}, GetParam(), 0.1),
                        random({24, 128}, GetParam(), 0.1),
                        random({width}, GetParam()),
                        random({128}, GetParam()),
                        random({24}, GetParam())};
      const auto expect_same = [&](const std::string& what) {
        expect_alike(run(layer, inputs), run(plain, inputs), GetParam(),
                     what + ", width " + std::to_string(width));
      };
      expect_same("all trained");
      expect_repeatable(layer, inputs);
      inputs[5] = Tensor();
      expect_same("one bias missing");
      inputs[0] = inputs[0].detach();
      inputs[1] = inputs[1].detach();
      inputs[4] = inputs[4].detach();
      expect_same("first layer and x frozen");
      inputs[2] = inputs[2].detach();
      inputs[4].requires_grad_();
      expect_same("a bias alone trained");
    }
  }
}

TEST_P(FusedLayersCuda, TunedProductsGiveTheSameNumbers) {
  tune_layers(true);
  const Layer layer = [](const Tensors& in) -> Tensors {
    return {multi_layer(in[0], {in[1], in[2]}, {in[3], in[4]}, Activation::kGeluTanh)};
  };
  expect_as_in_double(
      layer,
      {random({256, 160}, GetParam()), random({320, 160}, GetParam(), 0.1),
       random({160, 320}, GetParam(), 0.1), random({320}, GetParam()), random({160}, GetParam())},
      GetParam(), "tuned");
  tune_layers(false);
}

TEST_P(FusedLayersCuda, AddLayerNorm) {
  const Layer with_branch = [](const Tensors& in) -> Tensors {
    const auto [sum, normed] = add_layer_norm(in[0], in[1], in[2], in[3]);
    return {normed, sum};
  };
  const Layer alone = [](const Tensors& in) -> Tensors {
    return {std::get<1>(add_layer_norm(in[0], {}, in[2], in[3]))};
  };
  for (const int64_t width : {8, 264, 768, 1024, 1600, 4096, 5120, 8192, 13}) {
    for (const auto weights : {torch::kFloat, GetParam()}) {
      const Tensors inputs = {random({37, width}, GetParam(), 3), random({37, width}, GetParam()),
                              random({width}, weights), random({width}, weights)};
      const auto what = "width " + std::to_string(width) + ", weights " + toString(weights);
      expect_as_in_double(with_branch, inputs, GetParam(), what);
      expect_repeatable(with_branch, inputs);
      expect_as_in_double(alone, {inputs[0], Tensor(), inputs[2], inputs[3]}, GetParam(),
                          what + ", no branch");
    }
  }
  // More rows than the GPU takes at once.
  const Tensors many = {random({6000, 64}, GetParam()), random({6000, 64}, GetParam()),
                        random({64}, torch::kFloat), random({64}, torch::kFloat)};
  expect_as_in_double(with_branch, many, GetParam(), "many rows");
}

TEST_P(FusedLayersCuda, SumOfAddLayerNormMayBeUsedAlone) {
  const auto x = random({4, 64}, GetParam());
  const auto weight = random({64}, torch::kFloat);
  const auto sum = std::get<0>(add_layer_norm(x, x.detach(), weight, weight));
  sum.sum().backward();
  EXPECT_TRUE(torch::equal(x.grad(), torch::ones_like(x)));
  EXPECT_FALSE(weight.grad().defined() && weight.grad().abs().sum().item<double>() != 0);
}

TEST_P(FusedLayersCuda, CausalSelfAttention) {
  for (const auto& [positions, heads, head_width] :
       std::vector<std::tuple<int64_t, int64_t, int64_t>>{
           {64, 4, 64}, {37, 3, 32}, {128, 2, 128}, {17, 2, 5}}) {
    const Layer layer = [heads = heads](const Tensors& in) -> Tensors {
      return {causal_self_attention(in[0], heads)};
    };
    expect_as_in_double(layer, {random({3, positions, 3 * heads * head_width}, GetParam())},
                        GetParam(), "heads of " + std::to_string(head_width));
  }
}

TEST_P(FusedLayersCuda, MeanSquaredError) {
  for (const int64_t rows : {1, 3, 517}) {
    for (const auto target_dtype : {torch::kFloat32, GetParam()}) {
      const auto target = torch::randn({rows, 40}, torch::kCUDA).to(target_dtype);
      const Layer layer = [&](const Tensors& in) -> Tensors {
        return {mean_squared_error(
            in[0],
            target.to(in[0].scalar_type() == torch::kDouble ? torch::kDouble : target_dtype))};
      };
      const Tensors inputs = {random({rows, 40}, GetParam())};
      expect_as_in_double(layer, inputs, GetParam(), std::to_string(rows) + " rows");
      expect_repeatable(layer, inputs);
    }
  }
}

// 5 and 24 columns: without and with the kernel; more rows than a block takes.
TEST_P(FusedLayersCuda, ActivationsAreUndoneAndBiasGradientsSummed) {
  // Whole numbers and halves: no sum before ReLU is near 0, where rounding decides.
  const auto whole = [&](std::vector<int64_t> sizes, double more = 0) {
    return (torch::randint(-1, 2, sizes, torch::kCUDA) + more).to(GetParam()).requires_grad_();
  };
  for (const int64_t width : {5, 24, 776}) {
    for (const auto& [rows, activation] :
         std::vector<std::pair<int64_t, Activation>>{{1, Activation::kRelu},
                                                     {130, Activation::kRelu},
                                                     {1000, Activation::kRelu},
                                                     {1, Activation::kGeluTanh},
                                                     {1000, Activation::kGeluTanh}}) {
      const Layer layer = [activation = activation](const Tensors& in) -> Tensors {
        return {multi_layer(in[0], {in[1], in[3]}, {in[2], in[4]}, activation)};
      };
      const Tensors inputs = {whole({rows, 16}), whole({width, 16}), whole({width}, 0.5),
                              random({8, width}, GetParam(), 0.1), random({8}, GetParam())};
      expect_as_in_double(layer, inputs, GetParam(),
                          std::to_string(rows) + " x " + std::to_string(width));
      expect_repeatable(layer, inputs);
    }
  }
}

TEST_P(FusedLayersCuda, LinearCrossEntropy) {
  for (const auto& [rows, width, classes, valid] :
       std::vector<std::tuple<int64_t, int64_t, int64_t, int64_t>>{
           {300, 64, 1000, 997}, {1, 8, 8, 8}, {33, 40, 50304, 50257}, {9, 13, 17, 17}}) {
    const auto targets = torch::randint(valid, {rows}, torch::device(torch::kCUDA));
    const Layer layer = [&, valid = valid](const Tensors& in) -> Tensors {
      return {linear_cross_entropy(in[0], in[1], targets.to(torch::kLong), valid)};
    };
    const Tensors inputs = {random({rows, width}, GetParam()),
                            random({classes, width}, GetParam(), 0.3)};
    expect_as_in_double(layer, inputs, GetParam(), std::to_string(classes) + " classes");
    expect_repeatable(layer, inputs);
  }
}

TEST_P(FusedLayersCuda, LinearCrossEntropyInPieces) {
  const int64_t rows = 8400;  // times 65536 classes: more than 1 GiB of logits
  const auto x = random({rows, 16}, GetParam());
  const auto weight = random({65536, 16}, GetParam(), 0.3);
  const auto targets =
      torch::randint(65536, {rows}, torch::device(torch::kCUDA).dtype(torch::kLong));
  const auto loss = linear_cross_entropy(x, weight, targets);
  const auto gradients = torch::autograd::grad({loss * 512.0}, {x, weight});
  const auto exact_x = x.detach().to(torch::kFloat).requires_grad_();
  const auto exact_weight = weight.detach().to(torch::kFloat).requires_grad_();
  const auto exact = linear_cross_entropy(exact_x, exact_weight, targets);
  const auto expected = torch::autograd::grad({exact * 512.0}, {exact_x, exact_weight});
  expect_near(loss, exact, tolerance(GetParam()), "loss");
  expect_near(gradients[0], expected[0], tolerance(GetParam()), "gradient of x");
  expect_near(gradients[1], expected[1], tolerance(GetParam()), "gradient of the weight");
}

TEST_P(FusedLayersCuda, ATargetThatIsNoClassGivesNoNumber) {
  const auto x = random({4, 16}, GetParam());
  const auto weight = random({24, 16}, GetParam());
  const auto targets = torch::tensor({1, 2, 20, 3}, torch::kLong).to(torch::kCUDA);
  EXPECT_TRUE(std::isnan(linear_cross_entropy(x, weight, targets, 20).item<float>()));
  EXPECT_FALSE(std::isnan(linear_cross_entropy(x, weight, targets, 21).item<float>()));
}

TEST_P(FusedLayersCuda, AutocastCastsWeightsAndGivesTheirGradientsInFloat) {
  const auto x = random({32, 64}, torch::kFloat);
  const auto weight = random({48, 64}, torch::kFloat, 0.1);
  const auto bias = random({48}, torch::kFloat);
  Tensor out;
  Tensor loss;
  {
    const Autocast amp(torch::Device(torch::kCUDA, 0), GetParam());
    out = lockstep::linear(x, weight, bias, Activation::kRelu);
    EXPECT_EQ(out.scalar_type(), GetParam());
    loss =
        linear_cross_entropy(out, weight.narrow(1, 0, 48),
                             torch::zeros({32}, torch::device(torch::kCUDA).dtype(torch::kLong)));
    EXPECT_EQ(loss.scalar_type(), torch::kFloat);
  }
  loss.backward();
  EXPECT_EQ(weight.grad().scalar_type(), torch::kFloat);
  expect_near(out, torch::relu(torch::linear(x, weight, bias)), tolerance(GetParam()), "output");
}

TEST_P(FusedLayersCuda, SecondDerivativesAreRefused) {
  const auto x = random({8, 16}, GetParam());
  const auto weight = random({16, 16}, GetParam());
  test::expect_error(Code::kEngine, {"lockstep::linear", "twice"}, [&] {
    torch::autograd::grad({lockstep::linear(x, weight, {}).sum()}, {x}, {}, true, true);
  });
}

TEST_P(FusedLayersCuda, WithoutGradModeNothingIsRecorded) {
  const torch::NoGradGuard no_grad;
  const auto x = random({8, 16}, GetParam());
  const auto weight = random({16, 16}, GetParam());
  for (const auto activation : {Activation::kNone, Activation::kRelu, Activation::kGeluTanh}) {
    const auto out = lockstep::linear(x, weight, {}, activation);
    EXPECT_FALSE(out.requires_grad());
    expect_near(out,
                lockstep::linear(x.to(torch::kDouble), weight.to(torch::kDouble), {}, activation),
                tolerance(GetParam()), "output");
  }
}

#if LOCKSTEP_CUDA
TEST_P(FusedLayersCuda, CapturedInAGraphTheyGiveTheSameBits) {
  const int64_t width = 128;
  const Tensors weights = {random({3 * width, width}, GetParam(), 0.1),
                           random({4 * width, width}, GetParam(), 0.1),
                           random({width, 4 * width}, GetParam(), 0.1),
                           random({256, width}, GetParam(), 0.1),
                           random({width}, torch::kFloat),
                           random({4 * width}, GetParam())};
  const auto x = random({2, 64, width}, GetParam());
  const auto targets = torch::randint(250, {128}, torch::device(torch::kCUDA).dtype(torch::kLong));
  const auto step = [&]() -> Tensors {
    const auto [sum, normed] = add_layer_norm(x, {}, weights[4], weights[4]);
    const auto mixed = causal_self_attention(lockstep::linear(normed, weights[0], {}), 2);
    const auto [rest, second] = add_layer_norm(sum, mixed, weights[4], weights[4]);
    const auto out =
        multi_layer(second, {weights[1], weights[2]}, {weights[5], {}}, Activation::kGeluTanh);
    const auto last = std::get<1>(add_layer_norm(rest, out, weights[4], weights[4]));
    const auto loss = linear_cross_entropy(last.view({128, width}), weights[3], targets, 250);
    // Of what comes after attention, whose own backward may add in any order.
    auto found = torch::autograd::grad({loss}, {weights[1], weights[2], weights[3], weights[5]});
    found.push_back(loss.detach());
    return found;
  };
  torch::cuda::synchronize();  // the other stream does not wait for what was drawn on this one
  const auto stream = c10::cuda::getStreamFromPool();
  const c10::cuda::CUDAStreamGuard guard(stream);
  for (int i = 0; i < 3; ++i) step();
  stream.synchronize();
  at::cuda::CUDAGraph graph;
  graph.capture_begin();
  const auto captured = step();
  graph.capture_end();
  {
    const torch::NoGradGuard no_grad;
    x.copy_(torch::randn_like(x));
  }
  graph.replay();
  const auto expected = step();
  stream.synchronize();
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_TRUE(torch::equal(captured[i], expected[i])) << i;
  }
}
#endif

}  // namespace
}  // namespace lockstep::test::fused_layers_test
