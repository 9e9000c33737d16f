#include "lockstep/grad_scaler.hpp"

#include <fmt/format.h>

#include <utility>

#include "lockstep/error.hpp"
#include "precision/gradient_scan.hpp"
#include "precision/loss_scale.hpp"
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

bool asks_for_anything(const StepExtras& extras) {
  return extras.max_norm.has_value() || extras.zero_grad;
}

void drop_gradients(torch::optim::Optimizer& optimizer) {
  for (auto& group : optimizer.param_groups()) {
    for (auto& parameter : group.params()) parameter.mutable_grad().reset();
  }
}

}  // namespace

struct GradScaler::State {
  explicit State(const GradScalerOptions& given)
      : options(given), scale(initial(given)), log(given.on_skip) {}

  OptimizerState& of(const torch::optim::Optimizer& optimizer);
  void require_scaled_loss(const char* call) const;
  OptimizerGradients collect(torch::optim::Optimizer& optimizer);
  void unscale(OptimizerState& mine, const OptimizerGradients& gradients);
  void step(torch::optim::Optimizer& optimizer, FusedOptimizer* fused, const StepExtras& extras);
  double agree(Finding& finding, double sum_of_squares) const;
  std::vector<Finding> take_findings();
  void update_on_host(std::vector<Finding> findings, std::optional<double> new_scale);
  void update_on_gpu(std::vector<Finding> findings, std::optional<double> new_scale);

  GradScalerOptions options;
  LossScale scale;
  SkipLog log;
  std::vector<OptimizerState> optimizers;  // in the order of their first call; none after update()
  int64_t updates = 0;
};

OptimizerState& GradScaler::State::of(const torch::optim::Optimizer& optimizer) {
  for (auto& each : optimizers) {
    if (each.optimizer == &optimizer) return each;
  }
  return optimizers.emplace_back(OptimizerState{&optimizer});
}

// Of ranks that hold parts of a model, only the last may have a loss.
void GradScaler::State::require_scaled_loss(const char* call) const {
  if (scale.placed() || options.model_parallel) return;
  throw misuse(fmt::format("{} before any loss was scaled", call),
               "call scaler.scale(loss).backward() first");
}

