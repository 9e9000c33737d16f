#include "course/layers.hpp"

#include <fmt/format.h>
#include <torch/torch.h>

#include <memory>
#include <numeric>
#include <string>
#include <utility>

#include "course/course.hpp"
#include "lockstep/error.hpp"
#include "lockstep/memory.hpp"
#include "lockstep/tensor_parallel.hpp"
#include "lockstep/verify.hpp"

namespace course {
namespace {

using lockstep::Code;
using lockstep::Error;
using Trained = Layers::Trained;

void append(std::vector<Trained>& all, std::vector<Trained> more) {
  for (auto& each : more) all.push_back(std::move(each));
}

// All parameters of a module of the whole model, trained in place.
std::vector<Trained> trained_in_place(const torch::nn::Module& module) {
  std::vector<Trained> trained;
  for (const auto& parameter : module.parameters()) trained.push_back({parameter, parameter});
  return trained;
}

// The parameters of a Linear that `divided`, a ColumnLinear or RowLinear, trains in its place.
template <class Divided>
std::vector<Trained> trained_in_parts(const torch::nn::Linear& whole, const Divided& divided) {
  std::vector<Trained> trained = {
      {whole->weight, divided->weight, [divided] { return divided->whole_weight(); }}};
  if (whole->bias.defined()) {
    trained.push_back({whole->bias, divided->bias, [divided] { return divided->whole_bias(); }});
  }
  return trained;
}

// Linear, activation, Linear, with the features between them divided over the ranks.
struct DividedPairImpl : torch::nn::Module {
  DividedPairImpl(const torch::nn::Linear& whole_up, torch::nn::AnyModule given_activation,
                  const torch::nn::Linear& whole_down, const lockstep::Communicator& axis);
  torch::Tensor forward(const torch::Tensor& x);

  lockstep::ColumnLinear up;
  torch::nn::AnyModule activation;
  lockstep::RowLinear down;
  std::vector<Trained> trained;
};
TORCH_MODULE(DividedPair);

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

// The MLP of a block: Linear, activation, Linear.
DividedPair divide_mlp(const torch::nn::Sequential& mlp, const lockstep::Communicator& axis) {
  const auto layers = mlp->begin();
  return DividedPair(layers[0].get<torch::nn::Linear>(), layers[1],
                     layers[2].get<torch::nn::Linear>(), axis);
}

// A TransformerBlock with its heads and the features of its MLP divided over the ranks. The norms
// are those of the whole block: their gradients are the same on all ranks.
struct DividedBlockImpl : torch::nn::Module {
  DividedBlockImpl(const TransformerBlockImpl& whole, const lockstep::Communicator& axis);
  torch::Tensor forward(const torch::Tensor& x);

  int64_t own_heads;
  torch::nn::LayerNorm norm1, norm2;
  lockstep::ColumnLinear qkv;
  lockstep::RowLinear out;
  DividedPair mlp;
  std::vector<Trained> trained;
};
TORCH_MODULE(DividedBlock);

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

// The part of a transformer before its blocks: the net's own modules under their own names.
struct TransformerInputImpl : torch::nn::Module {
  TransformerInputImpl(torch::nn::Linear given_input, const torch::Tensor& given_positions)
      : input(std::move(given_input)) {
    register_module("input", input);
    positions = register_parameter("positions", given_positions, given_positions.requires_grad());
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return input(x.reshape({x.size(0), kPositions, -1})) + positions;
  }

  torch::nn::Linear input;
  torch::Tensor positions;
};

// The part after its blocks.
struct TransformerOutputImpl : torch::nn::Module {
  TransformerOutputImpl(torch::nn::LayerNorm given_norm, torch::nn::Linear given_output)
      : norm(std::move(given_norm)), output(std::move(given_output)) {
    register_module("norm", norm);
    register_module("output", output);
  }
  torch::Tensor forward(const torch::Tensor& stream) {
    return output(norm(stream)).reshape({stream.size(0), -1});
  }

