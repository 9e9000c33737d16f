// Learns to read digits on as many ranks as it was started with: torch::data's loader, mixed
// precision, accumulation, a learning-rate schedule, metrics, and checkpoints to resume from.
//
//     lockstep run -n 2 mnist [DATA [RUN [EPOCHS]]]
//
// DATA has MNIST's files (train-images-idx3-ubyte, …); digits are drawn where they are missing. RUN
// gets checkpoints, metrics and the weights: started again with it, the program goes on. Exits with
// 1 unless it reads 97 % of the test set.
#include <torch/torch.h>

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <fstream>
#include <string>
#include <vector>

#include "drawn_digits.hpp"
#include "lockstep/lockstep.hpp"

// A file of MNIST: a magic number, the shape, and bytes.
torch::Tensor read_idx(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  const auto number = [&] {
    uint32_t value = 0;
    for (int i = 0; i < 4; ++i) value = value << 8 | static_cast<uint8_t>(file.get());
    return value;
  };
  const uint32_t magic = number();
  TORCH_CHECK(file && magic >> 8 == 0x08, path, " is not an IDX file of bytes");
  std::vector<int64_t> shape;
  for (uint32_t i = 0; i < (magic & 0xff); ++i) shape.push_back(number());
  auto tensor = torch::empty(shape, torch::kUInt8);
  file.read(reinterpret_cast<char*>(tensor.data_ptr<uint8_t>()), tensor.numel());
  TORCH_CHECK(file, path, " is too short");
  return tensor;
}

struct Digits : torch::data::datasets::BatchDataset<Digits, torch::data::Example<>> {
  Digits(const std::string& folder, const std::string& part)
      : images(read_idx(folder + "/" + part + "-images-idx3-ubyte").unsqueeze(1)),
        labels(read_idx(folder + "/" + part + "-labels-idx1-ubyte").to(torch::kLong)) {}

  torch::data::Example<> get_batch(torch::ArrayRef<size_t> rows) override {
    const auto chosen = torch::tensor(std::vector<int64_t>(rows.begin(), rows.end()));
    return {images.index_select(0, chosen).to(torch::kFloat) / 255, labels.index_select(0, chosen)};
  }
  torch::optional<size_t> size() const override { return labels.size(0); }

  torch::Tensor images;  // uint8 [rows, 1, 28, 28]
  torch::Tensor labels;  // int64 [rows]
};

torch::nn::Sequential make_net() {
  namespace nn = torch::nn;
  return nn::Sequential(nn::Conv2d(nn::Conv2dOptions(1, 8, 5).stride(2)), nn::ReLU(),
                        nn::Conv2d(nn::Conv2dOptions(8, 16, 5).stride(2)), nn::ReLU(),
                        nn::Flatten(), nn::Dropout(0.1), nn::Linear(16 * 4 * 4, 64), nn::ReLU(),
                        nn::Linear(64, 10));
}

// The share of the test set that the net reads. Each rank takes every R-th row, so that every row
// counts once.
double accuracy_of(const lockstep::World& world, torch::nn::Sequential& net, Digits& test) {
  const torch::NoGradGuard no_grad;
  net->eval();
  const auto rows = test.labels.size(0);
  const auto images = test.images.slice(0, world.rank(), rows, world.size());
  const auto labels = test.labels.slice(0, world.rank(), rows, world.size());
  const auto out = net->forward((images.to(torch::kFloat) / 255).to(world.device().torch_device()));
  const auto correct = (out.argmax(1).cpu() == labels).to(torch::kDouble).mean();
  net->train();
  const auto own_rows = static_cast<double>(labels.size(0));
  return lockstep::mean_over_ranks(world.comm(), {{"accuracy", correct}}, own_rows).at("accuracy");
}

struct Arguments {
  std::string data = "mnist-data";
  std::string run = "mnist-run";
  int64_t epochs = 4;
};

