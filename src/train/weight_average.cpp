#include "lockstep/weight_average.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <functional>
#include <unordered_set>

#include "device/capture.hpp"
#include "device/parameter_notes.hpp"
#include "lockstep/error.hpp"
#include "lockstep/fully_sharded_data_parallel.hpp"
#include "lockstep/master_weights.hpp"

namespace lockstep {

struct WeightAverage::State {
  explicit State(const WeightAverageOptions& chosen) : options(chosen) {
    if (options.decay >= 0 && options.decay <= 1) return;
    throw Error(Code::kUsage, fmt::format("WeightAverage with a decay of {}", options.decay),
                "give a decay from 0 to 1, such as 0.999");
  }

  void require_whole() const;

  const torch::nn::Module* module = nullptr;  // none if shards are averaged
  WeightAverageOptions options;
  std::function<void()> before_exchange = [] {};  // where other ranks read the weights
  std::function<void()> after_exchange = [] {};
  std::vector<Entry> entries;
  // [entry] while an average is used: the master, or the weight of a lower precision
  std::vector<torch::Tensor> held;
  std::unordered_set<const c10::TensorImpl*> seen;  // a shared tensor has several names
  int64_t updates = 0;
  bool in_use = false;  // the module has the averages

  void add(const std::string& name, const torch::Tensor& tensor);
  void add_buffers(const torch::nn::Module& of);
};

namespace {

// What is averaged: the float32 master of a parameter that has one. The average of another bf16 or
// fp16 weight is float32 too: in low precision a thousandth of a difference would be rounded away.
torch::Tensor full_precision(const torch::Tensor& tensor) {
  if (const auto masters = MasterWeights::holding(tensor)) return masters->of(tensor);
  const bool low = tensor.scalar_type() == torch::kBFloat16 || tensor.scalar_type() == torch::kHalf;
  return low ? tensor.detach().to(torch::kFloat) : tensor.detach();
}

}  // namespace

void WeightAverage::State::require_whole() const {
  if (module == nullptr) return;
  require_not_sharded(*module, "WeightAverage", "make it of the FullyShardedDataParallel instead");
}

void WeightAverage::State::add(const std::string& name, const torch::Tensor& tensor) {
  if (!seen.insert(tensor.unsafeGetTensorImpl()).second) return;
  const torch::NoGradGuard no_grad;
  entries.push_back({name, tensor, full_precision(tensor).clone()});
}

void WeightAverage::State::add_buffers(const torch::nn::Module& of) {
  for (const auto& item : of.named_buffers()) {
    if (item.value().defined() && item.value().is_floating_point()) add(item.key(), item.value());
  }
}

WeightAverage::WeightAverage(torch::nn::Module& module, const WeightAverageOptions& options)
    : state_(std::make_unique<State>(options)) {
  state_->module = &module;
  state_->require_whole();
  for (const auto& item : module.named_parameters()) state_->add(item.key(), item.value());
  if (options.buffers) state_->add_buffers(module);
}

WeightAverage::WeightAverage(ShardedModel& model, const WeightAverageOptions& options)
    : state_(std::make_unique<State>(options)) {
  for (const auto& [name, shard] : model.named_shards()) state_->add(name, shard);
  if (options.buffers) state_->add_buffers(*model.module());
  state_->before_exchange = [&model] { model.begin_change(); };
  state_->after_exchange = [&model] { model.note_changed_shards(); };
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
  state_->require_whole();  // it may have been wrapped since
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
// rounded average, and is rounded from its master again, which must not take the average over; one
// of a lower precision that has none is kept meanwhile. Version counters stay as they are: the
// weights will be the same.
void WeightAverage::exchange() {
  const torch::NoGradGuard no_grad;
  const bool back = state_->in_use;
  try {
    if (std::uncaught_exceptions() == 0) state_->before_exchange();
  } catch (const std::exception&) {
    if (!back) throw;  // else another rank has failed; the weights come back all the same
  }
  state_->held.resize(state_->entries.size());
  for (size_t i = 0; i < state_->entries.size(); ++i) {
    auto& entry = state_->entries[i];
    torch::Tensor weight = entry.of.variable_data();
    const auto masters = MasterWeights::holding(entry.of);
    if (masters || weight.scalar_type() != entry.average.scalar_type()) {
      torch::Tensor& held = state_->held[i];
      // of() has taken over what was loaded.
      if (!back) held = masters ? masters->of(entry.of) : weight.clone();
      weight.copy_(back ? held : entry.average);
      if (back && masters) masters->note_rounded(entry.of);
      if (back) held.reset();
    } else {
      const torch::Tensor held = weight.clone();
      weight.copy_(entry.average);
      entry.average.copy_(held);
    }
  }
  state_->in_use = !back;
  state_->after_exchange();
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
