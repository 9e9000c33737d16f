// A training step of GPT-2 on one device, in the variant that the settings name. Its counterpart in
// PyTorch is bench/peers/gpt2.py; both take the same JSON of settings, the same weights and the
// same tokens. Only builds with CUDA have it; with {"device": "cpu"} and small sizes it runs
// anywhere.
//
//   bench_gpt2 '{"layers": 12, "heads": 12, "width": 768, "positions": 1024, "batch": 32}'
//
// prints a line of losses and then, for each line "go N" that it reads, what N steps took. With
// "steps": N it measures N steps and ends, as a profiler wants it.

#include <c10/cuda/CUDACachingAllocator.h>
#include <fmt/format.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "lockstep/captured_step.hpp"
#include "lockstep/clock.hpp"
#include "lockstep/fused_layers.hpp"
#include "lockstep/lockstep.hpp"
#include "lockstep/master_weights.hpp"
#include "serve.hpp"

namespace {

using nlohmann::json;
using torch::Tensor;

struct Sizes {
  explicit Sizes(const json& settings)
      : layers(settings.value("layers", 12)),
        heads(settings.value("heads", 12)),
        width(settings.value("width", 768)),
        positions(settings.value("positions", 1024)),
        vocabulary(settings.value("vocabulary", 50257)),
        padded((vocabulary + 127) / 128 * 128),
        batch(settings.value("batch", 32)) {}
  int64_t layers;
  int64_t heads;
  int64_t width;
  int64_t positions;
  int64_t vocabulary;
  int64_t padded;  // rows of the table of tokens, for whole tiles of matrix products
  int64_t batch;
};

struct Gpt2 : torch::nn::Module {
  explicit Gpt2(const Sizes& sizes)
      : wte(register_module("wte", torch::nn::Embedding(sizes.padded, sizes.width))),
        wpe(register_module("wpe", torch::nn::Embedding(sizes.positions, sizes.width))),
        lnf(register_module("lnf",
                            torch::nn::LayerNorm(torch::nn::LayerNormOptions({sizes.width})))),
        vocabulary(sizes.vocabulary) {
    for (int64_t i = 0; i < sizes.layers; ++i) {
      blocks.emplace_back(
          lockstep::TransformerBlockOptions{.width = sizes.width, .heads = sizes.heads});
      register_module(fmt::format("h{}", i), blocks.back());
    }
  }

  // The loss. tokens, targets: [batch, positions].
  Tensor forward(const Tensor& tokens, const Tensor& targets) {
    Tensor x = torch::embedding(wte->weight, tokens) + wpe->weight;
    Tensor branch;
    for (auto& block : blocks) std::tie(x, branch) = block->forward_branch(x, branch);
    const auto normed = std::get<1>(lockstep::add_layer_norm(x, branch, lnf->weight, lnf->bias));
    return lockstep::linear_cross_entropy(normed.view({-1, normed.size(-1)}), wte->weight,
                                          targets.view({-1}), vocabulary);
  }

  torch::nn::Embedding wte;  // also the head
  torch::nn::Embedding wpe;
  torch::nn::LayerNorm lnf;
  std::vector<lockstep::TransformerBlock> blocks;
  int64_t vocabulary;
};

void draw_weights(Gpt2& net) {
  const torch::NoGradGuard no_grad;
  torch::manual_seed(0);
  for (const auto& item : net.named_parameters()) {
    auto parameter = item.value();
    if (parameter.dim() == 2) {
      parameter.copy_(torch::randn(parameter.sizes()) * 0.02);
    } else if (item.key().find("ln") == std::string::npos ||
               item.key().find("bias") != std::string::npos) {
      parameter.zero_();
    }
  }
}

// Tokens that follow a rule a model can learn; the peer has the same.
std::vector<Tensor> batch_of(const Sizes& sizes, int64_t number, torch::Device device) {
  const auto i = torch::arange(sizes.batch * (sizes.positions + 1), torch::kLong);
  const auto tokens = ((i * i).remainder(1009) * 31 + number * 17)
                          .remainder(sizes.vocabulary)
                          .view({sizes.batch, sizes.positions + 1});
  return {tokens.narrow(1, 0, sizes.positions).contiguous().to(device),
          tokens.narrow(1, 1, sizes.positions).contiguous().to(device)};
}

double gib(int64_t bytes) {
  return static_cast<double>(bytes) / (1 << 30);
}

class Trainer {
 public:
  Trainer(const json& settings, torch::Device device)
      : device_(device), sizes_(settings), net_(std::make_shared<Gpt2>(sizes_)) {
    if (settings.contains("weights")) {
      lockstep::load_weights(*net_, settings.at("weights"));
    } else {
      draw_weights(*net_);
    }
    net_->to(device);
    for (int64_t i = 0; i < kBatches; ++i) batches_.push_back(batch_of(sizes_, i, device));
    lockstep::AdamWOptions adamw{.lr = 3e-4, .beta2 = 0.95, .weight_decay = 0.1};
    autocast_ = !settings.value("masters", true);
    if (!autocast_) adamw.masters = lockstep::MasterWeights(*net_, {.dtype = torch::kBFloat16});
    lockstep::tune_layers(settings.value("tune", true));
    optimizer_ = std::make_unique<lockstep::AdamW>(net_->parameters(), adamw);
    step_.emplace([this](const Tensor& x, const Tensor& y) { return train(x, y); },
                  lockstep::CaptureOptions{.enabled = settings.value("capture", true)});
  }

