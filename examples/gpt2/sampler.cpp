#include "sampler.hpp"

#include <fmt/format.h>
#include <torch/torch.h>

#include <cstdio>

#include "hugging_face.hpp"
#include "token_file.hpp"
#include "tokenizer.hpp"

namespace gpt2 {

Decoder::Decoder(const Config& config, const Weights& weights)
    : config_(config),
      net_(make_stages(config, weights, {}, std::vector<int64_t>{config.layers + 2},
                       std::vector<int>{0})
               .front()) {
  net_->eval();
  caches_.resize(static_cast<size_t>(config.layers));
}

torch::Tensor Decoder::run(const std::vector<int>& tokens) {
  const torch::NoGradGuard no_grad;
  const auto ids = torch::tensor(tokens, torch::kInt64).unsqueeze(0);
  auto x = net_->ptr(0)->as<InputImpl>()->embed_at(ids, caches_.front().positions());
  for (size_t i = 0; i < caches_.size(); ++i) {
    x = net_->ptr(i + 1)->as<lockstep::TransformerBlockImpl>()->decode(x, caches_[i]);
  }
  const auto last = x.narrow(1, x.size(1) - 1, 1);
  return net_->ptr(caches_.size() + 1)->as<OutputImpl>()->forward(last).view({-1});
}

torch::Tensor Decoder::next_logits(const std::vector<int>& tokens) {
  seen_.insert(seen_.end(), tokens.begin(), tokens.end());
  if (caches_.front().positions() + static_cast<int64_t>(tokens.size()) <= config_.context) {
    return run(tokens);
  }
  const auto kept =
      std::min<int64_t>(static_cast<int64_t>(seen_.size()), (config_.context + 1) / 2);
  for (auto& cache : caches_) cache = {};
  seen_.erase(seen_.begin(), seen_.end() - static_cast<std::ptrdiff_t>(kept));
  return run(seen_);
}

namespace {

int choose(torch::Tensor logits, const SampleOptions& options, at::Generator& generator) {
  if (options.temperature == 0) return static_cast<int>(logits.argmax().item<int64_t>());
  logits = logits / options.temperature;
  if (options.top_k > 0 && options.top_k < logits.size(0)) {
    const auto smallest = std::get<0>(logits.topk(options.top_k)).min();
    logits = logits.masked_fill(logits < smallest, -std::numeric_limits<float>::infinity());
  }
  const auto chosen = torch::multinomial(torch::softmax(logits, 0), 1, false, generator);
  return static_cast<int>(chosen.item<int64_t>());
}

}  // namespace

int sample(const SampleOptions& options) {
  auto tokenizer = Tokenizer::load(options.tokens.empty() ? options.model : options.tokens);
  auto published = read_published(options.model);
  Decoder decoder(published.config, Weights(std::move(published.weights)));
  auto tokens = tokenizer.encode(options.prompt);
  if (tokens.empty()) tokens = {tokenizer.end_of_text()};
  auto generator = at::detail::createCPUGenerator(options.seed);
  fmt::print("{}", options.prompt);
  for (int64_t i = 0; i < options.count; ++i) {
    const int next = choose(decoder.next_logits(tokens), options, generator);
    if (next == tokenizer.end_of_text()) break;
    fmt::print("{}", tokenizer.bytes_of(next));
    std::fflush(stdout);
    tokens = {next};
  }
  fmt::print("\n");
  return 0;
}

int write_logits(const std::string& model, const std::string& tokens, const std::string& out) {
  auto published = read_published(model);
  const Config config = published.config;
  const TokenFile file(tokens, config.vocabulary);
  auto net = make_stages(config, Weights(std::move(published.weights)), {},
                         std::vector<int64_t>{config.layers + 2}, std::vector<int>{0})
                 .front();
  const torch::NoGradGuard no_grad;
  net->eval();
  const auto ids = file.read(0, std::min(config.context, file.size()));
  lockstep::save_tensors(out, {{"logits", net->forward(ids.unsqueeze(0)).squeeze(0)}});
  return 0;
}

}  // namespace gpt2
