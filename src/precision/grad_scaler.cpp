#include "lockstep/grad_scaler.hpp"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <utility>

#include "base/mutation.hpp"
#include "device/capture.hpp"
#include "lockstep/error.hpp"
#include "precision/exact_squares.hpp"
#include "precision/loss_scale.hpp"
#include "precision/model_parallel.hpp"
#include "precision/optimizer_gradients.hpp"
#include "precision/scaler_kernels.hpp"
#include "verify/step_recorder.hpp"

namespace lockstep {

/// How far one optimizer is between two calls of update().
enum class ScalerStage { kReady, kUnscaled, kStepped };

struct ScaledOptimizer {
  const torch::optim::Optimizer* optimizer = nullptr;
  ScalerStage stage = ScalerStage::kReady;
  Finding finding = {};  // from kUnscaled on
};

/// Which updates were skipped, and why. A GPU writes those that it decides to a ring; they become
/// known here when the ring is read.
class SkipLog {
 public:
  explicit SkipLog(std::function<void(const SkippedStep&)> on_skip)
      : on_skip_(std::move(on_skip)) {}

  ParameterNames& names() { return names_; }

  /// Describes the first parameter that overflowed. The host must know the findings.
  std::string overflowed_parameter(const std::vector<Finding>& findings) const {
    for (const auto& finding : findings) {
      if (finding.first >= 0) return names_.of(finding.first);
      if (finding.overflowed_peer >= 0) {
        return fmt::format("a parameter of rank {} of the model-parallel group",
                           finding.overflowed_peer);
      }
    }
    return "";
  }

  void add(const SkippedStep& skipped) {
    skipped_.push_back(skipped);
    if (on_skip_) on_skip_(skipped);
  }

  /// Takes in what the GPU has written so far.
  void read(SkipRing& ring) {
    const uint64_t written = std::atomic_ref(ring.written).load(std::memory_order_acquire);
    if (written > SkipRing::kEntries) read_ = std::max(read_, written - SkipRing::kEntries);
    while (read_ < written) {
      const SkipRing::Entry entry = ring.entries[read_++ % SkipRing::kEntries];
      add({entry.update, names_.of(entry.parameter), entry.scale_before, entry.scale_after});
    }
  }

  const std::vector<SkippedStep>& skipped() const { return skipped_; }

 private:
  std::function<void(const SkippedStep&)> on_skip_;
  ParameterNames names_;
  uint64_t read_ = 0;  // entries of the ring
  std::vector<SkippedStep> skipped_;
};

namespace {

GradScalerState initial(const GradScalerOptions& options) {
  return {options.init_scale, options.growth_factor, options.backoff_factor,
          options.growth_interval, 0};
}

Error misuse(const std::string& message, const std::string& help) {
  return {Code::kScalerMisuse, "GradScaler: " + message, help};
}

// How many scalers of this process are enabled.
std::atomic<int64_t> enabled_scalers{0};

bool asks_for_anything(const StepExtras& extras) {
  return extras.max_norm.has_value() || extras.zero_grad;
}

// Returns what one scan of all gradients would find, and in `squares` the sum of squares of each
// part of the model, as ModelParallelGroup::sum() takes it.
Finding scan_parts(const OptimizerGradients& gradients, const ModelParallelGroup& model,
                   std::vector<torch::Tensor>& squares) {
  std::vector<OptimizerGradients> parts(model.parts());
  for (size_t i = 0; i < gradients.gradients.size(); ++i) {
    parts[model.part_of(gradients.parameters[i])].add(gradients, i);
  }
  Finding all;
  for (const auto& part : parts) {
    Finding found = scan(part, /*squares=*/true);
    found.bring_to_host();
    squares.push_back(model.same_bits() ? exact_squares(part.gradients, torch::kCPU)
                                        : torch::full({}, found.sum_of_squares, torch::kDouble));
    if (found.first >= 0)
      all.first = all.first < 0 ? found.first : std::min(all.first, found.first);
  }
  return all;
}

void drop_gradients(torch::optim::Optimizer& optimizer) {
  for (auto& group : optimizer.param_groups()) {
    for (auto& parameter : group.params()) parameter.mutable_grad().reset();
  }
}

}  // namespace

struct GradScaler::State {
  explicit State(const GradScalerOptions& given)
      : options(given), scale(initial(given)), log(std::make_shared<SkipLog>(given.on_skip)) {
    if (options.enabled) ++enabled_scalers;
  }
  ~State() {
    if (options.enabled) --enabled_scalers;
  }
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  ScaledOptimizer& of(const torch::optim::Optimizer& optimizer);
  void require_scaled_loss(const char* call) const;
  std::optional<Communicator> others(const StepExtras& extras) const {
    return options.model_parallel ? options.model_parallel : extras.model_parallel;
  }
  OptimizerGradients collect(torch::optim::Optimizer& optimizer, const FusedOptimizer* fused,
                             const ModelParallelGroup& model);
  void unscale(ScaledOptimizer& mine, const OptimizerGradients& gradients);
  ScaledGradients scaled_by(const OptimizerGradients& gradients) const;
  torch::Tensor step(torch::optim::Optimizer& optimizer, FusedOptimizer* fused,
                     const StepExtras& extras);
  void agree(Finding& finding, const ModelParallelGroup& model) const;
  std::vector<Finding> take_findings();
  void update(std::vector<Finding> findings, std::optional<double> new_scale);
  void update_on_host(std::vector<Finding> findings, std::optional<double> new_scale);
  void read_log() const;

