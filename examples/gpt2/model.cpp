#include "model.hpp"

#include <fmt/format.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>

namespace gpt2 {
namespace {

using lockstep::Code;
using lockstep::Error;

constexpr double kSpread = 0.02;  // of GPT-2's first weights

// FNV-1a: the same on every machine.
uint64_t hash_of(const std::string& text) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  return hash;
}

torch::nn::LayerNorm make_norm(const Config& config) {
  return torch::nn::LayerNorm(torch::nn::LayerNormOptions({config.width}));
}

struct PositionsImpl : torch::nn::Module {
  explicit PositionsImpl(const Config& config)
      : wpe(register_parameter("wpe", torch::empty({config.context, config.width}))) {}
  torch::Tensor wpe;
};

torch::nn::Embedding make_embedding(const Config& config, const Weights& weights) {
  torch::nn::Embedding wte(torch::nn::EmbeddingOptions(config.vocabulary, config.width)
                               ._weight(torch::empty({config.vocabulary, config.width})));
  weights.fill(*wte, "input.wte.", config.layers);
  return wte;
}

Input make_input(const Config& config, const Weights& weights, const Division& division) {
  PositionsImpl positions(config);
  weights.fill(positions, "input.", config.layers);
  return Input(make_embedding(config, weights), positions.wpe, config.dropout, division);
}

lockstep::TransformerBlock make_block(int64_t index, const Config& config, const Weights& weights,
                                      const Division& division) {
  lockstep::TransformerBlock whole(
      lockstep::TransformerBlockOptions{.width = config.width,
                                        .heads = config.heads,
                                        .dropout = config.dropout,
                                        .attention_dropout = config.dropout});
  weights.fill(*whole, fmt::format("{}.", index), config.layers);
  if (division.axis.size() == 1) return whole;
  return lockstep::TransformerBlock(whole, division.axis, division.sequence_parallel);
}

}  // namespace

int64_t Config::parameters() const {
  return (vocabulary + context) * width + layers * (12 * width * width + 13 * width) + 2 * width;
}

Config named_config(const std::string& name) {
  if (name == "gpt2") return {};
  if (name == "gpt2-medium") return {.layers = 24, .heads = 16, .width = 1024};
  if (name == "gpt2-large") return {.layers = 36, .heads = 20, .width = 1280};
  if (name == "gpt2-xl") return {.layers = 48, .heads = 25, .width = 1600};
  throw Error(Code::kUsage, fmt::format("--model {} is unknown", name),
              "give gpt2, gpt2-medium, gpt2-large or gpt2-xl");
}

InputImpl::InputImpl(const torch::nn::Embedding& whole, const torch::Tensor& positions,
                     double dropout, const Division& given)
    : wte(whole, given.axis,
          lockstep::VocabParallelOptions{.sequence_parallel = given.sequence_parallel}),
      drop(dropout, given.axis, given.sequence_parallel),
      division(given) {
  register_module("wte", wte);
  wpe = register_parameter("wpe", positions.detach().clone());
  register_module("drop", drop);
}

torch::Tensor InputImpl::forward(const torch::Tensor& tokens) {
  if (tokens.size(1) > wpe.size(0)) {
    throw Error(Code::kTensorMismatch,
                fmt::format("{} tokens were given to a model with a context of {}", tokens.size(1),
                            wpe.size(0)),
                "give shorter rows, or a model with a larger context");
  }
  auto positions = wpe.narrow(0, 0, tokens.size(1));
  if (division.sequence_parallel) {
    positions = lockstep::scatter_to_sequence(positions, division.axis);
  }
  return drop(wte(tokens) + positions);
}

torch::Tensor InputImpl::embed_at(const torch::Tensor& tokens, int64_t first) {
  return wte(tokens) + wpe.narrow(0, first, tokens.size(1));
}

OutputImpl::OutputImpl(const torch::nn::LayerNorm& whole,
                       const lockstep::VocabParallelEmbedding& embedding, bool owns,
                       const Division& division)
    : ln_f(whole, division.axis, division.sequence_parallel), wte(embedding) {
  register_module("ln_f", ln_f);
  if (owns) register_module("wte", wte);
}

torch::Tensor OutputImpl::forward(const torch::Tensor& x) {
  return wte->logits(ln_f(x));
}

void Weights::fill(torch::nn::Module& layer, const std::string& prefix, int64_t layers) const {
  const torch::NoGradGuard no_grad;
  for (const auto& item : layer.named_parameters()) {
    const std::string name = prefix + item.key();
    auto parameter = item.value();
    if (!given_.empty()) {
      const auto found = given_.find(name);
      if (found == given_.end() || found->second.sizes() != parameter.sizes()) {
        throw Error(
            Code::kTensorMismatch,
            fmt::format(
                "the model needs {} of {}, but the file has {}", name,
                lockstep::shape_text(parameter.sizes()),
                found == given_.end() ? "none" : lockstep::shape_text(found->second.sizes())),
            "give the sizes of the file's model: its config.json has them");
      }
      parameter.copy_(found->second);
      continue;
    }
    const bool is_norm = name.find("ln") != std::string::npos;
    if (parameter.dim() < 2) {
      parameter.fill_(is_norm && name.ends_with("weight") ? 1 : 0);
      continue;
    }
    const bool adds = name.ends_with("proj.weight") || name.ends_with("out.weight");
    const double spread = adds ? kSpread / std::sqrt(2.0 * static_cast<double>(layers)) : kSpread;
    parameter.normal_(0, spread, at::detail::createCPUGenerator(seed_ ^ hash_of(name)));
  }
}

std::vector<torch::nn::Sequential> make_stages(const Config& config, const Weights& weights,
                                               const Division& division,
                                               std::span<const int64_t> layers_per_stage,
                                               std::span<const int> own) {
  std::vector<torch::nn::Sequential> stages(layers_per_stage.size(), nullptr);
  const bool one_stage = stages.size() == 1;
  lockstep::VocabParallelEmbedding wte{nullptr};
  int64_t layer = 0;
  for (size_t stage = 0; stage < stages.size(); ++stage) {
    const int64_t end = layer + layers_per_stage[stage];
    if (std::find(own.begin(), own.end(), static_cast<int>(stage)) == own.end()) {
      layer = end;
      continue;
    }
    stages[stage] = torch::nn::Sequential();
    for (; layer < end; ++layer) {
      if (layer == 0) {
        const auto input = make_input(config, weights, division);
        wte = input->wte;
        stages[stage]->push_back("input", input);
      } else if (layer <= config.layers) {
        stages[stage]->push_back(fmt::format("{}", layer - 1),
                                 make_block(layer - 1, config, weights, division));
      } else {
        auto norm = make_norm(config);
        weights.fill(*norm, "output.ln_f.", config.layers);
        if (!one_stage) {
          wte = lockstep::VocabParallelEmbedding(
              make_embedding(config, weights), division.axis,
              lockstep::VocabParallelOptions{.sequence_parallel = division.sequence_parallel});
        }
        stages[stage]->push_back("output", Output(norm, wte, !one_stage, division));
      }
    }
  }
  return stages;
}

torch::Tensor loss_of(const torch::Tensor& own_logits, const torch::Tensor& targets,
                      const Config& config, const Division& division) {
  return lockstep::vocab_parallel_cross_entropy(own_logits, targets, config.vocabulary,
                                                division.axis);
}

}  // namespace gpt2
