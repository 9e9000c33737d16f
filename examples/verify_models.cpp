// Models of every kind for `lockstep verify`, which finds planted bugs in this program and no bug
// where none was planted: lockstep run -n 2 verify_models --model cnn
//
// The rows of a step are the same at any number of ranks, so that the runs can be compared.
#include <fmt/format.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <optional>
#include <string>

#include "lockstep/cli_parse.hpp"
#include "lockstep/lockstep.hpp"

namespace {

namespace nn = torch::nn;
using torch::Tensor;

constexpr int64_t kRows = 240;  // of the data set
constexpr int64_t kClasses = 5;
constexpr int64_t kTokens = 16;    // in the vocabulary
constexpr int64_t kPositions = 6;  // of a sequence

struct Options {
  std::string model = "mlp";
  int64_t steps = 6;
  int64_t batch = 60;  // rows of an update, over all ranks
  int64_t accum_steps = 1;
  std::string optimizer = "sgd";
  double lr = 0.1;
  double clip = 0;  // 0: not at all
  std::string amp = "off";
  bool master_weights = false;
  int64_t overflow_at = 0;
  std::string sharding = "off";
  int64_t seed = 0;
  std::string checkpoint;
};

struct MlpImpl : nn::Module {
  MlpImpl()
      : first(register_module("first", nn::Linear(12, 24))),
        second(register_module("second", nn::Linear(24, 24))),
        last(register_module("last", nn::Linear(24, kClasses))) {
    // The optimizer has it too, as in a model that is fine-tuned.
    scale = register_parameter("scale", torch::full({24}, 1.5), /*requires_grad=*/false);
  }
  Tensor forward(const Tensor& x) {
    return last(torch::relu(second(torch::relu(first(x)) * scale)));
  }
  nn::Linear first, second, last;
  Tensor scale;
};
TORCH_MODULE(Mlp);

struct CnnImpl : nn::Module {
  CnnImpl()
      : conv1(register_module("conv1", nn::Conv2d(1, 6, 3))),
        norm1(register_module("norm1", nn::BatchNorm2d(6))),
        conv2(register_module("conv2", nn::Conv2d(6, 8, 3))),
        norm2(register_module("norm2", nn::BatchNorm2d(8))),
        last(register_module("last", nn::Linear(8 * 4 * 4, kClasses))) {}
  Tensor forward(const Tensor& x) {
    const auto seen = torch::relu(norm1(conv1(x)));
    return last(torch::relu(norm2(conv2(seen))).flatten(1));
  }
  nn::Conv2d conv1;
  nn::BatchNorm2d norm1;
  nn::Conv2d conv2;
  nn::BatchNorm2d norm2;
  nn::Linear last;
};
TORCH_MODULE(Cnn);

struct LstmImpl : nn::Module {
  LstmImpl()
      : lstm(register_module("lstm",
                             nn::LSTM(nn::LSTMOptions(4, 12).num_layers(2).batch_first(true)))),
        last(register_module("last", nn::Linear(12, kClasses))) {}
  Tensor forward(const Tensor& x) { return last(std::get<0>(lstm(x)).select(1, -1)); }
  nn::LSTM lstm;
  nn::Linear last;
};
TORCH_MODULE(Lstm);

// Attention and an MLP, with dropout after each.
struct BlockImpl : nn::Module {
  explicit BlockImpl(int64_t width, double drop)
      : norm1(register_module("norm1", nn::LayerNorm(nn::LayerNormOptions({width})))),
        qkv(register_module("qkv", nn::Linear(width, 3 * width))),
        out(register_module("out", nn::Linear(width, width))),
        norm2(register_module("norm2", nn::LayerNorm(nn::LayerNormOptions({width})))),
        up(register_module("up", nn::Linear(width, 4 * width))),
        down(register_module("down", nn::Linear(4 * width, width))),
        dropout(register_module("dropout", nn::Dropout(drop))) {}
  Tensor forward(const Tensor& x) {
    const auto parts = qkv(norm1(x)).chunk(3, -1);
    const auto scores = torch::softmax(parts[0].matmul(parts[1].transpose(1, 2)) * 0.25, -1);
    const auto attended = x + dropout(out(scores.matmul(parts[2])));
    return attended + dropout(down(torch::gelu(up(norm2(attended)))));
  }
  nn::LayerNorm norm1;
  nn::Linear qkv, out;
  nn::LayerNorm norm2;
  nn::Linear up, down;
  nn::Dropout dropout;
};
TORCH_MODULE(Block);

// Reads tokens. The last layer uses the embedding's weight, which so has two names.
struct TransformerImpl : nn::Module {
  explicit TransformerImpl(double drop)
      : embedding(register_module("embedding", nn::Embedding(kTokens, 16))),
        block(register_module("block", Block(16, drop))) {
    output = register_parameter("output", embedding->weight);
  }
  Tensor forward(const Tensor& x) { return torch::linear(block(embedding(x)).mean(1), output); }
  nn::Embedding embedding;
  Block block;
  Tensor output;
};
TORCH_MODULE(Transformer);

// A model, and rows for it.
struct Net : nn::Module {
  explicit Net(const std::string& model) {
    torch::manual_seed(1);  // of the rows: the same on every rank
    y = torch::randint(0, kClasses, {kRows});
    const auto use = [this](const char* name, auto net, Tensor rows) {
      register_module(name, net);
      x = std::move(rows);
      run = [net](const Tensor& batch) mutable { return net->forward(batch); };
    };
    if (model == "mlp") use("mlp", Mlp(), torch::randn({kRows, 12}));
    if (model == "cnn") use("cnn", Cnn(), torch::randn({kRows, 1, 8, 8}));
    if (model == "lstm") use("lstm", Lstm(), torch::randn({kRows, kPositions, 4}));
    if (model == "transformer" || model == "tied") {
      use("transformer", Transformer(model == "tied" ? 0.0 : 0.1),
          torch::randint(0, kTokens, {kRows, kPositions}));
    }
  }
  Tensor forward(const Tensor& batch) { return run(batch); }
  std::function<Tensor(const Tensor&)> run;
  Tensor x, y;
};

Options read_options(int argc, char** argv) {
  Options options;
  CLI::App app("Trains small models of every kind, for lockstep verify.", "verify_models");
  app.footer(lockstep::format_examples(
      {{"lockstep verify verify_models --model cnn", "is the parallel run the serial run?"},
       {"lockstep run -n 2 verify_models --model lstm", "train on two ranks"}}));
  app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  const auto one_of = [](std::vector<std::string> words) {
    return CLI::IsMember(std::move(words));
  };
  app.add_option("--model", options.model, "what is trained")
      ->check(one_of({"mlp", "cnn", "lstm", "transformer", "tied"}).description(""))
      ->type_name("mlp|cnn|lstm|transformer|tied")
      ->capture_default_str();
  app.add_option("--steps", options.steps, "optimizer updates")->capture_default_str();
  app.add_option("--batch", options.batch, "rows of one micro-step over all ranks")
      ->capture_default_str();
  app.add_option("--accum-steps", options.accum_steps, "micro-steps in one optimizer step")
      ->capture_default_str();
  app.add_option("--optimizer", options.optimizer, "how weights are updated")
      ->check(one_of({"sgd", "adamw"}).description(""))
      ->type_name("sgd|adamw")
      ->capture_default_str();
  app.add_option("--lr", options.lr, "learning rate at the start")->capture_default_str();
  app.add_option("--clip", options.clip, "largest norm of the gradients; 0: any");
  app.add_option("--amp", options.amp, "precision of matrix products")
      ->check(one_of({"off", "bf16"}).description(""))
      ->type_name("off|bf16")
      ->capture_default_str();
  app.add_flag("--master-weights", options.master_weights,
               "keep the weights in float32 beside bf16 ones that the model computes with");
  app.add_option("--overflow-at", options.overflow_at,
                 "plant an infinite gradient on the last rank in this step, counted from 1");
  app.add_option("--sharding", options.sharding, "what is divided over the ranks")
      ->check(one_of({"off", "optimizer", "gradients", "parameters"}).description(""))
      ->type_name("off|optimizer|gradients|parameters")
      ->capture_default_str();
  app.add_option("--seed", options.seed, "of initial weights and dropout")->capture_default_str();
  app.add_option("--checkpoint", options.checkpoint, "folder to save to, and to resume from")
      ->type_name("DIR");
  lockstep::parse_or_throw(app, argc, argv);
  return options;
}

std::unique_ptr<torch::optim::Optimizer> make_optimizer(
    std::vector<Tensor> parameters, const Options& options,
    const std::optional<lockstep::MasterWeights>& masters) {
  if (options.optimizer == "adamw") {
    return std::make_unique<lockstep::AdamW>(
        std::move(parameters),
        lockstep::AdamWOptions{.lr = options.lr, .weight_decay = 0.1, .masters = masters});
  }
  return std::make_unique<lockstep::Sgd>(
      std::move(parameters),
      lockstep::SgdOptions{
          .lr = options.lr, .momentum = 0.9, .weight_decay = 0.01, .masters = masters});
}

// From now on the gradient that flows back through `out` has one infinite element.
void plant_overflow(const Tensor& out) {
  out.register_hook([](const Tensor& gradient) {
    Tensor spoiled = gradient.clone();
    spoiled.view(-1)[0].fill_(std::numeric_limits<float>::infinity());
    return spoiled;
  });
}

// The loop, for a DistributedDataParallel or a FullyShardedDataParallel.
template <class Wrapper>
int train_on(const lockstep::World& world, const Options& options, Net& net, Wrapper& wrapper,
             const std::optional<lockstep::MasterWeights>& masters) {
  const auto optimizer = make_optimizer(wrapper.parameters(), options, masters);
  lockstep::GradScaler scaler({.enabled = options.amp != "off"});
  lockstep::LrScheduler scheduler(*optimizer, lockstep::cosine_lr(4 * options.steps));
  lockstep::DistributedSampler sampler(kRows, world.size(), world.rank());
  std::optional<lockstep::Checkpoint> checkpoint;
  int64_t step = 0;
  if (!options.checkpoint.empty()) {
    checkpoint.emplace(options.checkpoint, world.comm(),
                       lockstep::CheckpointOptions{.every = 2, .asynchronous = false});
    if constexpr (std::is_same_v<Wrapper, lockstep::DistributedDataParallel<Net>>) {
      checkpoint->add("model", net).add("optimizer", *optimizer, net);
    } else {
      checkpoint->add("model", wrapper).add("optimizer", *optimizer, wrapper);
    }
    checkpoint->add("scaler", scaler).add("scheduler", scheduler).add("sampler", sampler);
    step = checkpoint->resume();
  }
  const int64_t own_rows = options.batch / world.size();
  while (step < options.steps) {
    step += 1;
    std::vector<Tensor> micro_batches;
    for (int64_t micro = 0; micro < options.accum_steps; ++micro) {
      micro_batches.push_back(torch::tensor(sampler.next_batch(own_rows)));
    }
    double losses = 0;
    for (auto [rows, micro_steps, is_last] :
         lockstep::accumulate(micro_batches, options.accum_steps, wrapper)) {
      Tensor loss;
      {
        const lockstep::Autocast amp(world.device(), torch::kBFloat16, options.amp != "off");
        const auto out = wrapper(net.x.index_select(0, rows));
        if (step == options.overflow_at && world.rank() + 1 == world.size()) plant_overflow(out);
        loss = torch::cross_entropy_loss(out.to(torch::kFloat), net.y.index_select(0, rows));
      }
      scaler.scale(loss / micro_steps).backward();
      losses += loss.template item<double>() / static_cast<double>(micro_steps);
    }
    lockstep::StepExtras extras{.zero_grad = true};
    if (options.clip > 0) extras.max_norm = options.clip;
    scaler.step(*optimizer, extras);
    scaler.update();
    scheduler.step();
    lockstep::verify_loss(torch::tensor(losses, torch::kDouble));
    if (world.rank() == 0) fmt::print("step {}/{} | loss {:.6f}\n", step, options.steps, losses);
    if (checkpoint && !checkpoint->step(step)) return lockstep::kExitPreempted;
  }
  if (checkpoint) checkpoint->finish();
  return 0;
}

int train(int argc, char** argv) {
  const Options options = read_options(argc, argv);
  const auto world = lockstep::World::from_env();
  const lockstep::UseDevice home(world.device());
  if (options.batch % world.size() != 0 || kRows % options.batch != 0) {
    throw lockstep::Error(lockstep::Code::kSplit,
                          fmt::format("--batch {} must divide {} rows, and {} ranks must divide it",
                                      options.batch, kRows, world.size()),
                          "give --batch 60 and 1, 2, 3 or 5 ranks");
  }
  auto net = std::make_shared<Net>(options.model);
  // Other weights on each rank until rank 0's are sent, and other dropout afterwards.
  torch::manual_seed(static_cast<uint64_t>(100 * options.seed + world.rank() + 1));
  {
    const torch::NoGradGuard no_grad;
    for (auto& parameter : net->parameters()) {
      if (parameter.requires_grad()) parameter.add_(0.02 * torch::randn_like(parameter));
    }
  }
  std::optional<lockstep::MasterWeights> masters;
  if (options.master_weights) masters.emplace(*net);
  if (options.sharding != "off") {
    const auto stage = options.sharding == "optimizer"   ? lockstep::ShardStage::kOptimizer
                       : options.sharding == "gradients" ? lockstep::ShardStage::kGradients
                                                         : lockstep::ShardStage::kParameters;
    lockstep::FullyShardedDataParallel<Net> fsdp(
        net, world.comm(), {.stage = stage, .min_unit_bytes = 1024, .share_on_host = false});
    return train_on(world, options, *net, fsdp, masters);
  }
  lockstep::DistributedDataParallel<Net> ddp(
      net, world.comm(), {.first_bucket_bytes = 1024, .bucket_cap_bytes = 2048});
  return train_on(world, options, *net, ddp, masters);
}

}  // namespace

int main(int argc, char** argv) {
  return lockstep::run_program(train, argc, argv);
}
