#include "lockstep/sync_batch_norm.hpp"

#include <fmt/format.h>
#include <torch/custom_class.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/torch.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "base/mutation.hpp"
#include "lockstep/error.hpp"
#include "lockstep/tensor_text.hpp"
#include "verify/step_recorder.hpp"

namespace lockstep {
namespace {

// The ranks that share statistics, and what this one's gradients count among them.
struct SharingRanks {
  std::shared_ptr<const Communicator> ranks;
  std::shared_ptr<const double> weight;
};

// The statistics of all ranks' rows, in the type that sums are made in.
struct BatchStatistics {
  torch::Tensor mean;      // [features]
  torch::Tensor variance;  // [features], biased
  torch::Tensor unbiased;  // [features]
  torch::Tensor count;     // values of a feature
};

// All dimensions but that of the features.
std::vector<int64_t> reduced_dims(const torch::Tensor& input) {
  std::vector<int64_t> dims = {0};
  for (int64_t dim = 2; dim < input.dim(); ++dim) dims.push_back(dim);
  return dims;
}

// [features] as it is broadcast over an input.
torch::Tensor along_features(const torch::Tensor& values, const torch::Tensor& input) {
  std::vector<int64_t> shape(static_cast<size_t>(input.dim()), 1);
  shape[1] = -1;
  return values.view(shape);
}

torch::ScalarType sum_type(const torch::Tensor& input) {
  return input.scalar_type() == torch::kFloat64 ? torch::kFloat64 : torch::kFloat32;
}

// Each rank sends mean, sum of squared deviations and count of its rows. They are combined as Chan,
// Golub and LeVeque do, which loses no digits where the mean is large.
BatchStatistics statistics_of_all(const torch::Tensor& input, const Communicator& ranks) {
  const int64_t features = input.size(1);
  const int64_t values = input.numel() / features;
  const auto sent = torch::zeros({2 * features + 1}, input.options().dtype(torch::kFloat64));
  if (values > 0) {
    const auto [variance, mean] =
        torch::var_mean(input.to(sum_type(input)), reduced_dims(input), /*unbiased=*/false);
    sent.narrow(0, 0, features).copy_(mean);
    sent.narrow(0, features, features).copy_(variance).mul_(values);
    sent[2 * features].fill_(values);
  }
  const auto all = torch::empty({ranks.size(), 2 * features + 1}, sent.options());
  ranks.all_gather(all, sent, {.label = "batch norm forward"});
  const auto means = all.narrow(1, 0, features);
  const auto counts = all.narrow(1, 2 * features, 1);
  const auto count = counts.sum();
  if (count.is_cpu() && count.item<double>() < 2) {
    throw Error(Code::kUsage,
                fmt::format("SyncBatchNorm got {:.0f} values of each feature on all ranks together",
                            count.item<double>()),
                "a batch norm needs at least 2 to train: give the ranks more rows");
  }
  const auto mean = (means * counts).sum(0) / count;
  const auto squares =
      (all.narrow(1, features, features) + counts * (means - mean).square()).sum(0);
  return {mean, squares / count, squares / (count - 1), count};
}

// What a recorded forward keeps for its backward.
struct KeptRanks : torch::CustomClassHolder {
  explicit KeptRanks(SharingRanks given) : sharing(std::move(given)) {}
  SharingRanks sharing;
};

// The mean multiplies this rank's gradients by 0, also those that its rows, being part of the
// statistics, have from other ranks' outputs.
[[noreturn]] void refuse_rows(const Communicator& ranks) {
  const std::string message =
      "SyncBatchNorm on a rank of weight 0 that has rows: their part in the "
      "statistics would have no gradient";
  ranks.abort(message);
  throw Error(Code::kUsage, message,
              "give it no rows; or leave the weights alike, and multiply each rank's loss by its "
              "share");
}

// Normalises with given statistics, which depend on the inputs of all ranks.
struct NormalizeOverRanks : torch::autograd::Function<NormalizeOverRanks> {
  static torch::Tensor forward(torch::autograd::AutogradContext* context,
                               const torch::Tensor& input, const torch::Tensor& weight,
                               const torch::Tensor& bias, const BatchStatistics& batch, double eps,
                               const SharingRanks& sharing) {
    const auto type = sum_type(input);
    const auto mean = batch.mean.to(type);
    const auto inverse = (batch.variance + eps).rsqrt().to(type);
    context->save_for_backward({input, weight, mean, inverse, batch.count.to(type)});
    context->saved_data["ranks"] =
        c10::IValue::make_capsule(c10::make_intrusive<KeptRanks>(sharing));
    const auto scale = inverse * weight.to(type);
    auto output = (input.to(type) - along_features(mean, input)).mul_(along_features(scale, input));
    output.add_(along_features(bias.to(type), input));
    return output.to(input.scalar_type());
  }

