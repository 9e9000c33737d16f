#include "course/divided_layers.hpp"

#include <torch/torch.h>

#include <utility>

namespace course {
namespace {

void append(std::vector<Trained>& all, std::vector<Trained> more) {
  for (auto& each : more) all.push_back(std::move(each));
}

// The MLP of a block: Linear, activation, Linear.
DividedPair divide_mlp(const torch::nn::Sequential& mlp, const lockstep::Communicator& axis) {
  const auto layers = mlp->begin();
  return DividedPair(layers[0].get<torch::nn::Linear>(), layers[1],
                     layers[2].get<torch::nn::Linear>(), axis);
}

}  // namespace

std::vector<Trained> trained_in_place(const torch::nn::Module& module) {
  std::vector<Trained> trained;
  for (const auto& parameter : module.parameters()) trained.push_back({parameter});
  return trained;
}

DividedPairImpl::DividedPairImpl(const torch::nn::Linear& whole_up,
                                 torch::nn::AnyModule given_activation,
                                 const torch::nn::Linear& whole_down,
                                 const lockstep::Communicator& axis)
    : up(whole_up, axis), activation(std::move(given_activation)), down(whole_down, axis) {
  register_module("up", up);
  register_module("down", down);
  trained = trained_in_parts(whole_up, up);
  append(trained, trained_in_parts(whole_down, down));
}

torch::Tensor DividedPairImpl::forward(const torch::Tensor& x) {
  return down(activation.forward(up(x)));
}

DividedBlockImpl::DividedBlockImpl(const TransformerBlockImpl& whole,
                                   const lockstep::Communicator& axis)
    : own_heads(heads_of(whole.width) / axis.size()),
      norm1(whole.norm1),
      norm2(whole.norm2),
      qkv(whole.attention->qkv, axis, {.parts = 3}),
      out(whole.attention->out, axis),
      mlp(divide_mlp(whole.mlp, axis)) {
  register_module("norm1", norm1);
  register_module("qkv", qkv);
  register_module("out", out);
  register_module("norm2", norm2);
  register_module("mlp", mlp);
  append(trained, trained_in_place(*norm1));
  append(trained, trained_in_parts(whole.attention->qkv, qkv));
  append(trained, trained_in_parts(whole.attention->out, out));
  append(trained, trained_in_place(*norm2));
  append(trained, mlp->trained);
}

torch::Tensor DividedBlockImpl::forward(const torch::Tensor& x) {
  const auto attended = x + out(causal_attention(qkv(norm1(x)), own_heads));
  return attended + mlp(norm2(attended));
}

}  // namespace course