  Tensor step() { return (*step_)(batches_[static_cast<size_t>(steps_++ % kBatches)]); }

  const lockstep::CapturedStep& captured() const { return *step_; }
  int64_t tokens() const { return sizes_.batch * sizes_.positions; }

 private:
  static constexpr int64_t kBatches = 4;

  Tensor train(const Tensor& tokens, const Tensor& targets) {
    Tensor loss;
    {
      const lockstep::Autocast amp(device_, torch::kBFloat16, autocast_);
      loss = net_->forward(tokens, targets);
    }
    loss.backward();
    optimizer_->step({.zero_grad = true});
    return loss.detach();
  }

  torch::Device device_;
  Sizes sizes_;
  std::shared_ptr<Gpt2> net_;
  std::vector<std::vector<Tensor>> batches_;  // {tokens, targets}
  bool autocast_ = false;
  std::unique_ptr<lockstep::AdamW> optimizer_;
  std::optional<lockstep::CapturedStep> step_;
  int64_t steps_ = 0;
};

void synchronize(torch::Device device) {
  if (device.is_cuda()) torch::cuda::synchronize();
}

// The peak of the GPU's memory: `allocated` as PyTorch's max_memory_allocated(), `reserved` with
// the memory that graphs keep.
json gpu_memory(torch::Device device) {
  if (!device.is_cuda()) return nullptr;
  const auto stats = c10::cuda::CUDACachingAllocator::getDeviceStats(device.index());
  return {{"allocated_gib", gib(stats.allocated_bytes[0].peak)},
          {"reserved_gib", gib(stats.reserved_bytes[0].peak)}};
}

json measure(Trainer& trainer, torch::Device device, int64_t steps) {
  synchronize(device);
  const int64_t begin_ns = lockstep::monotonic_ns();
  for (int64_t i = 0; i < steps; ++i) trainer.step();
  synchronize(device);
  const double ms =
      static_cast<double>(lockstep::monotonic_ns() - begin_ns) * 1e-6 / static_cast<double>(steps);
  return {{"ms", ms},
          {"tokens_per_s", static_cast<double>(trainer.tokens()) / ms * 1e3},
          {"memory", gpu_memory(device)}};
}

int run(int, char** argv) {
  const auto settings = json::parse(argv[1]);
  const torch::Device device(settings.value("device", "cuda:0"));
  if (settings.contains("save")) {  // only writes the weights that all programs begin with
    const auto net = std::make_shared<Gpt2>(Sizes(settings));
    draw_weights(*net);
    lockstep::save_weights(*net, settings.at("save"));
    return 0;
  }
  Trainer trainer(settings, device);
  json losses = json::array();
  const int64_t checked = settings.value("check_steps", 20);
  for (int64_t i = 0; i < checked; ++i) losses.push_back(trainer.step().item<double>());
  const json ready = {{"losses", losses},
                      {"replayed", trainer.captured().replayed()},
                      {"why_not", trainer.captured().why_not()},
                      {"graph_gib", gib(trainer.captured().stats().memory_bytes)},
                      {"memory", gpu_memory(device)}};
  if (settings.contains("steps")) {
    fmt::print("{}\n{}\n", ready.dump(), measure(trainer, device, settings.at("steps")).dump());
    return 0;
  }
  bench::serve(settings, 0, ready, [&](int64_t steps) { return measure(trainer, device, steps); });
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return lockstep::run_program(run, argc, argv);
}
