#include "gradients/sparse_gradients.hpp"

#include <torch/nn/modules/embedding.h>
#include <torch/torch.h>

#include <unordered_set>

#include "lockstep/error.hpp"

namespace lockstep {

ParametersByGradient by_gradient(const torch::nn::Module& module,
                                 const std::vector<TrainedParameter>& trained) {
  std::unordered_set<const c10::TensorImpl*> tables;
  for (const auto& each : module.modules(/*include_self=*/true)) {
    if (const auto* table = each->as<torch::nn::Embedding>()) {
      if (table->options.sparse()) tables.insert(table->weight.unsafeGetTensorImpl());
    } else if (const auto* bag = each->as<torch::nn::EmbeddingBag>()) {
      if (bag->options.sparse()) tables.insert(bag->weight.unsafeGetTensorImpl());
    }
  }
  ParametersByGradient result;
  for (const auto& parameter : trained) {
    const bool sparse = tables.count(parameter.tensor.unsafeGetTensorImpl()) > 0;
    (sparse ? result.sparse : result.dense).push_back(parameter);
  }
  return result;
}

void SparseGradients::average(double weight) const {
  if (empty()) return;
  const torch::NoGradGuard no_grad;
  const auto total = torch::full({1}, weight, torch::kFloat64);
  comm_.all_reduce(total, ReduceOp::kSum, {.label = "weights of sparse gradients"});
  const double sum = total.item<double>();
  if (sum == 0) {
    throw Error(Code::kUsage, "the weights of all ranks are zero in a mean of sparse gradients",
                "give at least one rank a weight; a weight is usually its number of rows");
  }
  for (const auto& parameter : parameters_) average(parameter, weight / sum);
}

// Added in the order of the ranks on every rank, so that all have the same bits.
void SparseGradients::average(const TrainedParameter& parameter, double factor) const {
  const torch::Tensor& tensor = parameter.tensor;
  torch::Tensor gradient = tensor.grad();
  const bool has_gradient = gradient.defined();
  if (!has_gradient) {
    std::vector<int64_t> no_rows = tensor.sizes().vec();
    no_rows[0] = 0;
    gradient = torch::sparse_coo_tensor(torch::empty({1, 0}, tensor.options().dtype(torch::kInt64)),
                                        torch::empty(no_rows, tensor.options()), tensor.sizes());
  }
  gradient = gradient.coalesce();
  const std::string label = parameter.name.substr(0, 31);
  const auto indices = comm_.all_gather(gradient.indices().contiguous(), {.label = label});
  const auto values = comm_.all_gather((gradient.values() * factor).contiguous(), {.label = label});
  const auto all = torch::cat(indices, 1);
  if (all.numel() == 0 && !has_gradient) return;  // another rank may have an empty one: it stays
  tensor.mutable_grad() =
      torch::sparse_coo_tensor(all, torch::cat(values), tensor.sizes()).coalesce();
}

}  // namespace lockstep