  torch::nn::LayerNorm norm;
  torch::nn::Linear output;
};

template <class Impl>
std::shared_ptr<Impl> part(const Model& net, const std::string& name) {
  return std::dynamic_pointer_cast<Impl>(net->named_children()[name]);
}

void require_stages(std::span<const int64_t> layers_per_stage, size_t layers) {
  const int64_t cut = std::accumulate(layers_per_stage.begin(), layers_per_stage.end(), int64_t{0});
  if (cut == static_cast<int64_t>(layers)) return;
  throw Error(Code::kStageMismatch,
              fmt::format("the stages have {} layer{} together, but the model has {}", cut,
                          cut == 1 ? "" : "s", layers),
              "give the layers per stage that the model was cut by");
}

void require_ranks(std::span<const int> rank_of_stage, size_t stages, int ranks) {
  if (rank_of_stage.size() != stages) {
    throw Error(Code::kStageMismatch,
                fmt::format("{} rank{} given for {} stages", rank_of_stage.size(),
                            rank_of_stage.size() == 1 ? " was" : "s were", stages),
                "give the rank_of_stage of the schedule that was run");
  }
  for (const int rank : rank_of_stage) {
    if (rank >= 0 && rank < ranks) continue;
    throw Error(Code::kStageMismatch,
                fmt::format("a stage is on rank {} of a pipeline axis of {} ranks", rank, ranks),
                "give the axis that the pipeline was made on");
  }
}

}  // namespace

void require_tensor_parallel_sizes(const Options& options, int64_t tensor_parallel) {
  const bool transformer = options.model == "transformer";
  const int64_t heads = heads_of(options.hidden);
  const int64_t divided = transformer ? heads : options.hidden;
  if (divided % tensor_parallel == 0) return;
  const int64_t unit = tensor_parallel * (transformer ? kHeadWidth : 1);
  const int64_t fitting = (options.hidden + unit - 1) / unit * unit;
  const std::string what = transformer ? fmt::format("the {} head{} of --hidden {}", heads,
                                                     heads == 1 ? "" : "s", options.hidden)
                                       : fmt::format("--hidden {}", options.hidden);
  throw Error(Code::kUsage,
              fmt::format("{} cannot be divided over {} ranks of tensor parallelism", what,
                          tensor_parallel),
              fmt::format("give --hidden a multiple of {}, such as {}, or use another number of "
                          "ranks",
                          unit, fitting));
}

int64_t count_layers(const Options& options, int64_t tensor_parallel) {
  if (options.model == "transformer") return options.depth + 2;
  const int64_t linear = options.depth + 2;
  const int64_t units = tensor_parallel == 1 ? linear : (linear + 1) / 2;  // single, or in pairs
  return 2 * units - 1;                                                    // a ReLU between them
}

Layers::Layers(const Options& options, const lockstep::Communicator& tensor_axis)
    : tensor_axis_(tensor_axis), net_(nullptr), layers_(nullptr) {
  require_tensor_parallel_sizes(options, tensor_axis_.size());
  const lockstep::ChargeHost host;
  torch::manual_seed(static_cast<uint64_t>(options.seed));
  net_ = Model(options);
  load_initial_weights(*net_, options);
  layers_ = torch::nn::Sequential();
  if (options.model == "transformer") {
    cut_transformer();
  } else {
    cut_mlp();
  }
  name_parameters();
}

template <class Layer>
void Layers::add(Layer layer, std::vector<Trained> trained) {
  layers_->push_back(std::move(layer));
  trained_.push_back(std::move(trained));
}

void Layers::cut_mlp() {
  const auto whole = part<torch::nn::SequentialImpl>(net_, "layers");
  if (tensor_axis_.size() == 1) {
    for (const auto& layer : *whole) add(layer, trained_in_place(*layer.ptr()));
    return;
  }
  // Linear layers are at even positions; a pair takes two and the activation between them.
  const auto layers = whole->begin();
  const auto linear = [&](size_t at) {
    return layers[static_cast<std::ptrdiff_t>(at)].template get<torch::nn::Linear>();
  };
  size_t at = 0;
  for (; at + 2 < whole->size(); at += 4) {
    const DividedPair pair(linear(at), layers[static_cast<std::ptrdiff_t>(at) + 1], linear(at + 2),
                           tensor_axis_);
    add(pair, pair->trained);
    if (at + 3 < whole->size()) add(layers[static_cast<std::ptrdiff_t>(at) + 3], {});
  }
  if (at < whole->size()) {
    const lockstep::RowLinear last(linear(at), tensor_axis_, {.scatter_input = true});
    add(last, trained_in_parts(linear(at), last));
  }
}

void Layers::cut_transformer() {
  const auto input = std::make_shared<TransformerInputImpl>(
      part<torch::nn::LinearImpl>(net_, "input"), net_->named_parameters(false)["positions"]);
  add(input, trained_in_place(*input));
  for (const auto& each : *part<torch::nn::ModuleListImpl>(net_, "blocks")) {
    const auto block = std::dynamic_pointer_cast<TransformerBlockImpl>(each);
    if (tensor_axis_.size() == 1) {
      add(block, trained_in_place(*block));
    } else {
      const DividedBlock divided(*block, tensor_axis_);
      add(divided, divided->trained);
    }
  }
  const auto output = std::make_shared<TransformerOutputImpl>(
      part<torch::nn::LayerNormImpl>(net_, "norm"), part<torch::nn::LinearImpl>(net_, "output"));
  add(output, trained_in_place(*output));
}

// However the model is cut, `lockstep verify` compares its parameters under the names of net().
void Layers::name_parameters() const {
  for (const auto& item : net_->named_parameters()) {
    for (const auto& layer : trained_) {
      for (const auto& each : layer) {
        if (each.whole.is_same(item.value())) lockstep::verify_name(each.own, item.key());
      }
    }
  }
}

void Layers::separate_stages(std::span<const int64_t> layers_per_stage) {
  require_stages(layers_per_stage, layers_->size());
  if (tensor_axis_.size() == 1) return;
  std::vector<lockstep::Communicator> axes;
  size_t layer = 0;
  for (size_t stage = 0; stage < layers_per_stage.size(); ++stage) {
    axes.push_back(
        tensor_axis_.split(0, tensor_axis_.rank(), fmt::format("tp of stage {}", stage)));
    for (int64_t i = 0; i < layers_per_stage[stage]; ++i, ++layer) {
      lockstep::set_tensor_axis(*layers_->ptr(layer), axes.back());
    }
  }
  stage_axes_ = std::move(axes);
}

void Layers::collect(const lockstep::Communicator& pipeline_axis,
                     std::span<const int64_t> layers_per_stage,
                     std::span<const int> rank_of_stage) {
  const torch::NoGradGuard no_grad;
  require_stages(layers_per_stage, layers_->size());
  const bool all_here = pipeline_axis.size() == 1;
  if (!all_here) require_ranks(rank_of_stage, layers_per_stage.size(), pipeline_axis.size());
  size_t layer = 0;
  for (size_t stage = 0; stage < layers_per_stage.size(); ++stage) {
    const int owner = all_here ? 0 : rank_of_stage[stage];
    for (int64_t i = 0; i < layers_per_stage[stage]; ++i, ++layer) {
      for (const auto& [whole, own, gather] : trained_[layer]) {
        if (owner == pipeline_axis.rank() && gather) whole.copy_(gather());
        if (!all_here) pipeline_axis.broadcast(whole, owner, {.label = "trained weights"});
      }
    }
  }
}

lockstep::CommStats Layers::tensor_traffic() const {
  if (stage_axes_.empty()) return tensor_axis_.stats();
  lockstep::CommStats all;
  for (const auto& axis : stage_axes_) {
    const auto one = axis.stats();
    all.calls += one.calls;
    all.all_reduces += one.all_reduces;
    all.all_reduce_bytes += one.all_reduce_bytes;
    all.sent_bytes += one.sent_bytes;
    all.received_bytes += one.received_bytes;
    all.inside_ns += one.inside_ns;
  }
  return all;
}

}  // namespace course
