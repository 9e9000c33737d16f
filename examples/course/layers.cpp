#include "course/layers.hpp"

#include <fmt/format.h>
#include <torch/torch.h>

#include <memory>
#include <numeric>
#include <string>
#include <utility>

#include "course/setup.hpp"
#include "course/transformer.hpp"
#include "lockstep/error.hpp"

namespace course {
namespace {

using lockstep::Code;
using lockstep::Error;

// What stands before a transformer's blocks: its own parts under their own names.
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

// What comes after them.
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
              fmt::format("{} stages have {} layers together, but the model has {}",
                          layers_per_stage.size(), cut, layers),
              "give the layers per stage that the model was cut by");
}

void require_places(std::span<const int> place_of_stage, size_t stages, int places) {
  if (place_of_stage.size() != stages) {
    throw Error(Code::kStageMismatch,
                fmt::format("{} places were given for {} stages", place_of_stage.size(), stages),
                "give the place_of_stage of the schedule that was run");
  }
  for (const int place : place_of_stage) {
    if (place >= 0 && place < places) continue;
    throw Error(
        Code::kStageMismatch,
        fmt::format("a stage lies on place {} of a pipeline axis of {} ranks", place, places),
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
  const int64_t units = tensor_parallel == 1 ? linear : (linear + 1) / 2;  // alone, or in pairs
  return 2 * units - 1;                                                    // a ReLU between them
}

Layers::Layers(const Options& options, const lockstep::Communicator& tensor_axis)
    : tensor_axis_(tensor_axis), net_(nullptr), layers_(nullptr) {
  require_tensor_parallel_sizes(options, tensor_axis_.size());
  torch::manual_seed(static_cast<uint64_t>(options.seed));
  net_ = Model(options);
  load_initial_weights(*net_, options);
  layers_ = torch::nn::Sequential();
  if (options.model == "transformer") {
    cut_transformer();
  } else {
    cut_mlp();
  }
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
                     std::span<const int> place_of_stage) {
  const torch::NoGradGuard no_grad;
  require_stages(layers_per_stage, layers_->size());
  const bool all_here = pipeline_axis.size() == 1;
  if (!all_here) require_places(place_of_stage, layers_per_stage.size(), pipeline_axis.size());
  size_t layer = 0;
  for (size_t stage = 0; stage < layers_per_stage.size(); ++stage) {
    const int owner = all_here ? 0 : place_of_stage[stage];
    for (int64_t i = 0; i < layers_per_stage[stage]; ++i, ++layer) {
      for (const auto& [whole, gather] : trained_[layer]) {
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
