// Models of every kind for `lockstep verify`, which finds planted bugs in this program and no bug
// where none was planted: lockstep run -n 2 verify_models --model cnn
//
// The rows of a step are the same at any number of ranks, so that the runs can be compared.
#include <fmt/format.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <functional>
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
  std::string feature = "off";
  int64_t stages = 1;
  int64_t tensor_parallel = 1;
  int64_t micro_batches = 1;
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

// Dropout that is no module of torch::nn: lockstep's own, and a function.
struct DroppedImpl : nn::Module {
  DroppedImpl()
      : first(register_module("first", nn::Linear(12, 24))),
        drop(register_module("drop",
                             lockstep::ParallelDropout(0.1, lockstep::Communicator::self()))),
        last(register_module("last", nn::Linear(24, kClasses))) {}
  Tensor forward(const Tensor& x) {
    return last(torch::dropout(drop(torch::relu(first(x))), 0.1, is_training()));
  }
  nn::Linear first;
  lockstep::ParallelDropout drop;
  nn::Linear last;
};
TORCH_MODULE(Dropped);

// Half of a model of two towers, whose first layer is both's.
struct TowerImpl : nn::Module {
  explicit TowerImpl(const nn::Linear& shared)
      : first(register_module("first", shared)),
        last(register_module("last", nn::Linear(24, kClasses))) {}
  Tensor forward(const Tensor& x) { return last(torch::relu(first(x))); }
  nn::Linear first, last;
};
TORCH_MODULE(Tower);

struct TwinsImpl : nn::Module {
  TwinsImpl() {
    const nn::Linear shared(12, 24);
    left = register_module("left", Tower(shared));
    right = register_module("right", Tower(shared));
  }
  Tensor forward(const Tensor& x) { return left(x) + right(x); }
  Tower left = nullptr, right = nullptr;
};
TORCH_MODULE(Twins);

// The last layer of a pipeline, with the weight of the first.
struct OutputImpl : nn::Module {
  explicit OutputImpl(const Tensor& shared) : weight(register_parameter("weight", shared)) {}
  Tensor forward(const Tensor& x) { return torch::linear(x, weight); }
  Tensor weight;
};
TORCH_MODULE(Output);

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
    if (model == "synced") {
      const nn::Sequential net(nn::Conv2d(1, 6, 3), nn::BatchNorm2d(6), nn::ReLU(), nn::Flatten(),
                               nn::Linear(6 * 6 * 6, kClasses));
      use("synced", net, torch::randn({kRows, 1, 8, 8}));
    }
    if (model == "twins") {
      twins = Twins();
      use("twins", twins, torch::randn({kRows, 12}));
    }
    if (model == "dropped") use("dropped", Dropped(), torch::randn({kRows, 12}));
    if (model == "lstm") use("lstm", Lstm(), torch::randn({kRows, kPositions, 4}));
    if (model == "transformer" || model == "tied") {
      use("transformer", Transformer(model == "tied" ? 0.0 : 0.1),
          torch::randint(0, kTokens, {kRows, kPositions}));
    }
  }
  Tensor forward(const Tensor& batch) { return run(batch); }
  std::function<Tensor(const Tensor&)> run;
  Twins twins = nullptr;
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
      ->check(one_of({"mlp", "cnn", "synced", "lstm", "transformer", "tied", "dropped", "twins",
                      "stages"})
                  .description(""))
      ->type_name("mlp|cnn|synced|lstm|transformer|tied|dropped|twins|stages")
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
  app.add_option("--feature", options.feature, "what else a program may do with a wrapper")
      ->check(one_of({"off", "uneven", "surgery", "evaluation", "halved", "task", "compressed",
                      "parts", "bare", "two-optimizers"})
                  .description(""))
      ->type_name("off|uneven|surgery|evaluation|halved|task|compressed|parts|bare|two-optimizers")
      ->capture_default_str();
  app.add_option("--stages", options.stages, "ranks of a pipeline, of --model stages")
      ->capture_default_str();
  app.add_option("--tensor-parallel", options.tensor_parallel,
                 "ranks that share matrices, of --model stages")
      ->capture_default_str();
  app.add_option("--micro-batches", options.micro_batches, "of a pipeline")->capture_default_str();
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