Arguments parse(int argc, char** argv) {
  const std::vector<std::string> words(argv + 1, argv + argc);
  const auto is_digit = [](unsigned char letter) { return std::isdigit(letter) != 0; };
  for (size_t i = 0; i < words.size(); ++i) {
    const bool is_count = !words[i].empty() && words[i].size() < 7 &&
                          std::all_of(words[i].begin(), words[i].end(), is_digit);
    if (i < 3 && (i == 2 ? is_count : !words[i].starts_with("-"))) continue;
    throw lockstep::Error(lockstep::Code::kUsage, "mnist was given " + words[i],
                          "mnist [DATA [RUN [EPOCHS]]]: two folders and a number");
  }
  Arguments given;
  if (words.size() > 0) given.data = words[0];
  if (words.size() > 1) given.run = words[1];
  if (words.size() > 2) given.epochs = std::stoll(words[2]);
  return given;
}

int train(int argc, char** argv) {
  constexpr int64_t kBatch = 32;  // rows of one micro-step on one rank
  constexpr int64_t kAccumSteps = 2;
  constexpr uint64_t kSeed = 1;
  const auto [data, run, epochs] = parse(argc, argv);

  const auto world = lockstep::World::from_env();
  const lockstep::UseDevice home(world.device());
  const auto device = world.device().torch_device();

  if (world.rank() == 0) {
    drawn_digits::write_part(data, "train", 12'000, /*seed=*/1);
    drawn_digits::write_part(data, "t10k", 2'000, /*seed=*/2);
  }
  world.comm().barrier();  // the others read what rank 0 has written
  Digits digits(data, "train");
  Digits test(data, "t10k");

  torch::manual_seed(kSeed + static_cast<uint64_t>(world.rank()));  // other dropout on each rank
  auto net = make_net();
  net->to(device);
  lockstep::DistributedDataParallel ddp(net, world.comm());  // rank 0's weights go to all
  lockstep::AdamW optimizer(ddp.parameters(), {.lr = 4e-3});

  lockstep::DistributedSampler sampler(digits.labels.size(0), world.size(), world.rank());
  const auto loader = lockstep::make_data_loader(
      digits, sampler,
      torch::data::DataLoaderOptions().batch_size(kBatch).workers(1).drop_last(true));
  const int64_t window_rows = kBatch * kAccumSteps;
  const int64_t updates = epochs * ((sampler.size() + window_rows - 1) / window_rows);
  lockstep::LrScheduler scheduler(optimizer, lockstep::warmup_cosine_lr(updates / 10, updates));

  lockstep::Checkpoint checkpoint(run + "/checkpoints", world.comm(), {.every = 50});
  checkpoint.add("model", *net).add("optimizer", optimizer, *net);
  checkpoint.add("scheduler", scheduler).add("sampler", sampler);
  int64_t step = checkpoint.resume();
  lockstep::MetricsLog log(run, {.rank = world.rank(), .resumed_after = step});

  double accuracy = 0;
  for (int64_t epoch = sampler.epoch(); epoch < epochs; ++epoch) {
    sampler.set_epoch(epoch);  // another order, the same on all ranks
    for (auto [batch, steps, is_last] :
         lockstep::accumulate(sampler.batches(*loader), kAccumSteps, ddp)) {
      torch::Tensor loss;
      {
        const lockstep::Autocast amp(world.device(), torch::kBFloat16);
        loss = torch::cross_entropy_loss(ddp(batch.data.to(device)), batch.target.to(device));
      }
      (loss / steps).backward();
      if (!is_last) continue;
      optimizer.step({.max_norm = 1.0, .zero_grad = true});
      scheduler.step();
      step += 1;
      if (step % 20 == 0) {
        const auto mean = lockstep::mean_over_ranks(world.comm(), {{"loss", loss}});
        log.write(step, {{"loss/train", mean.at("loss")}, {"lr", scheduler.rate()}});
      }
      if (!checkpoint.step(step)) return lockstep::kExitPreempted;
    }
    accuracy = accuracy_of(world, net, test);
    log.write(step, "accuracy/test", accuracy);
    if (world.rank() == 0) {
      std::printf("epoch %lld: %.2f %% of the test set\n", static_cast<long long>(epoch),
                  100 * accuracy);
    }
  }
  checkpoint.finish();
  if (world.rank() == 0) lockstep::save_weights(*net, run + "/weights.safetensors");
  return accuracy > 0.97 ? 0 : 1;
}

int main(int argc, char** argv) {
  return lockstep::run_program(train, argc, argv);
}
