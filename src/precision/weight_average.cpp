#include "lockstep/weight_average.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <unordered_set>

#include "device/capture.hpp"
#include "device/slice_map.hpp"
#include "lockstep/error.hpp"
#include "lockstep/master_weights.hpp"

namespace lockstep {

struct WeightAverage::State {
  explicit State(torch::nn::Module& averaged) : module(averaged) {}

  torch::nn::Module& module;
  WeightAverageOptions options;
  std::vector<Entry> entries;
  int64_t updates = 0;
  bool in_use = false;  // the module has the averages

  void add(const std::string& name, const torch::Tensor& tensor);
};

namespace {

// What is averaged: the float32 master of a parameter that has one.
torch::Tensor full_precision(const torch::Tensor& tensor) {
  const auto masters = MasterWeights::holding(tensor);
  return masters ? masters->of(tensor) : tensor.detach();
}

void require_whole(const torch::nn::Module& module) {
  require_not_sharded(module, "WeightAverage",
                      "average a model that DistributedDataParallel trains");
}

}  // namespace

void WeightAverage::State::add(const std::string& name, const torch::Tensor& tensor) {
  const torch::NoGradGuard no_grad;
  entries.push_back({name, tensor, full_precision(tensor).clone()});
}

WeightAverage::WeightAverage(torch::nn::Module& module, const WeightAverageOptions& options)
    : state_(std::make_unique<State>(module)) {
  require_whole(module);
  if (!(options.decay >= 0 && options.decay <= 1)) {
    throw Error(Code::kUsage, fmt::format("WeightAverage with a decay of {}", options.decay),
                "give a decay from 0 to 1, such as 0.999");
  }
  state_->options = options;
  std::unordered_set<const c10::TensorImpl*> seen;  // a shared parameter has several names
  for (const auto& item : module.named_parameters()) {
    if (seen.insert(item.value().unsafeGetTensorImpl()).second) {
      state_->add(item.key(), item.value());
    }
  }
  if (!options.buffers) return;
  for (const auto& item : module.named_buffers()) {
    if (item.value().defined() && item.value().is_floating_point()) {
      state_->add(item.key(), item.value());
    }
  }
}

WeightAverage::~WeightAverage() = default;

double WeightAverage::decay() const {
  if (state_->updates == 0) return 0;  // the first update takes the weights as they are
  const auto count = static_cast<double>(state_->updates);
  const double most = state_->options.warmup ? (1 + count) / (10 + count) : 1;
  return std::min(state_->options.decay, most);
}

void WeightAverage::update() {
  require_not_capturing("WeightAverage::update(), whose decay is a number of the host,",
                        "call it after the captured step, not inside");
  if (state_->in_use) {
    throw Error(Code::kUsage, "WeightAverage::update() while UseAverage has the averages in place",
                "end UseAverage before the next training step");
  }
  require_whole(state_->module);  // it may have been wrapped since
  const torch::NoGradGuard no_grad;
  const double keep = decay();
  for (auto& entry : state_->entries) {
    const torch::Tensor weight = full_precision(entry.of);
    if (keep == 0) {
      entry.average.copy_(weight);
    } else {
      entry.average.lerp_(weight, 1 - keep);
    }
  }
  ++state_->updates;
}

int64_t WeightAverage::updates() const {
  return state_->updates;
}

const std::vector<WeightAverage::Entry>& WeightAverage::entries() const {
  if (state_->in_use) {
    throw Error(Code::kUsage, "the averages of a WeightAverage were asked for inside UseAverage",
                "read or save them before UseAverage begins or after it ends");
  }
  return state_->entries;
}

void WeightAverage::set_updates(int64_t updates) {
  state_->updates = updates;
}

// Weights that have no master change places with their averages. A weight with a master gets the
// rounded average, and is rounded from its master again. Version counters stay as they are: the
// weights will be the same.
void WeightAverage::exchange() {
  const torch::NoGradGuard no_grad;
  const bool back = state_->in_use;
  for (auto& entry : state_->entries) {
    torch::Tensor weight = entry.of.variable_data();
    if (const auto masters = MasterWeights::holding(entry.of)) {
      const torch::Tensor master = masters->of(entry.of);  // has taken over what was loaded
      weight.copy_(back ? master : entry.average);
    } else {
      const torch::Tensor held = weight.clone();
      weight.copy_(entry.average);
      entry.average.copy_(held);
    }
  }
  state_->in_use = !back;
}

UseAverage::UseAverage(WeightAverage& average) : average_(average) {
  if (average_.state_->in_use) {
    throw Error(Code::kUsage, "UseAverage inside UseAverage", "keep one of the two guards");
  }
  average_.exchange();
}

UseAverage::~UseAverage() {
  average_.exchange();
}

}  // namespace lockstep