// What the loop needs of a wrapper, or of two.
struct Wrapped {
  std::function<Tensor(const Tensor&)> forward;
  std::vector<Tensor> parameters;
  lockstep::Accumulating* accumulating = nullptr;
  std::function<void(double)> set_weight = {};
  std::function<void()> halve = {};
  std::function<void(lockstep::Checkpoint&, torch::optim::Optimizer&,
                     const lockstep::MasterWeights*)>
      save_with = {};
};

void halve_all(const nn::Module& module) {
  const torch::NoGradGuard no_grad;
  for (auto& parameter : module.parameters()) parameter.mul_(0.5);
}

Wrapped wrapped(lockstep::DistributedDataParallel<Net>& ddp) {
  return {.forward = [&](const Tensor& x) { return ddp(x); },
          .parameters = ddp.parameters(),
          .accumulating = &ddp.sync(),
          .set_weight = [&](double weight) { ddp.set_weight(weight); },
          .halve = [&] { halve_all(*ddp.module()); },
          .save_with =
              [&](auto& checkpoint, auto& optimizer, const auto* masters) {
                checkpoint.add("model", *ddp.module()).add("optimizer", optimizer, *ddp.module());
                if (masters != nullptr) checkpoint.add("masters", *masters, *ddp.module());
              }};
}

Wrapped wrapped(lockstep::FullyShardedDataParallel<Net>& fsdp) {
  return {.forward = [&](const Tensor& x) { return fsdp(x); },
          .parameters = fsdp.parameters(),
          .accumulating = &fsdp.sharded(),
          .set_weight = [&](double weight) { fsdp.set_weight(weight); },
          .halve =
              [&] {
                const lockstep::GatheredParameters whole(fsdp);
                halve_all(*fsdp.module());
              },
          .save_with =
              [&](auto& checkpoint, auto& optimizer, const auto* masters) {
                checkpoint.add("model", fsdp).add("optimizer", optimizer, fsdp);
                if (masters != nullptr) checkpoint.add("masters", *masters, fsdp);
              }};
}

using TowerDdp = lockstep::DistributedDataParallel<TowerImpl>;

Wrapped wrapped(TowerDdp& left, TowerDdp& right) {
  std::vector<Tensor> parameters = left.parameters();
  for (auto& each : right.module()->last->parameters()) parameters.push_back(each);
  return {.forward = [&](const Tensor& x) { return left(x) + right(x); },
          .parameters = std::move(parameters)};
}

// The rows of this rank, of a batch over all ranks. Uneven: the first rank has twice as many.
Tensor own_rows(const lockstep::World& world, const Options& options,
                lockstep::DistributedSampler& sampler) {
  if (options.feature != "uneven") {
    return torch::tensor(sampler.next_batch(options.batch / world.size()));
  }
  const int64_t unit = options.batch / (world.size() + 1);
  const int64_t begin = world.rank() == 0 ? 0 : (world.rank() + 1) * unit;
  return torch::tensor(sampler.next_batch(options.batch))
      .narrow(0, begin, world.rank() == 0 ? 2 * unit : unit);
}

// Gradients of both halves of the rows, which the program adds up itself.
double backward_by_surgery(const Wrapped& model, const Net& net, const Tensor& rows) {
  double losses = 0;
  std::vector<Tensor> kept;
  for (const Tensor& half : rows.chunk(2)) {
    kept.clear();
    for (auto parameter : model.parameters) {
      kept.push_back(parameter.grad());
      parameter.mutable_grad() = Tensor();
    }
    const auto loss = torch::cross_entropy_loss(model.forward(net.x.index_select(0, half)),
                                                net.y.index_select(0, half)) /
                      2;
    loss.backward();
    losses += loss.item<double>();
  }
  const torch::NoGradGuard no_grad;
  for (size_t i = 0; i < kept.size(); ++i) {
    if (kept[i].defined()) model.parameters[i].grad().add_(kept[i]);
  }
  return losses;
}