  GradScalerOptions options;
  LossScale scale;
  std::shared_ptr<SkipLog> log;             // shared with captured steps, which read it on replay
  std::vector<ScaledOptimizer> optimizers;  // in the order of their first call; update() clears it
};

ScaledOptimizer& GradScaler::State::of(const torch::optim::Optimizer& optimizer) {
  for (auto& each : optimizers) {
    if (each.optimizer == &optimizer) return each;
  }
  if (Capture* capture = Capture::current()) {  // a capture that fails must leave no trace
    capture->if_dropped([this, alive = std::weak_ptr<SkipLog>(log)] {
      if (!alive.expired()) optimizers.clear();
    });
  }
  return optimizers.emplace_back(ScaledOptimizer{&optimizer});
}

// Where ranks hold parts of a model, only the last may have a loss.
void GradScaler::State::require_scaled_loss(const char* call) const {
  if (scale.has_scaled() || options.model_parallel) return;
  throw misuse(fmt::format("{} was called before any loss was scaled", call),
               "call scaler.scale(loss).backward() first");
}

OptimizerGradients GradScaler::State::collect(torch::optim::Optimizer& optimizer,
                                              const FusedOptimizer* fused,
                                              const ModelParallelGroup& model) {
  auto gradients = gradients_of(optimizer, log->names(), fused);
  if (gradients.gradients.empty() && model.alone() && !options.model_parallel) {
    throw misuse(
        "no parameter of this optimizer has a gradient",
        "call backward() first, and give the optimizer parameters that the loss depends on");
  }
  return gradients;
}

void GradScaler::State::unscale(ScaledOptimizer& mine, const OptimizerGradients& gradients) {
  mine.finding = unscale_in_place(gradients, scale);
  mine.stage = ScalerStage::kUnscaled;
}

// The scale for gradients that are still scaled, and that the update will multiply.
ScaledGradients GradScaler::State::scaled_by(const OptimizerGradients& gradients) const {
  ScaledGradients scaled;
  if (scale.on_gpu() && !gradients.all_on_cpu()) {
    scaled.scale = scale.tensor();
  } else {
    if (!gradients.all_on_cpu()) {
      require_not_capturing("a GradScaler whose first loss was on the CPU",
                            "scale a loss of the GPU first");
    }
    scaled.inverse_scale = scale.inverse();
  }
  return scaled;
}

// All parts of a model skip a step together. Every rank makes the same calls, whatever it holds.
void GradScaler::State::agree(Finding& finding, const ModelParallelGroup& model) const {
  require_not_capturing("a GradScaler whose model is divided over ranks",
                        "leave the scaler out of captured steps");
  finding.overflowed_peer = model.first_other(finding.overflowed());
}

torch::Tensor GradScaler::State::step(torch::optim::Optimizer& optimizer, FusedOptimizer* fused,
                                      const StepExtras& extras) {
  ScaledOptimizer& mine = of(optimizer);
  const ModelParallelGroup model(optimizer.param_groups(), others(extras));
  const auto gradients = collect(optimizer, fused, model);
  const bool in_parts = !model.alone() || (model.same_bits() && extras.max_norm);
  ScaledGradients scaled;
  std::vector<torch::Tensor> squares;  // [part], of the gradients before unscaling
  if (mine.stage == ScalerStage::kReady && fused != nullptr) {
    // Only read the gradients: the update multiplies them, which saves a pass that writes.
    if (in_parts && extras.max_norm) {
      mine.finding = scan_parts(gradients, model, squares);
    } else {
      mine.finding = scan(gradients, extras.max_norm.has_value());
    }
    scaled = scaled_by(gradients);
  } else if (mine.stage == ScalerStage::kReady) {
    unscale(mine, gradients);
  } else if (in_parts && extras.max_norm) {
    scan_parts(gradients, model, squares);
  }

  if (fused != nullptr && !in_parts && gradients.all_on_one_gpu() &&
      mine.finding.on_gpus.size() == 1) {
    scaled.found_inf = mine.finding.on_gpus[0].found_inf;
    if (mine.stage == ScalerStage::kReady) {
      scaled.sum_of_squares = mine.finding.on_gpus[0].sum_of_squares;
    }
  } else {
    mine.finding.bring_to_host();
    if (!model.alone() && !is_planted(Mutation::kSkipNotAgreed)) agree(mine.finding, model);
    if (mine.finding.overflowed() && !is_planted(Mutation::kOverflowNotSkipped)) {
      mine.stage = ScalerStage::kStepped;
      if (auto* recorder = StepRecorder::of_process()) recorder->skip_update(optimizer);
      if (extras.zero_grad) drop_gradients(optimizer);
      return {};
    }
    const bool scanned = mine.stage == ScalerStage::kReady && !gradients.gradients.empty();
    if (extras.max_norm && in_parts) {
      scaled.sum_of_squares = model.sum(std::move(squares));
    } else if (extras.max_norm && scanned) {
      scaled.sum_of_squares = torch::full({}, mine.finding.sum_of_squares,
                                          gradients.gradients[0].options().dtype(torch::kDouble));
    }
  }
  torch::Tensor norm;
  if (fused != nullptr) {
    norm = fused->step_fused(scaled, extras);
  } else {
    optimizer.step();
  }
  mine.stage = ScalerStage::kStepped;
  return norm;
}

std::vector<Finding> GradScaler::State::take_findings() {
  std::vector<Finding> findings;
  for (auto& each : std::exchange(optimizers, {})) {
    if (each.stage == ScalerStage::kReady) continue;
    if (each.stage == ScalerStage::kUnscaled) {
      const ModelParallelGroup model(each.optimizer->param_groups(), options.model_parallel);
      if (!model.alone()) {
        each.finding.bring_to_host();
        agree(each.finding, model);
      }
    }
    findings.push_back(std::move(each.finding));
  }
  return findings;
}

void GradScaler::State::update(std::vector<Finding> findings, std::optional<double> new_scale) {
  bool overflowed = false;  // that the host knows of
  std::vector<GpuScan> scans;
  for (const auto& finding : findings) {
    overflowed = overflowed || finding.overflowed();
    scans.insert(scans.end(), finding.on_gpus.begin(), finding.on_gpus.end());
  }
  if (overflowed || !scale.on_gpu()) return update_on_host(std::move(findings), new_scale);
  scale.update(scans, new_scale);
  if (Capture* capture = Capture::current()) {
    capture->after_replay([ring = scale.ring(), shared = std::weak_ptr<SkipLog>(log)] {
      if (const auto alive = shared.lock()) alive->read(*ring);
    });
  } else {
    read_log();
  }
}

void GradScaler::State::update_on_host(std::vector<Finding> findings,
                                       std::optional<double> new_scale) {
  bool overflowed = false;
  for (auto& finding : findings) {
    finding.bring_to_host();
    overflowed = overflowed || finding.overflowed();
  }
  if (!overflowed) return scale.update(false, new_scale);
  const double before = scale.value();
  scale.update(true, new_scale);
  const double after = scale.value();
  read_log();  // earlier steps come first
  log->add({scale.updates(), log->overflowed_parameter(findings), before, after});
}

void GradScaler::State::read_log() const {
  if (scale.on_gpu()) log->read(*scale.ring());
}

GradScaler::GradScaler(const GradScalerOptions& options)
    : state_(std::make_unique<State>(options)) {}
GradScaler::~GradScaler() = default;
GradScaler::GradScaler(GradScaler&&) noexcept = default;
GradScaler& GradScaler::operator=(GradScaler&&) noexcept = default;

void GradScaler::name_parameters(const torch::nn::Module& module) {
  state_->log->names().learn(module);
}

torch::Tensor GradScaler::scale(const torch::Tensor& loss) {
  return is_enabled() ? state_->scale.multiply(loss) : loss;
}

void GradScaler::unscale_(torch::optim::Optimizer& optimizer) {
  if (!is_enabled()) return;
  state_->require_scaled_loss("unscale_()");
  ScaledOptimizer& mine = state_->of(optimizer);
  switch (mine.stage) {
    case ScalerStage::kReady:
      return state_->unscale(
          mine, state_->collect(
                    optimizer, nullptr,
                    ModelParallelGroup(optimizer.param_groups(), state_->options.model_parallel)));
    case ScalerStage::kUnscaled:
      throw misuse("unscale_() was called a second time since the last update()",
                   "divide the gradients once, when all of them have been accumulated");
    case ScalerStage::kStepped:
      throw misuse("unscale_() was called after step()",
                   "call unscale_(), then step(), then update()");
  }
}

torch::Tensor GradScaler::step(torch::optim::Optimizer& optimizer, const StepExtras& extras) {
  auto* fused = dynamic_cast<FusedOptimizer*>(&optimizer);
  if (fused == nullptr && asks_for_anything(extras)) {
    throw Error(Code::kUsage, "only lockstep's optimizers clip and clear gradients in step()",
                "use lockstep::Sgd, Adam or AdamW; or call unscale_(), clip_grad_norm_() and "
                "zero_grad() yourself");
  }
  if (!is_enabled()) {
    if (fused != nullptr) {
      StepExtras all = extras;
      all.model_parallel = state_->others(extras);
      return fused->step_fused({}, all);
    }
    optimizer.step();
    return {};
  }
  state_->require_scaled_loss("step()");
  if (state_->of(optimizer).stage == ScalerStage::kStepped) {
    throw misuse("step() was called a second time since the last update()",
                 "call update() once after all optimizers have stepped");
  }
  return state_->step(optimizer, fused, extras);
}

void GradScaler::update(std::optional<double> new_scale) {
  if (!is_enabled()) return;
  state_->require_scaled_loss("update()");
  if (new_scale) require_scale(*new_scale);
  auto findings = state_->take_findings();
  if (findings.empty() && !new_scale) {
    throw misuse("update() was called without a step() since the last one",
                 "call step() for each optimizer first; while gradients accumulate, call neither");
  }
  state_->update(std::move(findings), new_scale);
}

bool GradScaler::is_enabled() const {
  return state_->options.enabled;
}

bool GradScaler::any_enabled() {
  return enabled_scalers > 0;
}

double GradScaler::get_scale() const {
  return is_enabled() ? state_->scale.value() : 1;
}

std::vector<SkippedStep> GradScaler::skipped_steps() const {
  if (state_->scale.on_gpu()) {
    require_not_capturing("reading a GradScaler's skipped steps", "read them after the step");
    const c10::impl::VirtualGuardImpl gpu(c10::DeviceType::CUDA);
    gpu.getStream(state_->scale.tensor().device()).synchronize();
  }
  state_->read_log();
  return state_->log->skipped();
}

std::optional<GradScalerState> GradScaler::state_dict() const {
  if (!is_enabled()) return std::nullopt;
  return state_->scale.state();
}

void GradScaler::load_state_dict(const GradScalerState& state) {
  if (is_enabled()) state_->scale.load(state);
}

}  // namespace lockstep
