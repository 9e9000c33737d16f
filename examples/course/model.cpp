#include "course/model.hpp"

#include <torch/torch.h>

#include "course/mlp.hpp"
#include "course/transformer.hpp"

namespace course {

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