// Two optimizers, each of which clips the gradients of half of the parameters by their own norm.
int train_with_two(const lockstep::World& world, const Options& options, Net& net,
                   const Wrapped& model) {
  const auto half = static_cast<std::ptrdiff_t>(model.parameters.size() / 2);
  const auto middle = model.parameters.begin() + half;
  lockstep::Sgd first(std::vector<Tensor>(model.parameters.begin(), middle),
                      {.lr = options.lr, .momentum = 0.9});
  lockstep::Sgd second(std::vector<Tensor>(middle, model.parameters.end()),
                       {.lr = 0.5 * options.lr});
  lockstep::DistributedSampler sampler(kRows, world.size(), world.rank());
  for (int64_t step = 1; step <= options.steps; ++step) {
    const auto rows = own_rows(world, options, sampler);
    const auto loss = torch::cross_entropy_loss(model.forward(net.x.index_select(0, rows)),
                                                net.y.index_select(0, rows));
    loss.backward();
    first.step(lockstep::StepExtras{.max_norm = 0.05, .zero_grad = true});
    second.step(lockstep::StepExtras{.max_norm = 0.01, .zero_grad = true});
    lockstep::verify_loss(loss.detach());
  }
  return 0;
}

// Six virtual shards, whose masks of dropout are the same on any number of ranks.
int train_in_parts(const lockstep::World& world, const Options& options,
                   const std::shared_ptr<Net>& net) {
  torch::manual_seed(static_cast<uint64_t>(100 * options.seed + 1));
  lockstep::DistributedDataParallel<Net> ddp(net, world.comm(), {.virtual_shards = 6});
  const auto optimizer = make_optimizer(ddp.parameters(), options, {});
  for (int64_t step = 0; step < options.steps; ++step) {
    const int64_t own = options.batch / world.size();
    const int64_t begin = (step * options.batch + world.rank() * own) % kRows;
    const auto loss = ddp.backward_parts(net->x.narrow(0, begin, own), net->y.narrow(0, begin, own),
                                         [&](const Tensor& part_x, const Tensor& part_y) {
                                           return torch::cross_entropy_loss(ddp(part_x), part_y);
                                         });
    optimizer->step();
    optimizer->zero_grad();
    lockstep::verify_loss(loss);
  }
  return 0;
}

// Without a wrapper: rank 0's weights are sent, and gradients averaged, by the program itself.
Wrapped bare(const lockstep::World& world, Net& net) {
  const torch::NoGradGuard no_grad;
  for (auto& parameter : net.parameters()) world.comm().broadcast(parameter, 0);
  lockstep::verify_model(net);
  return {.forward = [&](const Tensor& x) { return net.forward(x); },
          .parameters = net.parameters()};
}

