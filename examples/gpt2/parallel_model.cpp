#include "parallel_model.hpp"

#include <fmt/format.h>
#include <torch/torch.h>

#include <algorithm>
#include <numeric>
#include <set>

namespace gpt2 {
namespace {

using lockstep::Code;
using lockstep::Communicator;
using lockstep::Error;

Division division_of(const Layout& layout, const lockstep::Mesh& mesh) {
  return {mesh.axis("tp"), layout.sequence_parallel && layout.tensor_parallel > 1};
}

std::vector<NamedParameter> named(const torch::nn::Module& module) {
  std::vector<NamedParameter> all;
  for (const auto& item : module.named_parameters()) all.push_back({item.key(), item.value()});
  return all;
}

std::vector<NamedParameter> named(const lockstep::ShardedModel& model) {
  std::vector<NamedParameter> shards;
  for (const auto& [name, shard] : model.named_shards()) shards.push_back({name, shard});
  return shards;
}

// Copies: the parameters are whole only here.
lockstep::TensorMap whole_copies(lockstep::ShardedModel& model) {
  const lockstep::GatheredParameters gathered(model);
  auto all = lockstep::whole_parameters(*model.module());
  for (auto& [name, whole] : all) whole = whole.clone();
  return all;
}

int64_t count_targets(const torch::Tensor& y) {
  return y.ne(kIgnored).sum().item<int64_t>();
}

using Ddp = lockstep::DistributedDataParallel<torch::nn::SequentialImpl>;
using Fsdp = lockstep::FullyShardedDataParallel<torch::nn::SequentialImpl>;

// The whole model on each data rank, or on the ranks of a tensor axis, under `Wrapper`.
template <class Wrapper, class WrapperOptions>
class WrappedModel : public ParallelModel {
 public:
  WrappedModel(const Config& config, const Weights& weights, const Layout& layout,
               const lockstep::Mesh& mesh, lockstep::Device& device, bool autocast,
               const WrapperOptions& options)
      : config_(config),
        division_(division_of(layout, mesh)),
        device_(device.torch_device()),
        autocast_(autocast),
        in_parts_(options.virtual_shards > 0),
        net_(make_net(config, weights, division_, device_)),
        wrapper_(net_, mesh.axis("dp"), options) {}

  double accumulate(const std::vector<Batch>& parts) override {
    net_->train();
    double sum = 0;
    for (size_t i = 0; i < parts.size(); ++i) {
      std::optional<lockstep::NoSync> no_sync;
      if (i + 1 < parts.size()) no_sync.emplace(wrapper_);
      const auto share_of = [&](const torch::Tensor& x, const torch::Tensor& y) {
        return loss_of_batch({x, y}) / static_cast<double>(parts.size());
      };
      torch::Tensor loss;
      if (in_parts_) {
        loss = wrapper_.backward_parts(parts[i].x, parts[i].y, share_of);
      } else {
        loss = share_of(parts[i].x, parts[i].y);
        loss.backward();
      }
      sum += loss.template item<double>();
    }
    return sum;
  }

  std::pair<double, int64_t> evaluate(const Batch& batch) override {
    const torch::NoGradGuard no_grad;
    net_->eval();
    return {loss_of_batch(batch).template item<double>(), count_targets(batch.y)};
  }

 protected:
  static torch::nn::Sequential make_net(const Config& config, const Weights& weights,
                                        const Division& division, torch::Device device) {
    auto net = make_stages(config, weights, division, std::vector<int64_t>{config.layers + 2},
                           std::vector<int>{0})
                   .front();
    net->to(device);
    return net;
  }

  torch::Tensor loss_of_batch(const Batch& batch) {
    const lockstep::Autocast amp(device_, torch::kBFloat16, autocast_);
    return loss_of(wrapper_(batch.x.to(device_)), batch.y.to(device_), config_, division_);
  }

  Config config_;
  Division division_;
  torch::Device device_;
  bool autocast_;
  bool in_parts_;  // virtual shards
  torch::nn::Sequential net_;
  Wrapper wrapper_;
};

class ReplicatedModel final : public WrappedModel<Ddp, lockstep::DdpOptions> {
 public:
  using WrappedModel::WrappedModel;

  std::vector<NamedParameter> parameters() const override { return named(*net_); }

