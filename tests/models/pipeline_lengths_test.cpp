// Pipelines over ranks whose rows change their shape from step to step: the length of sequences,
// the number of rows, the dtype of tokens.

#include "lockstep/optim.hpp"
#include "lockstep/pipeline.hpp"
#include "lockstep/transformer_block.hpp"
#include "models/model_support.hpp"

namespace lockstep::test::pipeline_lengths_test {
namespace {

constexpr int64_t kWidth = 8;

// The same weights in every call; ranks that are threads make theirs at the same time.
torch::nn::Sequential make_model() {
  const TransformerBlockOptions options{.width = kWidth, .heads = 2};
  torch::nn::Sequential model;
  for (int i = 0; i < 3; ++i) model->push_back(TransformerBlock(options));
  model->to(torch::kFloat64);
  const torch::NoGradGuard no_grad;
  uint64_t seed = 0;
  for (auto& parameter : model->parameters()) {
    parameter.copy_(values(parameter.sizes(), ++seed) * 0.3);
  }
  return model;
}

torch::Tensor loss_of(const torch::Tensor& out, const torch::Tensor& target) {
  return (out - target).pow(2).mean();
}

// [step]: rows and positions. Lengths return, and rows change with and without them.
const std::vector<std::pair<int64_t, int64_t>>& shapes() {
  static const std::vector<std::pair<int64_t, int64_t>> all = {{4, 5}, {4, 9},  {4, 5}, {3, 9},
                                                               {4, 1}, {5, 12}, {4, 9}};
  return all;
}

TEST(PipelineLengths, MayChangeFromStepToStepOverRanks) {
  auto single = make_model();
  Sgd optimizer(single->parameters(), {.lr = 0.1});
  std::vector<double> losses;
  std::vector<torch::Tensor> outputs;
  for (const auto& [rows, positions] : shapes()) {
    const auto x = values({rows, positions, kWidth});
    const auto loss = loss_of(single->forward(x), 2 * x);
    loss.backward();
    losses.push_back(loss.item<double>());
    optimizer.step({.zero_grad = true});
    outputs.push_back(single->forward(values({rows, positions + 1, kWidth})).detach());
  }
  for (const int ranks : {1, 2, 3}) {
    for (const bool zero_bubble_schedule : {false, true}) {
      run_ranks(ranks, [&](const Communicator& axis) {
        Devices devices("cpu:1");
        const auto stages = split_stages(make_model(), cut_by_count(3, ranks));
        const auto schedule = zero_bubble_schedule ? zero_bubble(ranks, 2) : one_f_one_b(ranks, 2);
        Pipeline pipeline(stages, axis, devices[0], schedule, {.loss = loss_of});
        Sgd own(pipeline.parameters(), {.lr = 0.1});
        const bool first = axis.rank() == 0;
        const bool last = axis.rank() + 1 == ranks;
        for (size_t step = 0; step < losses.size(); ++step) {
          const auto [rows, positions] = shapes()[step];
          const auto x = values({rows, positions, kWidth});
          // Only the rank with stage 0 knows the input, and the last one its target.
          const auto loss =
              pipeline.step(first ? x : torch::Tensor(), last ? 2 * x : torch::Tensor());
          EXPECT_NEAR(loss.item<double>(), losses[step], 1e-6 * losses[step]) << "step " << step;
          own.step({.zero_grad = true});
          const auto out =
              pipeline.evaluate(first ? values({rows, positions + 1, kWidth}) : torch::Tensor());
          if (last) expect_close(out, outputs[step], "evaluation");
        }
      });
    }
  }
}

// A stage whose output's shape depends on values still cannot tell the next one.
struct CutAtNegativeImpl : torch::nn::Module {
  torch::Tensor forward(const torch::Tensor& x) {
    return x.narrow(1, 0, x.min().item<double>() < 0 ? 2 : 3) * weight;
  }
  torch::Tensor weight = register_parameter("weight", torch::ones({1}));
};
TORCH_MODULE(CutAtNegative);

TEST(PipelineLengths, AShapeThatDoesNotFollowFromTheInputsIsRefused) {
  const auto outcomes = outcomes_of_ranks(2, [](const Communicator& axis) {
    Devices devices("cpu:1");
    std::vector<torch::nn::Sequential> stages = {torch::nn::Sequential(CutAtNegative()),
                                                 torch::nn::Sequential(torch::nn::Linear(1, 1))};
    Pipeline pipeline(stages, axis, devices[0], one_f_one_b(2, 1),
                      {.loss = [](auto& out, auto&) { return out.mean(); }});
    const auto x = torch::ones({2, 4, 1});
    pipeline.step(x, x);
    pipeline.step(-x, x);
  });
  EXPECT_EQ(outcomes[0].code(), Code::kStageMismatch) << outcomes[0].text();
  EXPECT_NE(outcomes[0].text().find("of the same shape"), std::string::npos) << outcomes[0].text();
  EXPECT_TRUE(outcomes[1].failed());
}

}  // namespace
}  // namespace lockstep::test::pipeline_lengths_test
