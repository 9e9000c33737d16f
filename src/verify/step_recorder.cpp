#include "verify/step_recorder.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/record_function.h>
#include <fmt/format.h>
#include <torch/torch.h>
#define XXH_INLINE_ALL
#include <xxhash.h>
#undef XXH_INLINE_ALL

#include <algorithm>
#include <atomic>
#include <charconv>
#include <cstdlib>
#include <fstream>
#include <utility>

#include "base/safetensors.hpp"
#include "device/capture.hpp"
#include "device/dtype_map.hpp"
#include "device/parameter_notes.hpp"
#include "device/rng.hpp"
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

// One for each index of dimension 0.
void add_hashes(const torch::Tensor& host, std::vector<int64_t>& hashes) {
  const size_t bytes = host.nbytes() / static_cast<size_t>(host.size(0));
  for (int64_t i = 0; i < host.size(0); ++i) {
    hashes.push_back(static_cast<int64_t>(XXH3_64bits(
        static_cast<const char*>(host.data_ptr()) + static_cast<size_t>(i) * bytes, bytes)));
  }
}

int64_t hash_of(std::map<std::string, at::Generator>& generators) {
  std::vector<int64_t> hashes;
  for (auto& [device, generator] : generators) {
    const std::lock_guard lock(generator.mutex());
    hashes.push_back(hash_of(on_host(generator.get_state())));
  }
  return static_cast<int64_t>(XXH3_64bits(hashes.data(), hashes.size() * sizeof(int64_t)));
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

// Note [Updates of torch::optim]
// An optimizer of torch::optim tells nobody that it updates. The first operation that changes a
// known weight in place after a forward gives it away: then its gradients are recorded, as it will
// use them, and at the next forward its weights. A stand-in with all weights is recorded as the
// optimizer. An Embedding(max_norm) changes its weight too, but in its forward. lockstep's own
// optimizers and verify_step() announce themselves, which takes precedence. What is not seen: rates
// and state, and the last update if the wrapper outlives it.
class UnannouncedUpdates {
 public:
  static UnannouncedUpdates& of_process() {
    static auto* const updates = new UnannouncedUpdates;  // alive until the last operation
    return *updates;
  }

  void watch(const torch::nn::Module& module) {
    const std::lock_guard lock(mutex_);
    if (!stand_in_) {
      stand_in_ = std::make_unique<torch::optim::SGD>(std::vector<torch::Tensor>(), 0.0);
      at::addGlobalCallback(at::RecordFunctionCallback(&before_operation)
                                .needsInputs(true)
                                .scopes({
                                    at::RecordScope::FUNCTION,
                                }));
    }
    auto& known = stand_in_->param_groups().front().params();
    for (const auto& parameter : module.parameters()) {
      const bool is_new = std::none_of(known.begin(), known.end(),
                                       [&](const auto& each) { return each.is_same(parameter); });
      if (parameter.defined() && is_new) known.push_back(parameter);
    }
  }

  void forward_begins(StepRecorder& recorder) {
    if (open_.exchange(false)) {
      recorder.end_update(*stand_in_, 1, [](const torch::Tensor& parameter) { return parameter; });
      ended_ = true;
    }
    awaited_ = stand_in_ && torch::GradMode::is_enabled();
  }

  /// Changes of weights during its life are no update.
  struct Ignored {
    Ignored() : awaited(of_process().awaited_.exchange(false)) {}
    ~Ignored() { of_process().awaited_ = awaited; }
    Ignored(const Ignored&) = delete;
    Ignored& operator=(const Ignored&) = delete;
    bool awaited;
  };

  bool is_stand_in(const torch::optim::Optimizer* optimizer) const {
    return optimizer == stand_in_.get();
  }

  /// Returns whether the update continues the count of the steps, whatever optimizer made it.
  bool announced(const torch::optim::Optimizer& optimizer) {
    if (is_stand_in(&optimizer)) return true;
    awaited_ = false;
    open_ = false;
    return ended_;
  }

 private:
  static std::unique_ptr<at::ObserverContext> before_operation(
      const at::RecordFunction& operation) {
    of_process().look_at(operation);
    return nullptr;
  }

  void look_at(const at::RecordFunction& operation) {
    const std::string_view name(operation.name());
    if (!awaited_ || torch::GradMode::is_enabled() || !name.ends_with('_')) return;
    if (name.find("embedding_renorm") != std::string_view::npos) return;
    const auto& inputs = operation.inputs();
    if (inputs.empty() || !inputs[0].isTensor() || !changes_weight(inputs[0].toTensor())) return;
    if (!awaited_.exchange(false)) return;
    open_ = true;
    StepRecorder::of_process()->begin_update(*stand_in_);
  }

  bool changes_weight(const torch::Tensor& changed) {
    const std::lock_guard lock(mutex_);
    if (!changed.defined() || !changed.has_storage()) return false;
    const auto& known = stand_in_->param_groups().front().params();
    bool has_gradients = false;
    bool is_weight = false;
    for (const auto& each : known) {
      has_gradients = has_gradients || each.grad().defined();
      is_weight = is_weight || each.is_alias_of(changed);
    }
    return has_gradients && is_weight;
  }

  std::mutex mutex_;  // guards the stand-in's list
  std::unique_ptr<torch::optim::SGD> stand_in_;
  std::atomic<bool> awaited_{false};  // a forward has begun, and no update since
  std::atomic<bool> open_{false};     // it has begun to change weights
  std::atomic<bool> ended_{false};    // once
};

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
  const std::string_view around(wrapper);
  if (around == "ddp" || around == "data_parallel") UnannouncedUpdates::of_process().watch(module);
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
    if (const auto layer = kind_of(*each)) kinds_.insert(*layer);
  }
}