int train_on(const lockstep::World& world, const Options& options, Net& net, const Wrapped& model,
             const std::optional<lockstep::MasterWeights>& masters) {
  if (options.feature == "two-optimizers") return train_with_two(world, options, net, model);
  const auto optimizer = make_optimizer(model.parameters, options, masters);
  lockstep::GradScaler scaler({.enabled = options.amp != "off"});
  lockstep::LrScheduler scheduler(*optimizer, lockstep::cosine_lr(4 * options.steps));
  const bool uneven = options.feature == "uneven";
  lockstep::DistributedSampler sampler(kRows, uneven ? 1 : world.size(), uneven ? 0 : world.rank());
  std::optional<lockstep::Checkpoint> checkpoint;
  int64_t step = 0;
  if (!options.checkpoint.empty()) {
    checkpoint.emplace(options.checkpoint, world.comm(),
                       lockstep::CheckpointOptions{.every = 2, .asynchronous = false});
    model.save_with(*checkpoint, *optimizer, masters ? &*masters : nullptr);
    checkpoint->add("scaler", scaler).add("scheduler", scheduler).add("sampler", sampler);
    step = checkpoint->resume();
  }
  while (step < options.steps) {
    step += 1;
    if (options.feature == "halved" && step == 2) model.halve();
    std::vector<Tensor> micro_batches;
    for (int64_t micro = 0; micro < options.accum_steps; ++micro) {
      micro_batches.push_back(own_rows(world, options, sampler));
    }
    if (uneven) model.set_weight(static_cast<double>(micro_batches.front().size(0)));
    double losses = 0;
    if (options.feature == "surgery") {
      losses = backward_by_surgery(model, net, micro_batches.front());
      micro_batches.clear();
    }
    for (auto [rows, micro_steps, is_last] : lockstep::MicroSteps<std::vector<Tensor>&>(
             micro_batches, options.accum_steps, model.accumulating)) {
      Tensor loss;
      {
        const lockstep::Autocast amp(world.device(), torch::kBFloat16, options.amp != "off");
        const auto out = model.forward(net.x.index_select(0, rows));
        if (step == options.overflow_at && world.rank() + 1 == world.size()) plant_overflow(out);
        loss = torch::cross_entropy_loss(out.to(torch::kFloat), net.y.index_select(0, rows));
      }
      scaler.scale(loss / micro_steps).backward();
      losses += loss.template item<double>() / static_cast<double>(micro_steps);
    }
    if (options.feature == "evaluation") {
      const torch::NoGradGuard no_grad;
      model.forward(net.x.narrow(0, 0, 4));
    }
    if (options.feature == "bare") {
      for (auto& parameter : model.parameters) {
        if (!parameter.grad().defined()) continue;
        world.comm().all_reduce(parameter.mutable_grad(), lockstep::ReduceOp::kMean);
      }
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

// --model stages: a pipeline of one or two stages, with matrices over ranks and data parallel. The
// first and the last layer have one weight, some rows have no target, and a bias is frozen when all
// is made.
int train_stages(const lockstep::World& world, const Options& options) {
  const auto model_ranks = static_cast<int>(options.stages * options.tensor_parallel);
  if (options.stages > 2 || world.size() % model_ranks != 0) {
    throw lockstep::Error(
        lockstep::Code::kUsage,
        fmt::format("{} ranks cannot have {} stages", world.size(), options.stages),
        "give one or two stages, and a multiple of their ranks");
  }
  const lockstep::Mesh mesh(world.comm(), {{"dp", world.size() / model_ranks},
                                           {"pp", static_cast<int>(options.stages)},
                                           {"tp", static_cast<int>(options.tensor_parallel)}});
  torch::manual_seed(1);  // of the rows: the same on every rank
  const Tensor x = torch::randn({kRows, 12});
  const Tensor y = torch::randint(0, kClasses, {kRows});
  y.masked_fill_(torch::rand({kRows}) < 0.4, -100);
  // Other weights on each data rank until the first one's are sent.
  const int data_rank = mesh.coordinate("dp");
  torch::manual_seed(static_cast<uint64_t>(100 * options.seed + data_rank + 1));
  const nn::Linear first(12, 12), up(12, 24), down(24, 12);
  // Each stage has a copy of the weight, of other values until they are tied.
  const Output last(options.stages == 1 ? first->weight : first->weight.detach() + 0.1);
  nn::Sequential net(first, nn::ReLU(), lockstep::ColumnLinear(up, mesh.axis("tp")), nn::ReLU(),
                     lockstep::RowLinear(down, mesh.axis("tp")), nn::ReLU(), last);
  std::optional<lockstep::MasterWeights> masters;
  if (options.master_weights) masters.emplace(*net);
  const auto cut = options.stages == 1 ? std::vector<int64_t>{7} : std::vector<int64_t>{2, 5};
  lockstep::Pipeline pipeline(lockstep::split_stages(net, cut), mesh.axis("pp"), world.device(),
                              lockstep::one_f_one_b(static_cast<int>(options.stages),
                                                    static_cast<int>(options.micro_batches)),
                              {.loss =
                                   [](const Tensor& out, const Tensor& target) {
                                     return torch::cross_entropy_loss(out.to(torch::kFloat),
                                                                      target);
                                   },
                               .loss_weight = lockstep::count_targets(),
                               .data = mesh.axis("dp")});
  std::optional<lockstep::TiedWeight> tied;
  if (options.stages == 2) {
    tied.emplace(mesh.axis("pp"), 0, 1, mesh.coordinate("pp") == 0 ? first->weight : last->weight);
  }
  const auto optimizer = make_optimizer(pipeline.parameters(), options, masters);
  for (auto& item : net->named_parameters()) {
    if (item.key() == "4.bias") item.value().set_requires_grad(false);
  }
  lockstep::GradScaler scaler(
      {.enabled = options.amp != "off", .model_parallel = mesh.plane({"pp", "tp"})});
  lockstep::DistributedSampler sampler(kRows, mesh.axis("dp").size(), data_rank);
  for (int64_t step = 1; step <= options.steps; ++step) {
    const auto rows = torch::tensor(sampler.next_batch(options.batch / mesh.axis("dp").size()));
    Tensor loss;
    {
      const lockstep::Autocast amp(world.device(), torch::kBFloat16, options.amp != "off");
      loss = pipeline.step(x.index_select(0, rows), y.index_select(0, rows), {.scaler = &scaler});
    }
    if (tied) tied->sum_gradients();
    lockstep::StepExtras extras{.zero_grad = true};
    if (options.clip > 0) extras.max_norm = options.clip;
    scaler.step(*optimizer, extras);
    scaler.update();
    lockstep::verify_loss(loss);
  }
  return 0;
}

int train(int argc, char** argv) {
  const Options options = read_options(argc, argv);
  const auto world = lockstep::World::from_env();
  const lockstep::UseDevice home(world.device());
  const int64_t parts = options.feature == "uneven" ? world.size() + 1 : world.size();
  if (options.batch % parts != 0 || kRows % options.batch != 0) {
    throw lockstep::Error(lockstep::Code::kSplit,
                          fmt::format("--batch {} must divide {} rows, and {} must divide it",
                                      options.batch, kRows, parts),
                          "give --batch 60 and 1, 2, 3 or 5 ranks");
  }
  if (options.model == "stages") {
    if (options.accum_steps > 1 || options.sharding != "off" || !options.checkpoint.empty()) {
      throw lockstep::Error(lockstep::Code::kUsage,
                            "a pipeline here neither accumulates, nor is sharded, nor is saved",
                            "leave --accum-steps, --sharding and --checkpoint out");
    }
    return train_stages(world, options);
  }
  if (options.stages > 1 || options.tensor_parallel > 1) {
    throw lockstep::Error(lockstep::Code::kUsage, options.model + " cannot be cut into stages",
                          "give --model stages");
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
  if (options.model == "synced") {
    lockstep::convert_sync_batchnorm(*net, world.comm().split(0, world.rank(), "batch norm"));
  }
  std::optional<lockstep::MasterWeights> masters;
  if (options.master_weights) masters.emplace(*net);
  if (options.feature == "parts") return train_in_parts(world, options, net);
  if (options.feature == "bare") return train_on(world, options, *net, bare(world, *net), masters);
  lockstep::DdpOptions in_buckets{.first_bucket_bytes = 1024, .bucket_cap_bytes = 2048};
  if (options.feature == "compressed") in_buckets.hook = lockstep::compress_gradients(torch::kHalf);
  if (options.model == "twins") {
    lockstep::verify_model(*net);  // a tower's wrapper knows only its own names
    TowerDdp left(net->twins->left, world.comm(), in_buckets);
    TowerDdp right(net->twins->right, world.comm(), in_buckets);
    return train_on(world, options, *net, wrapped(left, right), masters);
  }
  if (options.sharding != "off") {
    const auto stage = options.sharding == "optimizer"   ? lockstep::ShardStage::kOptimizer
                       : options.sharding == "gradients" ? lockstep::ShardStage::kGradients
                                                         : lockstep::ShardStage::kParameters;
    lockstep::FullyShardedDataParallel<Net> fsdp(
        net, world.comm(),
        {.stage = stage, .min_unit_bytes = 1024, .share_on_host = options.feature == "halved"});
    return train_on(world, options, *net, wrapped(fsdp), masters);
  }
  lockstep::DistributedDataParallel<Net> ddp(net, world.comm(), in_buckets);
  const auto train_ddp = [&] { return train_on(world, options, *net, wrapped(ddp), masters); };
  return options.feature == "task" ? world.device().run("train", train_ddp) : train_ddp();
}

}  // namespace

int main(int argc, char** argv) {
  return lockstep::run_program(train, argc, argv);
}
