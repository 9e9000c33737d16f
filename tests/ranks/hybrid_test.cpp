// Three axes at once: data x pipeline x tensor ranks train as one device does.

#include <torch/torch.h>

#include <mutex>

#include "lockstep/autocast.hpp"
#include "lockstep/grad_scaler.hpp"
#include "lockstep/mesh.hpp"
#include "lockstep/optim.hpp"
#include "lockstep/pipeline.hpp"
#include "lockstep/tensor_parallel.hpp"
#include "ranks/pipeline_support.hpp"
#include "ranks/rank_threads.hpp"

namespace lockstep::test::hybrid_test {
namespace {

constexpr int kPairs = 4;
constexpr int64_t kInner = 16;

struct Pair {
  torch::nn::Linear up;
  torch::nn::Linear down;
};

std::vector<Pair> make_pairs() {
  const std::lock_guard lock(seeding());
  torch::manual_seed(21);
  std::vector<Pair> pairs;
  for (int i = 0; i < kPairs; ++i) {
    pairs.push_back(
        {torch::nn::Linear(test::kWidth, kInner), torch::nn::Linear(kInner, test::kWidth)});
  }
  return pairs;
}

test::Rows draw(int64_t rows, int number) {
  const std::lock_guard lock(seeding());
  return test::draw_rows(rows, static_cast<uint64_t>(100 + number));
}

struct Shape {
  int data, stages, tensor;
  std::string schedule = "1f1b";
  int micro_batches = 2;
  int64_t rows = 8;
  int accumulate = 1;
  bool bf16 = false;
};

std::ostream& operator<<(std::ostream& out, const Shape& s) {
  return out << s.data << " x " << s.stages << " x " << s.tensor << ", " << s.schedule << ", "
             << s.micro_batches << " micro-batches, " << s.rows << " rows, " << s.accumulate
             << " calls" << (s.bf16 ? ", bf16" : "");
}

constexpr int kSteps = 10;

// These must stay in one stage: between the two the ranks hold parts of an activation.
struct DividedPairImpl : torch::nn::Module {
  DividedPairImpl(const Pair& whole, const Communicator& axis)
      : up(register_module("up", ColumnLinear(whole.up, axis))),
        down(register_module("down", RowLinear(whole.down, axis))) {}
  torch::Tensor forward(const torch::Tensor& x) { return down(torch::tanh(up(x))); }
  ColumnLinear up;
  RowLinear down;
};
TORCH_MODULE(DividedPair);

// Weights of the pairs after training on one device: up, then down.
std::vector<torch::Tensor> train_alone(const Shape& shape) {
  const auto pairs = make_pairs();
  torch::nn::Sequential net;
  for (const auto& [up, down] : pairs) {
    net->push_back(up);
    net->push_back(torch::nn::Tanh());
    net->push_back(down);
  }
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  for (int step = 0; step < kSteps; ++step) {
    for (int micro = 0; micro < shape.accumulate; ++micro) {
      const auto batch = draw(shape.rows, step * shape.accumulate + micro);
      torch::Tensor loss;
      {
        const Autocast amp(torch::kCPU, torch::kBFloat16, shape.bf16);
        loss = test::mse(net->forward(batch.x), batch.y);
      }
      (loss / shape.accumulate).backward();
    }
    optimizer.step();
    optimizer.zero_grad();
  }
  std::vector<torch::Tensor> weights;
  for (const auto& [up, down] : pairs) {
    weights.push_back(up->weight.detach());
    weights.push_back(down->weight.detach());
  }
  return weights;
}

class ThreeAxes : public ::testing::TestWithParam<Shape> {};

TEST_P(ThreeAxes, TrainAsOneDevice) {
  const Shape& shape = GetParam();
  const auto expected = train_alone(shape);
  const auto schedule = make_schedule(shape.schedule, shape.stages, shape.micro_batches);
  test::run_ranks(shape.data * schedule.ranks() * shape.tensor, [&](const Communicator& world) {
    const Mesh mesh(world, {{"dp", shape.data}, {"pp", schedule.ranks()}, {"tp", shape.tensor}});
    const auto& data = mesh.axis("dp");
    const Devices devices("cpu:1");
    const UseDevice home(devices[0]);
    std::vector<DividedPair> pairs;
    torch::nn::Sequential net;
    for (const auto& whole : make_pairs()) {
      net->push_back(pairs.emplace_back(whole, mesh.axis("tp")));
    }
    Pipeline pipeline(split_stages(net, cut_by_count(kPairs, shape.stages)), mesh.axis("pp"),
                      devices[0], schedule, {.loss = test::mse, .data = data});
    Sgd optimizer(pipeline.parameters(), {.lr = 0.1});
    GradScaler scaler({.init_scale = 256, .model_parallel = mesh.plane({"pp", "tp"})});
    for (int step = 0; step < kSteps; ++step) {
      for (int micro = 0; micro < shape.accumulate; ++micro) {
        const auto whole = draw(shape.rows, step * shape.accumulate + micro);
        const Autocast amp(torch::kCPU, torch::kBFloat16, shape.bf16);
        pipeline.step(whole.x.tensor_split(data.size())[static_cast<size_t>(data.rank())],
                      whole.y.tensor_split(data.size())[static_cast<size_t>(data.rank())],
                      {.loss_factor = 1.0 / shape.accumulate,
                       .synchronise = micro + 1 == shape.accumulate,
                       .scaler = &scaler});
      }
      scaler.step(optimizer);
      scaler.update();
      optimizer.zero_grad();
    }
    const auto counts = cut_by_count(kPairs, shape.stages);
    for (const int each : pipeline.local_stages()) {
      size_t first = 0;
      for (int before = 0; before < each; ++before) {
        first += static_cast<size_t>(counts[static_cast<size_t>(before)]);
      }
      for (size_t i = first; i < first + static_cast<size_t>(counts[static_cast<size_t>(each)]);
           ++i) {
        const double tolerance = shape.bf16 ? 2e-2 : 1e-5;
        EXPECT_TRUE(
            torch::allclose(pairs[i]->up->whole_weight(), expected[2 * i], tolerance, tolerance))
            << "up " << i << " of stage " << each;
        EXPECT_TRUE(torch::allclose(pairs[i]->down->whole_weight(), expected[2 * i + 1], tolerance,
                                    tolerance))
            << "down " << i << " of stage " << each;
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, ThreeAxes,
    ::testing::Values(Shape{2, 2, 2}, Shape{1, 1, 2}, Shape{1, 2, 2}, Shape{2, 1, 2},
                      Shape{2, 2, 1}, Shape{1, 2, 3}, Shape{2, 2, 2, "gpipe", 3, 11},
                      Shape{2, 2, 2, "zero-bubble", 4, 8}, Shape{1, 4, 2, "interleaved", 4, 8},
                      Shape{2, 2, 2, "1f1b", 4, 8, 3}, Shape{2, 2, 2, "1f1b", 4, 8, 2, true}));

}  // namespace
}  // namespace lockstep::test::hybrid_test