// Every weight moves to a neighbouring number, up or down as a hash says: what a rounding error in
// each of them would do.
void StepRecorder::perturb(const torch::nn::Module& module) {
  const torch::NoGradGuard no_grad;
  const UnannouncedUpdates::Ignored ignored;
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

// A row is identified by its bytes. If a model has several inputs, the first one holds the batch,
// in dimension 0, or in dimension 1 for a recurrent network that reads [time, batch, ...]. Which
// one it is shows when the run is compared.
void StepRecorder::note_rows(const std::vector<torch::Tensor>& inputs, int64_t forwards) {
  UnannouncedUpdates::of_process().forward_begins(*this);
  if (!torch::GradMode::is_enabled() || Capture::current() != nullptr) return;
  const auto first = std::find_if(inputs.begin(), inputs.end(), [](const torch::Tensor& each) {
    return each.defined() && each.dim() > 0 && each.size(0) > 0;
  });
  if (first == inputs.end()) return;
  const torch::Tensor rows = on_host(*first);
  const bool is_sequence = rows.dim() > 2 || (rows.dim() == 2 && !rows.is_floating_point());
  const std::lock_guard lock(mutex_);
  forwards_ += forwards;
  add_hashes(rows, rows_);
  if (is_sequence && rows.size(1) > 0) add_hashes(rows.transpose(0, 1).contiguous(), columns_);
}

void StepRecorder::note_random() {
  const std::lock_guard lock(mutex_);
  kinds_.insert("random");
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

// Not the empty tensor that stands for a pipeline rank whose stages train nothing.
bool StepRecorder::is_weight(const torch::Tensor& parameter) {
  return parameter.numel() > 0 || names_.get(parameter).has_value();
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
    const auto& unannounced = UnannouncedUpdates::of_process();
    found->second.index = std::count_if(updates_.begin(), updates_.end(), [&](const auto& each) {
      return each.first != &optimizer && !unannounced.is_stand_in(each.first);
    });
    found->second.step = resumed_after_;
  }
  return found->second;
}

void StepRecorder::begin_update(const torch::optim::Optimizer& optimizer) {
  if (Capture::current() != nullptr) return;
  const bool continues = UnannouncedUpdates::of_process().announced(optimizer);
  const std::lock_guard lock(mutex_);
  Updates& updates = updates_of(optimizer);
  if (continues) updates.step = last_step_;
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
                {"columns", std::exchange(columns_, {})},
                {"resumed_after", resumed_after_},
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
      if (!is_weight(parameter)) continue;
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
  json rates = json::object();
  for (const auto& group : optimizer.param_groups()) {
    for (const auto& parameter : group.params()) {
      if (!is_weight(parameter)) continue;
      const std::string name = known_name(parameter);
      rates[name] = group.options().get_lr();
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
        {{"step", updates.step}, {"rank", rank_}, {"factor", factor}, {"rates", std::move(rates)}});
}

void StepRecorder::skip_update(const torch::optim::Optimizer& optimizer) {
  if (Capture::current() != nullptr) return;
  begin_update(optimizer);
  const std::lock_guard lock(mutex_);
  Updates& updates = updates_of(optimizer);
  updates.gradients.clear();
  Items items;
  json rates = json::object();
  for (const auto& group : optimizer.param_groups()) {
    for (const auto& parameter : group.params()) {
      if (!is_weight(parameter)) continue;
      const std::string name = known_name(parameter);
      rates[name] = group.options().get_lr();
      items["weight/" + name] = {on_host(parameter), slice_of(parameter)};
    }
  }
  write(fmt::format("step-{}.rank-{}.update-{}", updates.step, rank_, updates.index), items,
        {{"step", updates.step},
         {"rank", rank_},
         {"factor", 1.0},
         {"rates", std::move(rates)},
         {"skipped", true}});
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

WatchedForward::WatchedForward(c10::Device device)
    : recorder_(torch::GradMode::is_enabled() && Capture::current() == nullptr
                    ? StepRecorder::of_process()
                    : nullptr) {
  if (recorder_ == nullptr) return;
  generators_ = generators_of_thread(device.is_cuda() ? std::vector<c10::Device>{device}
                                                      : std::vector<c10::Device>{});
  before_ = hash_of(generators_);
}

WatchedForward::WatchedForward(const torch::nn::Module& module)
    : WatchedForward(module.parameters().empty() ? c10::Device(c10::kCPU)
                                                 : module.parameters().front().device()) {}

WatchedForward::~WatchedForward() {
  if (recorder_ != nullptr && hash_of(generators_) != before_) recorder_->note_random();
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
