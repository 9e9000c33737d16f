#include "course/model.hpp"

#include <fmt/format.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <mutex>

#include "lockstep/device.hpp"
#include "lockstep/error.hpp"
#include "lockstep/tensor_text.hpp"

namespace course {
namespace {

using lockstep::Code;
using lockstep::Error;

// Called inside the model: says where this replica runs and what it sees.
void note_shapes(const torch::Tensor& x, const torch::Tensor& out, const Options& options) {
  const auto* device = lockstep::current_device();
  const std::string name = device != nullptr ? device->name() : "the host";
  const std::lock_guard lock(options.shapes->mutex);
  options.shapes->replicas.push_back({name, x.sizes().vec(), out.sizes().vec()});
  if (options.quiet) return;
  fmt::print(options.out(), "inside the model on {}: input {} output {}\n", name,
             lockstep::shape_text(x.sizes()), lockstep::shape_text(out.sizes()));
}

torch::nn::LayerNorm layer_norm(int64_t width) {
  return torch::nn::LayerNorm(torch::nn::LayerNormOptions({width}));
}

}  // namespace

MlpImpl::MlpImpl(const Options& given) : options(given) {
  reset();
}

void MlpImpl::reset() {
  layers = torch::nn::Sequential();
  layers->push_back(torch::nn::Linear(options.dim, options.hidden));
  layers->push_back(torch::nn::ReLU());
  for (int64_t i = 0; i < options.depth; ++i) {
    layers->push_back(torch::nn::Linear(options.hidden, options.hidden));
    layers->push_back(torch::nn::ReLU());
  }
  layers->push_back(torch::nn::Linear(options.hidden, options.dim));
  register_module("layers", layers);
}

torch::Tensor MlpImpl::forward(const torch::Tensor& x) {
  const torch::Tensor out = layers->forward(x);
  if (options.shapes != nullptr && !shapes_noted) {
    note_shapes(x, out, options);
    shapes_noted = true;
  }
  return out;
}

std::string describe_model(const Options& options) {
  if (options.model == "transformer") {
    return fmt::format(
        "transformer of {} block{}, {} wide with {} head{}; a row of {} values is {} positions",
        options.depth, options.depth == 1 ? "" : "s", options.hidden, heads_of(options.hidden),
        heads_of(options.hidden) == 1 ? "" : "s", options.dim, kPositions);
  }
  return fmt::format("mlp of {} linear layers with ReLU between: {} inputs, {} hidden, {} outputs",
                     options.depth + 2, options.dim, options.hidden, options.dim);
}

int64_t heads_of(int64_t width) {
  return std::max<int64_t>(1, width / kHeadWidth);
}

void require_transformer_sizes(const Options& options) {
  const auto next_multiple = [](int64_t value, int64_t of) { return (value + of - 1) / of * of; };
  if (options.dim % kPositions != 0) {
    throw Error(
        Code::kUsage,
        fmt::format("--dim {} does not fit --model transformer, which reads a row as {} positions",
                    options.dim, kPositions),
        fmt::format("give a multiple of {}, such as {}", kPositions,
                    next_multiple(options.dim, kPositions)));
  }
  if (options.hidden > kHeadWidth && options.hidden % kHeadWidth != 0) {
    throw Error(Code::kUsage,
                fmt::format("--hidden {} does not fit --model transformer, whose heads are {} wide",
                            options.hidden, kHeadWidth),
                fmt::format("give a multiple of {0}, such as {1}, or {0} at most for one head",
                            kHeadWidth, next_multiple(options.hidden, kHeadWidth)));
  }
  if (options.depth < 1) {
    throw Error(Code::kUsage, "--depth 0 leaves --model transformer without a block",
                "give --depth 1 or more");
  }
}

torch::Tensor causal_attention(const torch::Tensor& qkv, int64_t heads) {
  const int64_t batch = qkv.size(0);
  const int64_t positions = qkv.size(1);
  const int64_t head_width = qkv.size(2) / (3 * heads);
  // [3, batch, heads, positions, head_width]
  const auto parts =
      qkv.view({batch, positions, 3, heads, head_width}).permute({2, 0, 3, 1, 4}).unbind(0);
  const auto& query = parts[0];
  const auto& key = parts[1];
  const auto& value = parts[2];
  const auto later = torch::ones({positions, positions}, qkv.options().dtype(torch::kBool)).triu(1);
  const auto scores =
      query.matmul(key.transpose(2, 3)) / std::sqrt(static_cast<double>(head_width));
  const auto weights =
      torch::softmax(scores.masked_fill(later, -std::numeric_limits<float>::infinity()), -1);
  return weights.matmul(value).transpose(1, 2).reshape({batch, positions, heads * head_width});
}

CausalSelfAttentionImpl::CausalSelfAttentionImpl(int64_t given_width) : width(given_width) {
  reset();
}

void CausalSelfAttentionImpl::reset() {
  qkv = register_module("qkv", torch::nn::Linear(width, 3 * width));
  out = register_module("out", torch::nn::Linear(width, width));
}

torch::Tensor CausalSelfAttentionImpl::forward(const torch::Tensor& x) {
  return out(causal_attention(qkv(x), heads_of(width)));
}

TransformerBlockImpl::TransformerBlockImpl(int64_t given_width) : width(given_width) {
  reset();
}

void TransformerBlockImpl::reset() {
  norm1 = register_module("norm1", layer_norm(width));
  attention = register_module("attention", CausalSelfAttention(width));
  norm2 = register_module("norm2", layer_norm(width));
  mlp = register_module(
      "mlp", torch::nn::Sequential(torch::nn::Linear(width, 4 * width), torch::nn::GELU(),
                                   torch::nn::Linear(4 * width, width)));
}

torch::Tensor TransformerBlockImpl::forward(const torch::Tensor& x) {
  const auto attended = x + attention(norm1(x));
  return attended + mlp->forward(norm2(attended));
}

TransformerImpl::TransformerImpl(const Options& given) : options(given) {
  require_transformer_sizes(options);
  reset();
}

void TransformerImpl::reset() {
  const int64_t width = options.hidden;
  input = register_module("input", torch::nn::Linear(options.dim / kPositions, width));
  positions = register_parameter("positions", 0.02 * torch::randn({kPositions, width}));
  blocks = register_module("blocks", torch::nn::ModuleList());
  for (int64_t i = 0; i < options.depth; ++i) blocks->push_back(TransformerBlock(width));
  norm = register_module("norm", layer_norm(width));
  output = register_module("output", torch::nn::Linear(width, options.dim / kPositions));
}

torch::Tensor TransformerImpl::forward(const torch::Tensor& x) {
  auto stream = input(x.reshape({x.size(0), kPositions, -1})) + positions;
  for (const auto& block : *blocks) stream = block->as<TransformerBlockImpl>()->forward(stream);
  return output(norm(stream)).reshape(x.sizes());
}

ModelImpl::ModelImpl(const Options& options) {
  if (options.model == "transformer") {
    adopt(std::make_shared<TransformerImpl>(options));
  } else {
    adopt(std::make_shared<MlpImpl>(options));
  }
}

template <class Net>
void ModelImpl::adopt(const std::shared_ptr<Net>& net) {
  for (const auto& own : net->named_parameters(/*recurse=*/false)) {
    register_parameter(own.key(), own.value(), own.value().requires_grad());
  }
  for (const auto& own : net->named_buffers(/*recurse=*/false)) {
    register_buffer(own.key(), own.value());
  }
  for (const auto& child : net->named_children()) register_module(child.key(), child.value());
  forward_ = [net](const torch::Tensor& x) { return net->forward(x); };
}

}  // namespace course
