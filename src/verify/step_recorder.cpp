#include "verify/step_recorder.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <fmt/format.h>
#include <torch/torch.h>
#define XXH_INLINE_ALL
#include <xxhash.h>
#undef XXH_INLINE_ALL

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <utility>

#include "base/safetensors.hpp"
#include "device/capture.hpp"
#include "device/dtype_map.hpp"
#include "device/slice_map.hpp"
#include "lockstep/error.hpp"
#include "lockstep/rank_environment.hpp"
#include "lockstep/verify.hpp"
#include "torch_compat.hpp"

namespace lockstep {
namespace {

using nlohmann::json;

torch::Tensor on_host(const torch::Tensor& tensor) {
  return tensor.detach().to(torch::kCPU).contiguous().clone();
}

int64_t hash_of(const torch::Tensor& host) {
  return static_cast<int64_t>(XXH3_64bits(host.data_ptr(), host.nbytes()));
}

json to_json(const Slice& slice) {
  json value = {{"whole", slice.whole}};
  if (slice.blocks.empty()) return value;
  value["local"] = slice.local;
  for (const auto& block : slice.blocks) {
    value["blocks"].push_back({block.local, block.whole, block.shape});
  }
  return value;
}

// How far a weight moves, relative to its size: to its neighbour in float32, and in a lower
// precision, that it is rounded to when it is used, by the largest error of that rounding.
double step_of(std::string_view dtype) {
  if (dtype == "bfloat16") return 0x1p-9;
  if (dtype == "float16") return 0x1p-12;
  return 0x1p-23;
}

std::optional<std::pair<double, uint64_t>> perturbation_of_environment() {
  const char* text = std::getenv(kVerifyPerturbVariable);
  if (text == nullptr) return std::nullopt;
  const std::string_view given(text);
  const size_t colon = std::min(given.find(':'), given.size());
  uint64_t seed = 1;
  if (colon < given.size()) {
    std::from_chars(given.data() + colon + 1, given.data() + given.size(), seed);
  }
  return std::pair(step_of(given.substr(0, colon)), seed);
}

// libtorch's layers whose result depends on which rows are computed together, or on random numbers.
std::optional<std::string> kind_of(const torch::nn::Module& module) {
  const auto* batch_norm1 = module.as<torch::nn::BatchNorm1d>();
  const auto* batch_norm2 = module.as<torch::nn::BatchNorm2d>();
  const auto* batch_norm3 = module.as<torch::nn::BatchNorm3d>();
  if (batch_norm1 != nullptr || batch_norm2 != nullptr || batch_norm3 != nullptr) {
    return "batch_norm";
  }
  const auto drops = [](const auto* layer) { return layer != nullptr && layer->options.p() > 0; };
  if (drops(module.as<torch::nn::Dropout>()) || drops(module.as<torch::nn::Dropout2d>()) ||
      drops(module.as<torch::nn::Dropout3d>()) || drops(module.as<torch::nn::AlphaDropout>())) {
    return "dropout";
  }
  const auto between = [](const auto* layer) {
    return layer != nullptr && layer->options.dropout() > 0;
  };
  if (between(module.as<torch::nn::LSTM>()) || between(module.as<torch::nn::GRU>()) ||
      between(module.as<torch::nn::RNN>()) || between(module.as<torch::nn::MultiheadAttention>())) {
    return "dropout";
  }
  return std::nullopt;
}

}  // namespace

StepRecorder* StepRecorder::of_process() {
  static const std::unique_ptr<StepRecorder> recorder = []() -> std::unique_ptr<StepRecorder> {
    const char* folder = std::getenv(kVerifyFolderVariable);
    if (folder == nullptr || *folder == '\0') return nullptr;
    return std::unique_ptr<StepRecorder>(new StepRecorder(folder));
  }();
  return recorder.get();
}

StepRecorder::StepRecorder(std::string folder)
    : folder_(std::move(folder)), perturb_(perturbation_of_environment()) {
  const auto environment = RankEnvironment::from_env();
  rank_ = environment.rank;
  ranks_ = environment.world_size;
}

void StepRecorder::learn(const torch::nn::Module& module, const char* wrapper) {
  const std::lock_guard lock(mutex_);
  wrappers_.insert(wrapper);
  if (perturb_) perturb(module);
  for (const auto& item : module.named_parameters()) {
    if (item.value().defined() && !names_.get(item.value())) {
      names_.set(item.value(), item.key());
    }
  }
  for (const auto& item : module.named_buffers()) {
    if (item.value().defined()) buffers_.insert_or_assign(item.key(), item.value());
  }
  for (const auto& each : module.modules(/*include_self=*/false)) {
    if (const auto kind = kind_of(*each)) kinds_.insert(*kind);
  }
}

// Every weight moves to a neighbouring number, up or down as a hash says: what a rounding error in
// each of them would do.
void StepRecorder::perturb(const torch::nn::Module& module) {
  const torch::NoGradGuard no_grad;
  const auto [relative, seed] = *perturb_;
  for (const auto& item : module.named_parameters()) {
    const torch::Tensor& parameter = item.value();
    if (!parameter.defined() || !parameter.is_floating_point() || moved_.get(parameter)) continue;
    const auto key = XXH3_64bits_withSeed(item.key().data(), item.key().size(), seed);
    const auto signs =
        torch::randint(0, 2, parameter.sizes(), at::detail::createCPUGenerator(key), torch::kFloat);
    // A weight that is stored in a lower precision moves to a neighbour in that.
    const double own = parameter.scalar_type() == torch::kBFloat16 ? 0x1.8p-8
                       : parameter.scalar_type() == torch::kHalf   ? 0x1.8p-11
                                                                   : relative;
    const auto factor = (1 + (2 * signs - 1) * own).to(parameter.device());
    parameter.copy_(parameter.to(torch::kFloat) * factor);
    moved_.set(parameter, true);  // a shared one moves once
  }
}

void StepRecorder::name(const torch::Tensor& parameter, const std::string& name) {
  const std::lock_guard lock(mutex_);
  names_.set(parameter, name);
}

// A row is identified by its bytes. If a model has several inputs, the first one holds the batch.
void StepRecorder::note_rows(const std::vector<torch::Tensor>& inputs) {
  if (!torch::GradMode::is_enabled() || Capture::current() != nullptr) return;
  const auto first = std::find_if(inputs.begin(), inputs.end(), [](const torch::Tensor& each) {
    return each.defined() && each.dim() > 0 && each.size(0) > 0;
  });
  if (first == inputs.end()) return;
  const torch::Tensor rows = on_host(*first);
  const size_t bytes = rows.nbytes() / static_cast<size_t>(rows.size(0));
  const std::lock_guard lock(mutex_);
  ++forwards_;
  for (int64_t row = 0; row < rows.size(0); ++row) {
    rows_.push_back(static_cast<int64_t>(XXH3_64bits(
        static_cast<const char*>(rows.data_ptr()) + static_cast<size_t>(row) * bytes, bytes)));
  }
}

void StepRecorder::note_buffers(const torch::nn::Module& module) {
  const std::lock_guard lock(mutex_);
  for (const auto& item : module.named_buffers()) {
    if (item.value().defined()) forward_buffers_.push_back(hash_of(on_host(item.value())));
  }
}

void StepRecorder::note_dtype(torch::ScalarType dtype) {
  const std::lock_guard lock(mutex_);
  if (dtype == torch::kBFloat16) dtype_ = "bfloat16";
  if (dtype == torch::kHalf && dtype_ == "float32") dtype_ = "float16";
}

void StepRecorder::note_local(const std::string& name, const torch::Tensor& gradient,
                              const Slice& slice, double weight) {
  if (Capture::current() != nullptr) return;
  torch::Tensor copy = on_host(gradient);
  const std::lock_guard lock(mutex_);
  local_["local/" + name] = {std::move(copy), slice};
  ++averages_[name];
  weight_ = weight;
}

void StepRecorder::note_synchronised_forward() {
  const std::lock_guard lock(mutex_);
  ++synchronised_forwards_;
}

void StepRecorder::note_tied(const torch::Tensor& copy) {
  const std::lock_guard lock(mutex_);
  tied_.insert(known_name(copy));
}

void StepRecorder::note_weighed() {
  const std::lock_guard lock(mutex_);
  weighed_ = true;
}

void StepRecorder::note_sent(int64_t bytes) {
  const std::lock_guard lock(mutex_);
  sent_bytes_ += bytes;
  ++all_reduces_;
}

void StepRecorder::note_kind(const char* kind) {
  const std::lock_guard lock(mutex_);
  kinds_.insert(kind);
}

void StepRecorder::note_compression(torch::ScalarType dtype) {
  note_dtype(dtype);
  const std::lock_guard lock(mutex_);
  sent_dtype_ = dtype == torch::kBFloat16 ? "bfloat16" : "float16";
}

void StepRecorder::note_micro_batches(const std::vector<int64_t>& rows,
                                      const std::vector<double>& shares) {
  const std::lock_guard lock(mutex_);
  micro_batch_rows_ = rows;
  micro_batch_shares_ = shares;
}

std::string StepRecorder::name_of(const torch::Tensor& parameter) {
  const std::lock_guard lock(mutex_);
  return known_name(parameter);
}

std::string StepRecorder::known_name(const torch::Tensor& parameter) {
  if (auto known = names_.get(parameter)) return *known;
  std::string made = fmt::format("parameter {}", unnamed_++);
  names_.set(parameter, made);
  return made;
}

StepRecorder::Updates& StepRecorder::updates_of(const torch::optim::Optimizer& optimizer) {
  const auto [found, is_new] = updates_.try_emplace(&optimizer);
  if (is_new) {
    found->second.index = static_cast<int64_t>(updates_.size()) - 1;
    found->second.step = resumed_after_;
  }
  return found->second;
}

void StepRecorder::begin_update(const torch::optim::Optimizer& optimizer) {
  if (Capture::current() != nullptr) return;
  const std::lock_guard lock(mutex_);
  Updates& updates = updates_of(optimizer);
  ++updates.step;
  if (updates.step > last_step_) begin_step(updates.step, optimizer);
  updates.gradients.clear();
  for (const auto& group : optimizer.param_groups()) {
    for (const auto& parameter : group.params()) {
      const torch::Tensor& gradient = parameter.grad();
      if (!gradient.defined()) continue;
      updates.gradients.emplace_back(
          known_name(parameter), on_host(gradient.is_sparse() ? gradient.to_dense() : gradient));
    }
  }
}

// Everything that was noted until now belongs to this step.
void StepRecorder::begin_step(int64_t step, const torch::optim::Optimizer& optimizer) {
  last_step_ = step;
  json facts = {{"step", step},
                {"rank", rank_},
                {"ranks", ranks_},
                {"weight", weight_},
                {"weighed", std::exchange(weighed_, false)},
                {"rows", std::exchange(rows_, {})},
                {"forward_buffers", std::exchange(forward_buffers_, {})},
                {"forwards", std::exchange(forwards_, 0)},
                {"synchronised_forwards", std::exchange(synchronised_forwards_, 0)},
                {"tied", std::exchange(tied_, {})},
                {"micro_batch_rows", std::exchange(micro_batch_rows_, {})},
                {"micro_batch_shares", std::exchange(micro_batch_shares_, {})},
                {"sent_bytes", std::exchange(sent_bytes_, 0)},
                {"all_reduces", std::exchange(all_reduces_, 0)},
                {"averages", json::object()},
                {"before", json::object()},
                {"kinds", kinds_},
                {"wrappers", wrappers_},
                {"dtype", dtype_},
                {"sent_dtype", sent_dtype_}};
  for (const auto& [name, count] : averages_) facts["averages"][name] = count;
  // The weights that the step began with: a rank that starts from others is found by them.
  for (const auto& group : optimizer.param_groups()) {
    for (const auto& parameter : group.params()) {
      facts["before"][known_name(parameter)] = hash_of(on_host(parameter));
    }
  }
  auto generator = at::globalContext().defaultGenerator(torch::kCPU);
  {
    const std::lock_guard generator_lock(generator.mutex());
    facts["generator"] = hash_of(generator.get_state());
  }
  averages_.clear();
  write(fmt::format("step-{}.rank-{}.facts", step, rank_), std::exchange(local_, {}),
        std::move(facts));
}

void StepRecorder::end_update(const torch::optim::Optimizer& optimizer, double factor,
                              const MasterOf& master_of) {
  if (Capture::current() != nullptr) return;
  const std::lock_guard lock(mutex_);
  Updates& updates = updates_of(optimizer);
  Items items = std::exchange(local_, {});
  json rates = json::array();
  for (const auto& group : optimizer.param_groups()) {
    rates.push_back(group.options().get_lr());
    for (const auto& parameter : group.params()) {
      const std::string name = known_name(parameter);
      const torch::Tensor weight = master_of(parameter);
      const Slice slice = slice_of(parameter);
      items["weight/" + name] = {on_host(weight), slice};
      if (!weight.is_same(parameter)) items["rounded/" + name] = {on_host(parameter), slice};
      add_state(optimizer, parameter, name, items);
    }
  }
  for (auto& [name, gradient] : updates.gradients) {
    const auto found = items.find("weight/" + name);
    const Slice slice =
        found == items.end() ? whole_slice(gradient.sizes().vec()) : found->second.slice;
    items["gradient/" + name] = {
        factor == 1 ? gradient : (gradient.to(torch::kDouble) * factor).to(torch::kFloat), slice};
  }
  if (updates.index == 0) {
    for (const auto& [name, buffer] : buffers_) {
      items["buffer/" + name] = {on_host(buffer), slice_of(buffer)};
    }
  }
  updates.gradients.clear();
  write(fmt::format("step-{}.rank-{}.update-{}", updates.step, rank_, updates.index), items,
        {{"step", updates.step}, {"rank", rank_}, {"factor", factor}, {"lr", rates}});
}

void StepRecorder::skip_update(const torch::optim::Optimizer& optimizer) {
  if (Capture::current() != nullptr) return;
  begin_update(optimizer);
  const std::lock_guard lock(mutex_);
  Updates& updates = updates_of(optimizer);
  updates.gradients.clear();
  Items items;
  for (const auto& group : optimizer.param_groups()) {
    for (const auto& parameter : group.params()) {
      items["weight/" + known_name(parameter)] = {on_host(parameter), slice_of(parameter)};
    }
  }
  write(fmt::format("step-{}.rank-{}.update-{}", updates.step, rank_, updates.index), items,
        {{"step", updates.step}, {"rank", rank_}, {"factor", 1.0}, {"skipped", true}});
}

void StepRecorder::add_state(const torch::optim::Optimizer& optimizer,
                             const torch::Tensor& parameter, const std::string& name,
                             Items& items) const {
  const auto found =
      optimizer.state().find(compat::optimizer_state_key(parameter.unsafeGetTensorImpl()));
  if (found == optimizer.state().end()) return;
  const auto add = [&](const char* what, const torch::Tensor& state) {
    if (!state.defined()) return;
    const Slice slice =
        state.sizes() == parameter.sizes() ? slice_of(parameter) : whole_slice(state.sizes().vec());
    items[fmt::format("state/{}/{}", name, what)] = {on_host(state), slice};
  };
  const auto* state = found->second.get();
  if (const auto* sgd = dynamic_cast<const torch::optim::SGDParamState*>(state)) {
    add("momentum", sgd->momentum_buffer());
  } else if (const auto* adam = dynamic_cast<const torch::optim::AdamParamState*>(state)) {
    add("exp_avg", adam->exp_avg());
    add("exp_avg_sq", adam->exp_avg_sq());
  } else if (const auto* adamw = dynamic_cast<const torch::optim::AdamWParamState*>(state)) {
    add("exp_avg", adamw->exp_avg());
    add("exp_avg_sq", adamw->exp_avg_sq());
  }
}

void StepRecorder::write(const std::string& file, const Items& items, json facts) const {
  std::vector<TensorBytes> tensors;
  json slices = json::object();
  for (const auto& [name, item] : items) {
    const auto dtype = dtype_of(item.tensor.scalar_type());
    if (!dtype) continue;
    tensors.push_back(
        {name,
         *dtype,
         item.tensor.sizes().vec(),
         {static_cast<const std::byte*>(item.tensor.data_ptr()), item.tensor.nbytes()}});
    if (!item.slice.blocks.empty()) slices[name] = to_json(item.slice);
  }
  facts["slices"] = std::move(slices);
  write_safetensors(fmt::format("{}/{}.safetensors", folder_, file), std::move(tensors),
                    {{"lockstep_verify", facts.dump()}});
}

void StepRecorder::note_loss(double loss) {
  const std::lock_guard lock(mutex_);
  std::ofstream file(fmt::format("{}/rank-{}.losses", folder_, rank_), std::ios::app);
  file << fmt::format("{} {:.17g}\n", last_step_, loss);
}

void StepRecorder::resume_after(int64_t step) {
  const std::lock_guard lock(mutex_);
  resumed_after_ = step;
  last_step_ = step;
  for (auto& [optimizer, updates] : updates_) updates.step = step;
}

void verify_model(const torch::nn::Module& module) {
  if (auto* recorder = StepRecorder::of_process()) recorder->learn(module, "module");
}

void verify_name(const torch::Tensor& parameter, const std::string& name) {
  if (auto* recorder = StepRecorder::of_process()) recorder->name(parameter, name);
}

void verify_step(const torch::optim::Optimizer& optimizer) {
  auto* recorder = StepRecorder::of_process();
  if (recorder == nullptr) return;
  recorder->begin_update(optimizer);
  recorder->end_update(optimizer, 1, [](const torch::Tensor& parameter) { return parameter; });
}

void verify_loss(const torch::Tensor& loss) {
  auto* recorder = StepRecorder::of_process();
  if (recorder != nullptr) recorder->note_loss(loss.item<double>());
}

namespace detail {

bool is_verified() {
  return StepRecorder::of_process() != nullptr;
}

void verify_rows(const std::vector<torch::Tensor>& inputs) {
  if (auto* recorder = StepRecorder::of_process()) recorder->note_rows(inputs);
}

}  // namespace detail
}  // namespace lockstep