  // The statistics carry the gradient of every rank's output to every rank's input. The gradients
  // of weight and bias are this rank's, to be averaged like all others.
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    if (torch::GradMode::is_enabled()) {
      throw Error(Code::kEngine,
                  "SyncBatchNorm cannot be differentiated twice (create_graph = true)",
                  "use a plain BatchNorm for the part that needs second derivatives");
    }
    const auto saved = context->get_saved_variables();
    const auto& input = saved[0];
    const auto& weight = saved[1];
    const auto& mean = saved[2];
    const auto& inverse = saved[3];
    const auto& count = saved[4];
    const auto gradient = gradients[0].to(mean.scalar_type());
    const auto deviation = input.to(mean.scalar_type()) - along_features(mean, input);
    const auto dims = reduced_dims(input);
    const auto sums = torch::stack({gradient.sum(dims), (gradient * deviation).sum(dims)});
    torch::autograd::variable_list result(6);
    result[1] = (sums[1] * inverse).to(weight.scalar_type());
    result[2] = sums[0].to(weight.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
    const auto& [ranks, own_weight] =
        static_cast<KeptRanks&>(*context->saved_data["ranks"].toCapsule()).sharing;
    // The mean over ranks multiplies all that is computed here by this rank's weight, but a sum of
    // another rank's gradients must count by that rank's.
    sums.mul_(*own_weight);
    ranks->all_reduce(sums, ReduceOp::kSum, {.label = "batch norm backward"});
    if (*own_weight == 0 && ranks->size() > 1 && input.numel() > 0) refuse_rows(*ranks);
    if (*own_weight > 0) sums.div_(*own_weight);
    const auto means = sums / count;
    const auto scale = inverse * weight.to(mean.scalar_type());
    result[0] = (gradient - along_features(means[0], input) -
                 deviation * along_features(inverse.square() * means[1], input))
                    .mul_(along_features(scale, input))
                    .to(input.scalar_type());
    return result;
  }
};

}  // namespace

SyncBatchNormImpl::Tensors SyncBatchNormImpl::make_tensors(
    const torch::nn::BatchNormOptions& options) {
  Tensors tensors;
  if (options.affine()) {
    tensors.weight = torch::ones({options.num_features()}).requires_grad_();
    tensors.bias = torch::zeros({options.num_features()}).requires_grad_();
  }
  if (options.track_running_stats()) {
    tensors.running_mean = torch::zeros({options.num_features()});
    tensors.running_var = torch::ones({options.num_features()});
    tensors.num_batches_tracked = torch::zeros({}, torch::kInt64);
  }
  return tensors;
}

SyncBatchNormImpl::SyncBatchNormImpl(const torch::nn::BatchNormOptions& given,
                                     const Communicator& ranks)
    : SyncBatchNormImpl(given, ranks, make_tensors(given)) {}

SyncBatchNormImpl::SyncBatchNormImpl(const torch::nn::BatchNormOptions& given,
                                     const Communicator& ranks, const Tensors& tensors)
    : torch::nn::Module("SyncBatchNorm"),
      options(given),
      ranks_(std::make_shared<Communicator>(ranks)) {
  const auto parameter = [this](const char* name, const torch::Tensor& tensor) {
    return register_parameter(name, tensor, tensor.defined() && tensor.requires_grad());
  };
  weight = parameter("weight", tensors.weight);
  bias = parameter("bias", tensors.bias);
  running_mean = register_buffer("running_mean", tensors.running_mean);
  running_var = register_buffer("running_var", tensors.running_var);
  num_batches_tracked = register_buffer("num_batches_tracked", tensors.num_batches_tracked);
  if (auto* recorder = StepRecorder::of_process()) recorder->note_kind("sync_batch_norm");
}

void SyncBatchNormImpl::reset_running_stats() {
  if (!running_mean.defined()) return;
  running_mean.zero_();
  running_var.fill_(1);
  num_batches_tracked.zero_();
}

void SyncBatchNormImpl::require_input(const torch::Tensor& input) const {
  if (input.dim() >= 2 && input.dim() <= 5 && input.size(1) == options.num_features()) return;
  throw Error(
      Code::kTensorMismatch,
      fmt::format("SyncBatchNorm of {} features got an input of shape {}", options.num_features(),
                  shape_text(input.sizes())),
      fmt::format("an input is [rows, {}, ...], of 2 to 5 dimensions", options.num_features()));
}

// How much this batch counts in the running statistics: the momentum, or without one as much as
// each batch before.
double SyncBatchNormImpl::next_factor() {
  num_batches_tracked += 1;
  if (options.momentum()) return *options.momentum();
  return 1.0 / num_batches_tracked.item<double>();
}

torch::Tensor SyncBatchNormImpl::forward(const torch::Tensor& input) {
  require_input(input);
  if (!is_training()) {
    return torch::batch_norm(input, weight, bias, running_mean, running_var,
                             /*training=*/!running_mean.defined(), /*momentum=*/0, options.eps(),
                             /*cudnn_enabled=*/false);
  }
  BatchStatistics batch;
  {
    const torch::NoGradGuard no_grad;
    batch = statistics_of_all(input.detach(), *ranks_);
    if (running_mean.defined()) {
      const double factor = next_factor();
      running_mean.mul_(1 - factor).add_(batch.mean.to(running_mean.scalar_type()), factor);
      running_var.mul_(1 - factor).add_(batch.unbiased.to(running_var.scalar_type()), factor);
    }
  }
  // Autograd's functions take no undefined tensors.
  return NormalizeOverRanks::apply(input, weight.defined() ? weight : torch::ones_like(batch.mean),
                                   bias.defined() ? bias : torch::zeros_like(batch.mean), batch,
                                   options.eps(), SharingRanks{ranks_, gradient_weight_});
}

void SyncBatchNormImpl::pretty_print(std::ostream& stream) const {
  stream << fmt::format(
      "lockstep::SyncBatchNorm({}, eps={}, affine={}, track_running_stats={}, {} ranks)",
      options.num_features(), options.eps(), options.affine(), options.track_running_stats(),
      ranks_->size());
}

/// Which batch norms a module tree has, and where.
class BatchNormConversion {
 public:
  void find(torch::nn::Module& module, const std::string& path) {
    auto* sequential = dynamic_cast<torch::nn::SequentialImpl*>(&module);
    size_t index = 0;
    for (const auto& child : module.named_children()) {
      const std::string name = path.empty() ? child.key() : path + "." + child.key();
      if (!is_batch_norm(*child.value())) {
        find(*child.value(), name);
      } else if (sequential == nullptr) {
        refuse(*child.value(), name, module);
      } else {
        children_.push_back({sequential, index, child.key(), child.value()});
      }
      ++index;
    }
  }