  void add_to(lockstep::Checkpoint& checkpoint, torch::optim::Optimizer& optimizer) override {
    checkpoint.add("model", *net_).add("optimizer", optimizer, *net_);
  }

  lockstep::TensorMap whole_weights() override { return lockstep::whole_parameters(*net_); }
};

class ShardedGpt2 final : public WrappedModel<Fsdp, lockstep::ShardOptions> {
 public:
  using WrappedModel::WrappedModel;

  std::vector<NamedParameter> parameters() const override { return named(wrapper_.sharded()); }

  void add_to(lockstep::Checkpoint& checkpoint, torch::optim::Optimizer& optimizer) override {
    checkpoint.add("model", wrapper_).add("optimizer", optimizer, wrapper_);
  }

  lockstep::TensorMap whole_weights() override { return whole_copies(wrapper_.sharded()); }
};

// Stages on the ranks of a pipeline axis. The first and the last stage have a copy each of the
// token embedding.
class PipelineModel final : public ParallelModel {
 public:
  PipelineModel(const Config& config, const Weights& weights, const Layout& layout,
                const lockstep::Mesh& mesh, lockstep::Device& device, bool autocast)
      : config_(config),
        division_(division_of(layout, mesh)),
        axis_(mesh.axis("pp")),
        device_(device.torch_device()),
        autocast_(autocast),
        pipeline_(make_pipeline(weights, layout, mesh, device)),
        tied_(axis_, 0, axis_.size() - 1, embedding()) {}

  double accumulate(const std::vector<Batch>& parts) override {
    set_training(true);
    double sum = 0;
    const double factor = 1.0 / static_cast<double>(parts.size());
    for (size_t i = 0; i < parts.size(); ++i) {
      const lockstep::Autocast amp(device_, torch::kBFloat16, autocast_);
      const auto loss = pipeline_.step(
          parts[i].x, parts[i].y, {.loss_factor = factor, .synchronise = i + 1 == parts.size()});
      sum += loss.item<double>() * factor;
    }
    tied_.sum_gradients();
    return sum;
  }

  std::pair<double, int64_t> evaluate(const Batch& batch) override {
    const torch::NoGradGuard no_grad;
    set_training(false);
    const auto padded = pad_batch(batch, pipeline_.schedule().micro_batches, 1);
    const auto loss = torch::zeros({1}, torch::kFloat64);
    {
      const lockstep::Autocast amp(device_, torch::kBFloat16, autocast_);
      const auto logits = pipeline_.evaluate(padded.x);
      if (logits.defined()) {
        loss.fill_(loss_of(logits, padded.y.to(device_), config_, division_).item<double>());
      }
    }
    axis_.broadcast(loss, axis_.size() - 1, {.label = "loss of an evaluation"});
    return {loss.item<double>(), count_targets(batch.y)};
  }

  std::vector<NamedParameter> parameters() const override {
    return sharded() ? named(*sharded()) : named(*stage());
  }

  void add_to(lockstep::Checkpoint& checkpoint, torch::optim::Optimizer& optimizer) override {
    checkpoint.add("model", pipeline_).add("optimizer", optimizer, pipeline_);
  }

  // A new model of the same sizes receives the weights: the owner of each stage tells the others.
  lockstep::TensorMap whole_weights() override {
    const auto mine = sharded() ? whole_copies(*sharded()) : lockstep::whole_parameters(*stage());
    lockstep::TensorMap all;
    const auto cuts = cut(config_, axis_.size());
    std::vector<int> every(cuts.size());
    std::iota(every.begin(), every.end(), 0);
    const auto whole = make_stages(config_, Weights(0), {}, cuts, every);
    for (size_t owner = 0; owner < whole.size(); ++owner) {
      for (const auto& item : whole[owner]->named_parameters()) {
        auto tensor = item.value().detach();
        if (static_cast<int>(owner) == axis_.rank()) tensor.copy_(mine.at(item.key()));
        axis_.broadcast(tensor, static_cast<int>(owner), {.label = "trained weights"});
        all[item.key()] = tensor;
      }
    }
    return all;
  }

 private:
  static std::vector<int64_t> cut(const Config& config, int64_t stages) {
    return lockstep::cut_by_count(config.layers + 2, stages);
  }