OptimizerGradients GradScaler::State::collect(torch::optim::Optimizer& optimizer) {
  auto gradients = gradients_of(optimizer, log.names());
  if (gradients.gradients.empty() && !options.model_parallel) {
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

// Parts of one model overflow together: every rank tells whether its part did, and its share of the
// squared norm. Gives the whole sum. The same call whatever this rank holds, so that ranks agree.
double GradScaler::State::agree(Finding& finding, double sum_of_squares) const {
  const Communicator& comm = *options.model_parallel;
  const auto mine = torch::tensor({finding.overflowed() ? 1.0 : 0.0, sum_of_squares},
                                  torch::dtype(torch::kDouble));
  const auto all = torch::empty({comm.size(), 2}, torch::dtype(torch::kDouble));
  comm.all_gather(mine, all, {.label = "GradScaler's finding"});
  const auto rows = all.accessor<double, 2>();
  double sum = 0;
  for (int rank = 0; rank < comm.size(); ++rank) {
    sum += rows[rank][1];
    if (rows[rank][0] != 0 && rank != comm.rank() && finding.overflowed_peer < 0) {
      finding.overflowed_peer = rank;
    }
  }
  return sum;
}

void GradScaler::State::step(torch::optim::Optimizer& optimizer, FusedOptimizer* fused,
                             const StepExtras& extras) {
  OptimizerState& mine = of(optimizer);
  const auto gradients = collect(optimizer);
  ScaledGradients scaled;
  std::optional<double> sum;  // of squares
  if (mine.stage == Stage::kReady && fused != nullptr && gradients.all_on_cpu) {
    // Only read here: the update multiplies as it goes, which saves a pass that writes.
    const GradientScan scan = scan_gradients(gradients.gradients);
    mine.finding = {};
    mine.finding.places = gradients.places;
    mine.finding.first_nonfinite = scan.first_nonfinite;
    scaled.inverse_scale = scale.inverse();
    sum = scan.sum_of_squares;
  } else if (mine.stage == Stage::kReady) {
    unscale(mine, gradients);
  }

  const auto& on_gpus = mine.finding.on_gpus;
  const bool gpu_decides = fused != nullptr && !options.model_parallel && on_gpus.size() == 1 &&
                           on_gpus[0].gradients.size() == gradients.gradients.size();
  if (gpu_decides) {
    scaled.found_inf = on_gpus[0].found_inf;
  } else {
    mine.finding.bring_to_host();
    if (options.model_parallel) {
      if (!sum) sum = extras.max_norm ? sum_of_squares(gradients) : 0;
      sum = agree(mine.finding, *sum);
    }
    if (mine.finding.overflowed()) {
      mine.stage = Stage::kStepped;
      if (extras.zero_grad) drop_gradients(optimizer);
      return;
    }
  }
  if (sum && extras.max_norm && !gradients.gradients.empty()) {
    scaled.sum_of_squares =
        torch::full({}, *sum, gradients.gradients[0].options().dtype(torch::kDouble));
  }
  if (fused != nullptr) {
    fused->step_fused(scaled, extras);
  } else {
    optimizer.step();
  }
  mine.stage = Stage::kStepped;
}

std::vector<Finding> GradScaler::State::take_findings() {
  std::vector<Finding> findings;
  for (auto& each : std::exchange(optimizers, {})) {
    if (each.stage == Stage::kReady) continue;
    if (each.stage == Stage::kUnscaled && options.model_parallel) {
      each.finding.bring_to_host();
      agree(each.finding, 0);
    }
    findings.push_back(std::move(each.finding));
  }
  return findings;
}

void GradScaler::State::update_on_host(std::vector<Finding> findings,
                                       std::optional<double> new_scale) {
  bool overflowed = false;
  for (auto& finding : findings) {
    finding.bring_to_host();
    overflowed = overflowed || finding.overflowed();
  }
  const double before = overflowed ? scale.value() : 0;
  if (new_scale) {
    scale.set(*new_scale);
  } else {
    scale.update(overflowed);
  }
  if (overflowed) log.add({updates, log.overflowed_parameter(findings), before, scale.value()});
}

void GradScaler::State::update_on_gpu(std::vector<Finding> findings,
                                      std::optional<double> new_scale) {
  const torch::Device home = scale.tensor().device();
  std::vector<torch::Tensor> facts;  // as SkipLog::follow takes them
  torch::Tensor found;
  for (const auto& finding : findings) {
    for (const auto& gpu : finding.on_gpus) {
      facts.push_back(gpu.found_inf.to(home, /*non_blocking=*/true));
      found = found.defined() ? found + facts.back() : facts.back();
      facts.push_back(gpu.first.to(home, /*non_blocking=*/true));
    }
  }
  facts.push_back(scale.tensor().clone());
  if (new_scale) {
    scale.set(*new_scale);
  } else {
    scale.update(found);
  }
  facts.push_back(scale.tensor());
  log.follow(updates, std::move(findings), at::stack(facts));
}

GradScaler::GradScaler(const GradScalerOptions& options)
    : state_(std::make_unique<State>(options)) {}
GradScaler::~GradScaler() = default;
GradScaler::GradScaler(GradScaler&&) noexcept = default;
GradScaler& GradScaler::operator=(GradScaler&&) noexcept = default;

void GradScaler::name_parameters(const torch::nn::Module& module) {
  state_->log.names().learn(module);
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
      return state_->unscale(mine, state_->collect(optimizer));
    case Stage::kUnscaled:
      throw misuse("unscale_() a second time since the last update()",
                   "divide the gradients once, when all of them have been accumulated");
    case Stage::kStepped:
      throw misuse("unscale_() after step()", "call unscale_(), then step(), then update()");
  }
}

void GradScaler::step(torch::optim::Optimizer& optimizer, const StepExtras& extras) {
  auto* fused = dynamic_cast<FusedOptimizer*>(&optimizer);
  if (fused == nullptr && asks_for_anything(extras)) {
    throw Error(Code::kUsage, "only optimizers of lockstep clip and clear gradients in step()",
                "use lockstep::Sgd or lockstep::AdamW; or call unscale_(), clip_grad_norm_() and "
                "zero_grad() yourself");
  }
  if (!is_enabled()) {
    if (fused != nullptr) {
      fused->step_fused({}, extras);
    } else {
      optimizer.step();
    }
    return;
  }
  state_->require_scaled_loss("step()");
  if (state_->of(optimizer).stage == Stage::kStepped) {
    throw misuse("step() a second time since the last update()",
                 "call update() once after all optimizers have stepped");
  }
  state_->step(optimizer, fused, extras);
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
  ++state_->updates;
  bool gpu_only = state_->scale.on_gpu();
  bool any_gpu = false;
  for (const auto& finding : findings) {
    gpu_only = gpu_only && !finding.overflowed();
    any_gpu = any_gpu || !finding.on_gpus.empty();
  }
  if (gpu_only && any_gpu) {
    state_->update_on_gpu(std::move(findings), new_scale);
  } else {
    state_->update_on_host(std::move(findings), new_scale);
  }
  state_->log.collect(/*wait=*/false);
}

bool GradScaler::is_enabled() const {
  return state_->options.enabled;
}

double GradScaler::get_scale() const {
  return is_enabled() ? state_->scale.value() : 1;
}

std::vector<SkippedStep> GradScaler::skipped_steps() const {
  state_->log.collect(/*wait=*/true);
  return state_->log.skipped();
}

std::optional<GradScalerState> GradScaler::state_dict() const {
  if (!is_enabled()) return std::nullopt;
  return state_->scale.state();
}

void GradScaler::load_state_dict(const GradScalerState& state) {
  if (is_enabled()) state_->scale.load(state);
}

}  // namespace lockstep