  void replace(const Communicator& ranks) {
    if (children_.empty()) return;
    const Communicator own = ranks.split(0, ranks.rank(), "batch norm");
    std::map<torch::nn::Module*, SyncBatchNorm> made;  // one that is used twice stays one
    for (const auto& [parent, index, key, batch_norm] : children_) {
      auto& synced = made.try_emplace(batch_norm.get(), nullptr).first->second;
      if (!synced) synced = converted(*batch_norm, own);
      *(parent->begin() + static_cast<ptrdiff_t>(index)) = torch::nn::AnyModule(synced);
      parent->replace_module(key, synced.ptr());
    }
  }

  static bool is_batch_norm(const torch::nn::Module& module) {
    return module.as<torch::nn::BatchNorm1d>() != nullptr ||
           module.as<torch::nn::BatchNorm2d>() != nullptr ||
           module.as<torch::nn::BatchNorm3d>() != nullptr;
  }

 private:
  struct Child {
    torch::nn::SequentialImpl* parent;
    size_t index;
    std::string key;
    std::shared_ptr<torch::nn::Module> batch_norm;
  };

  [[noreturn]] static void refuse(const torch::nn::Module& batch_norm, const std::string& path,
                                  const torch::nn::Module& parent) {
    throw Error(Code::kReplicate,
                fmt::format("{} '{}' is a member of {}, which calls it by its type: it cannot be "
                            "replaced by a SyncBatchNorm",
                            batch_norm.name(), path, parent.name()),
                "declare the member as lockstep::SyncBatchNorm, or put it into a Sequential");
  }

  template <class BatchNorm>
  static SyncBatchNorm converted_from(const BatchNorm& norm, const Communicator& ranks) {
    SyncBatchNorm synced(std::shared_ptr<SyncBatchNormImpl>(new SyncBatchNormImpl(
        norm.options, ranks,
        {norm.weight, norm.bias, norm.running_mean, norm.running_var, norm.num_batches_tracked})));
    synced->train(norm.is_training());
    return synced;
  }

  static SyncBatchNorm converted(const torch::nn::Module& module, const Communicator& ranks) {
    if (const auto* norm = module.as<torch::nn::BatchNorm1d>()) return converted_from(*norm, ranks);
    if (const auto* norm = module.as<torch::nn::BatchNorm2d>()) return converted_from(*norm, ranks);
    return converted_from(*module.as<torch::nn::BatchNorm3d>(), ranks);
  }

  std::vector<Child> children_;
};

void set_gradient_weight(const torch::nn::Module& module, double weight) {
  if (is_planted(Mutation::kSyncNormUnweighted)) return;
  for (const auto& each : module.modules(/*include_self=*/false)) {
    if (auto* norm = each->as<SyncBatchNorm>()) norm->set_gradient_weight(weight);
  }
  const auto* itself = module.as<SyncBatchNorm>();
  if (itself != nullptr) const_cast<SyncBatchNormImpl*>(itself)->set_gradient_weight(weight);
}

void convert_sync_batchnorm(torch::nn::Module& module, const Communicator& ranks) {
  if (BatchNormConversion::is_batch_norm(module)) {
    throw Error(Code::kReplicate, module.name() + " is a batch norm itself and has no parts",
                "make a lockstep::SyncBatchNorm in its place");
  }
  BatchNormConversion conversion;
  conversion.find(module, "");
  conversion.replace(ranks);
}

}  // namespace lockstep