  static lockstep::Schedule schedule_of(const Layout& layout, int data_ranks) {
    const int64_t micro_batches = layout.virtual_shards > 0  ? layout.virtual_shards / data_ranks
                                  : layout.micro_batches > 0 ? layout.micro_batches
                                                             : 2 * layout.stages;
    return lockstep::one_f_one_b(static_cast<int>(layout.stages), static_cast<int>(micro_batches));
  }

  lockstep::Pipeline make_pipeline(const Weights& weights, const Layout& layout,
                                   const lockstep::Mesh& mesh, lockstep::Device& device) const {
    const auto stages = make_stages(config_, weights, division_, cut(config_, layout.stages),
                                    std::vector<int>{axis_.rank()});
    lockstep::PipelineOptions options;
    options.loss = [config = config_, division = division_](const torch::Tensor& logits,
                                                            const torch::Tensor& y) {
      return loss_of(logits, y, config, division);
    };
    options.data = mesh.axis("dp");
    options.virtual_shards = layout.virtual_shards;
    if (layout.shard > 0) {
      const auto& own = stages[static_cast<size_t>(axis_.rank())];
      options.shard = {.stage = static_cast<lockstep::ShardStage>(layout.shard),
                       .units = units_of(*own)};
    }
    return lockstep::Pipeline(stages, axis_, device, schedule_of(layout, mesh.axis("dp").size()),
                              options);
  }

  // Each layer, and each copy of the token embedding: the copies are divided alike.
  static std::vector<std::string> units_of(const torch::nn::Module& stage) {
    std::set<std::string> units;
    for (const auto& item : stage.named_parameters()) {
      const auto& name = item.key();
      const auto end = name.ends_with("wte.weight") ? name.rfind('.') : name.find('.');
      units.insert(name.substr(0, end));
    }
    return {units.begin(), units.end()};
  }

  const torch::nn::Sequential& stage() const { return pipeline_.stage(axis_.rank()); }
  lockstep::ShardedModel* sharded() const { return pipeline_.sharded(axis_.rank()); }

  torch::Tensor embedding() const {
    for (const auto& item : stage()->named_parameters()) {
      if (!item.key().ends_with("wte.weight")) continue;
      return sharded() ? sharded()->shard_of(item.value()) : item.value();
    }
    return {};
  }

  void set_training(bool on) const {
    torch::nn::Sequential mine = stage();
    mine->train(on);
  }

  Config config_;
  Division division_;
  Communicator axis_;
  torch::Device device_;
  bool autocast_;
  lockstep::Pipeline pipeline_;
  lockstep::TiedWeight tied_;
};

}  // namespace

lockstep::Mesh make_mesh(const Communicator& world, const Layout& layout) {
  const int64_t model = layout.stages * layout.tensor_parallel;
  if (model < 1 || world.size() % model != 0) {
    throw Error(
        Code::kUsage,
        fmt::format("{} rank{} cannot make --stages {} times --tensor-parallel {}", world.size(),
                    world.size() == 1 ? "" : "s", layout.stages, layout.tensor_parallel),
        fmt::format("start a multiple of {} ranks: lockstep run -n {} …", model, model));
  }
  return lockstep::Mesh(world, {{"dp", static_cast<int>(world.size() / model)},
                                {"pp", static_cast<int>(layout.stages)},
                                {"tp", static_cast<int>(layout.tensor_parallel)}});
}

std::unique_ptr<ParallelModel> make_parallel_model(const Config& config, const Weights& weights,
                                                   const Layout& layout, const lockstep::Mesh& mesh,
                                                   lockstep::Device& device, bool autocast) {
  if (layout.stages > 1) {
    return std::make_unique<PipelineModel>(config, weights, layout, mesh, device, autocast);
  }
  if (layout.shard > 0) {
    return std::make_unique<ShardedGpt2>(
        config, weights, layout, mesh, device, autocast,
        lockstep::ShardOptions{.stage = static_cast<lockstep::ShardStage>(layout.shard),
                               .virtual_shards = layout.virtual_shards});
  }
  return std::make_unique<ReplicatedModel>(
      config, weights, layout, mesh, device, autocast,
      lockstep::DdpOptions{.virtual_shards = layout.virtual_shards});
}

}  // namespace gpt2
