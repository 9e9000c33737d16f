#include "course/mlp.hpp"

#include <fmt/format.h>
#include <torch/torch.h>

#include "lockstep/device.hpp"
#include "lockstep/tensor_text.hpp"

namespace course {
namespace {

// From inside the model: where this replica runs and what it sees.
void print_shapes(const torch::Tensor& x, const torch::Tensor& out) {
  const auto* device = lockstep::current_device();
  fmt::print("inside the model on {}: input {} output {}\n",
             device != nullptr ? device->name() : "the host", lockstep::shape_text(x.sizes()),
             lockstep::shape_text(out.sizes()));
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
  if (options.print_shapes && !shapes_printed) {
    print_shapes(x, out);
    shapes_printed = true;
  }
  return out;
}

}  // namespace course
