#include "lockstep/grad_scaler.hpp"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <utility>

#include "device/capture.hpp"
#include "lockstep/error.hpp"
#include "precision/loss_scale.hpp"
#include "precision/model_parallel.hpp"
#include "precision/optimizer_gradients.hpp"
#include "precision/skip_log.hpp"

namespace lockstep {
namespace {

/// Of one optimizer, from one update() to the next.
enum class Stage { kReady, kUnscaled, kStepped };

struct OptimizerState {
  const torch::optim::Optimizer* optimizer = nullptr;
  Stage stage = Stage::kReady;
  Finding finding = {};  // from kUnscaled on
};

GradScalerState initial(const GradScalerOptions& options) {
  return {options.init_scale, options.growth_factor, options.backoff_factor,
          options.growth_interval, 0};
}

Error misuse(const std::string& message, const std::string& help) {
  return {Code::kScalerMisuse, "GradScaler: " + message, help};
}

// Enabled scalers of this process.
std::atomic<int64_t> enabled_scalers{0};

bool asks_for_anything(const StepExtras& extras) {
  return extras.max_norm.has_value() || extras.zero_grad;
}

// What one scan of all gradients would find, and the sums of squares of each part of the model.
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
    squares.push_back(torch::full({}, found.sum_of_squares, torch::kDouble));
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

  OptimizerState& of(const torch::optim::Optimizer& optimizer);
  void require_scaled_loss(const char* call) const;
  std::optional<Communicator> others(const StepExtras& extras) const {
    return options.model_parallel ? options.model_parallel : extras.model_parallel;
  }
  OptimizerGradients collect(torch::optim::Optimizer& optimizer, const FusedOptimizer* fused,
                             const ModelParallelGroup& model);
  void unscale(OptimizerState& mine, const OptimizerGradients& gradients);
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
  std::shared_ptr<SkipLog> log;            // shared with captured steps, which read it on replay
  std::vector<OptimizerState> optimizers;  // in the order of their first call; none after update()
};

OptimizerState& GradScaler::State::of(const torch::optim::Optimizer& optimizer) {
  for (auto& each : optimizers) {
    if (each.optimizer == &optimizer) return each;
  }
  if (Capture* capture = Capture::current()) {  // what was begun in vain is as if it never was
    capture->if_dropped([this, alive = std::weak_ptr<SkipLog>(log)] {
      if (!alive.expired()) optimizers.clear();
    });
  }
  return optimizers.emplace_back(OptimizerState{&optimizer});
}

// Of ranks that hold parts of a model, only the last may have a loss.
void GradScaler::State::require_scaled_loss(const char* call) const {
  if (scale.placed() || options.model_parallel) return;
  throw misuse(fmt::format("{} before any loss was scaled", call),
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

void GradScaler::State::unscale(OptimizerState& mine, const OptimizerGradients& gradients) {
  mine.finding = unscale_in_place(gradients, scale);
  mine.stage = Stage::kUnscaled;
}

// Gradients as they are, for an update that multiplies as it goes.
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

// Parts of one model overflow together. The same calls whatever this rank holds, so that ranks
// agree.
void GradScaler::State::agree(Finding& finding, const ModelParallelGroup& model) const {
  require_not_capturing("a GradScaler whose model is divided over ranks",
                        "leave the scaler out of captured steps");
  finding.overflowed_peer = model.first_other(finding.overflowed());
}

torch::Tensor GradScaler::State::step(torch::optim::Optimizer& optimizer, FusedOptimizer* fused,
                                      const StepExtras& extras) {
  OptimizerState& mine = of(optimizer);
  const ModelParallelGroup model(optimizer.param_groups(), others(extras));
  const auto gradients = collect(optimizer, fused, model);
  ScaledGradients scaled;
  std::vector<torch::Tensor> squares;  // [part], of gradients as they are
  if (mine.stage == Stage::kReady && fused != nullptr) {
    // Only read here: the update multiplies as it goes, which saves a pass that writes.
    if (model.alone()) {
      mine.finding = scan(gradients, extras.max_norm.has_value());
    } else {
      mine.finding = scan_parts(gradients, model, squares);
    }
    scaled = scaled_by(gradients);
  } else if (mine.stage == Stage::kReady) {
    unscale(mine, gradients);
  } else if (!model.alone() && extras.max_norm) {
    scan_parts(gradients, model, squares);
  }

  if (fused != nullptr && model.alone() && gradients.all_on_one_gpu() &&
      mine.finding.on_gpus.size() == 1) {
    scaled.found_inf = mine.finding.on_gpus[0].found_inf;
    if (mine.stage == Stage::kReady) {
      scaled.sum_of_squares = mine.finding.on_gpus[0].sum_of_squares;
    }
  } else {
    mine.finding.bring_to_host();
    if (!model.alone()) agree(mine.finding, model);
    if (mine.finding.overflowed()) {
      mine.stage = Stage::kStepped;
      if (extras.zero_grad) drop_gradients(optimizer);
      return {};
    }
    const bool scanned = mine.stage == Stage::kReady && !gradients.gradients.empty();
    if (extras.max_norm && !model.alone()) {
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
  mine.stage = Stage::kStepped;
  return norm;
}

std::vector<Finding> GradScaler::State::take_findings() {
  std::vector<Finding> findings;
  for (auto& each : std::exchange(optimizers, {})) {
    if (each.stage == Stage::kReady) continue;
    if (each.stage == Stage::kUnscaled) {
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
  bool overflowed = false;  // as far as the host knows
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
  read_log();  // steps before this one come first
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
  OptimizerState& mine = state_->of(optimizer);
  switch (mine.stage) {
    case Stage::kReady:
      return state_->unscale(
          mine, state_->collect(
                    optimizer, nullptr,
                    ModelParallelGroup(optimizer.param_groups(), state_->options.model_parallel)));
    case Stage::kUnscaled:
      throw misuse("unscale_() a second time since the last update()",
                   "divide the gradients once, when all of them have been accumulated");
    case Stage::kStepped:
      throw misuse("unscale_() after step()", "call unscale_(), then step(), then update()");
  }
}

torch::Tensor GradScaler::step(torch::optim::Optimizer& optimizer, const StepExtras& extras) {
  auto* fused = dynamic_cast<FusedOptimizer*>(&optimizer);
  if (fused == nullptr && asks_for_anything(extras)) {
    throw Error(Code::kUsage, "only optimizers of lockstep clip and clear gradients in step()",
                "use lockstep::Sgd, Adam or AdamW; or call unscale_(), clip_grad_norm_() and "
                "zero_grad() yourself");
  }
  if (!is_enabled()) {
    if (fused != nullptr) return fused->step_fused({}, extras);
    optimizer.step();
    return {};
  }
  state_->require_scaled_loss("step()");
  if (state_->of(optimizer).stage == Stage::kStepped) {
    throw misuse("step() a second time since the last update()",
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
    throw misuse("update() without a step() since the last one",
                 "call step() for each optimizer first; while gradients accumulate, neither");
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
