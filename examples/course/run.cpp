#include "course/run.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <string_view>
#include <unordered_set>
#include <utility>

#include "course/course.hpp"
#include "course/pipeline_meter.hpp"
#include "course/report.hpp"
#include "lockstep/clock.hpp"
#include "lockstep/error.hpp"
#include "lockstep/table.hpp"
#include "lockstep/tensor_file.hpp"
#include "lockstep/tensor_text.hpp"
#include "lockstep/units.hpp"
#include "lockstep/version.hpp"

namespace course {
namespace {

constexpr int64_t kFewSteps = 12;

// Why a step on a GPU is not captured, by --capture and the other flags; "" if it is.
std::string why_not_captured(const Options& options) {
  if (options.capture == "on") return "";
  if (options.capture == "off") return "--capture off";
  if (!options.never_captured.empty()) return options.never_captured;
  const std::string seen = host_work_of_steps(options);
  if (!seen.empty()) return fmt::format("{} looks into every step", seen);
  if (options.steps < kFewSteps) return fmt::format("fewer than {} steps", kFewSteps);
  return "";
}

// --capture. Asking for it without a GPU is an Error.
lockstep::CaptureOptions capture_options(const Options& options, const lockstep::Device& device) {
  const bool on_gpu = device.plan().kind == lockstep::DeviceKind::kCuda;
  if (options.capture == "on" && !on_gpu) {
    throw lockstep::Error(lockstep::Code::kUsage,
                          fmt::format("--capture on: {} is not a GPU", device.name()),
                          "leave --capture out, or name a GPU with --devices");
  }
  return {.enabled = on_gpu && why_not_captured(options).empty(), .warmup = kCaptureWarmup};
}

// From now on the gradient that flows back through `out` has one infinite element, as if fp16 had
// overflowed.
void plant_overflow(const torch::Tensor& out) {
  out.register_hook([](const torch::Tensor& gradient) {
    torch::Tensor spoiled = gradient.clone();
    spoiled.view(-1)[0].fill_(std::numeric_limits<float>::infinity());
    return spoiled;
  });
}

constexpr double kScale = 65536;                 // GradScaler's initial scale
const double kLostBelow = std::ldexp(1.0, -25);  // fp16 rounds this and less to 0
constexpr double kOverflowsFrom = 65520;         // fp16 rounds this and more to infinity

using torch::autograd::Node;

// Whether this is the backward of a conversion to a lower precision. The gradient that flows into a
// backward node has the dtype of what its forward made.
bool is_low_precision_copy(const Node& node) {
  if (node.name().find("ToCopy") == std::string::npos) return false;
  const auto dtype = node.input_metadata(0).dtype().toScalarType();
  return dtype == torch::kBFloat16 || dtype == torch::kHalf;
}

// Only changes of view may lie between a weight and its copy. 0: it is not the copy of a weight.
int64_t elements_of_weight(const Node& copy) {
  const Node* node = &copy;
  while (node != nullptr && node->num_outputs() == 1) {
    node = node->next_edge(0).function.get();
    const auto* end = dynamic_cast<const torch::autograd::AccumulateGrad*>(node);
    if (end != nullptr) return end->variable.numel();
  }
  return 0;
}

int64_t state_bytes(const torch::optim::Optimizer& optimizer) {
  int64_t bytes = 0;
  const auto add = [&](const torch::Tensor& tensor) {
    if (tensor.defined()) bytes += static_cast<int64_t>(tensor.nbytes());
  };
  for (const auto& [parameter, state] : optimizer.state()) {
    if (const auto* sgd = dynamic_cast<const torch::optim::SGDParamState*>(state.get())) {
      add(sgd->momentum_buffer());
    }
    if (const auto* adamw = dynamic_cast<const torch::optim::AdamWParamState*>(state.get())) {
      add(adamw->exp_avg());
      add(adamw->exp_avg_sq());
    }
  }
  return bytes;
}

// Bytes of the low-precision copies of weights that autocast made for this loss.
int64_t low_precision_bytes(const torch::Tensor& loss) {
  int64_t bytes = 0;
  std::unordered_set<const Node*> seen;
  std::vector<const Node*> to_visit = {loss.grad_fn().get()};
  while (!to_visit.empty()) {
    const Node* node = to_visit.back();
    to_visit.pop_back();
    if (node == nullptr || !seen.insert(node).second) continue;
    if (is_low_precision_copy(*node)) bytes += 2 * elements_of_weight(*node);
    for (const auto& edge : node->next_edges()) to_visit.push_back(edge.function.get());
  }
  return bytes;
}

// The net's gradients, divided by the scale they carry.
lockstep::GradientCheck check_gradients(const torch::nn::Module& net, double scale) {
  const torch::NoGradGuard no_grad;
  lockstep::GradientCheck check;
  double squares = 0;
  double zeros = 0;
  double lost = 0;
  double lost_scaled = 0;
  double overflow_scaled = 0;
  const auto count = [](const torch::Tensor& which) {
    return static_cast<double>(which.sum().item<int64_t>());
  };
  for (const auto& parameter : net.parameters()) {
    if (!parameter.grad().defined()) continue;
    const torch::Tensor size = parameter.grad().abs() / scale;
    squares += size.square().sum(torch::kDouble).item<double>();
    zeros += count(size == 0);
    lost += count((size > 0) & (size <= kLostBelow));
    lost_scaled += count((size > 0) & (size <= kLostBelow / kScale));
    overflow_scaled += count(size >= kOverflowsFrom / kScale);
    check.count += size.numel();
  }
  const auto elements = static_cast<double>(std::max<int64_t>(check.count, 1));
  check.norm = std::sqrt(squares);
  check.zero_share = zeros / elements;
  check.fp16_lost = lost / elements;
  check.fp16_lost_scaled = lost_scaled / elements;
  check.fp16_overflow_scaled = overflow_scaled / elements;
  return check;
}

// What the peak of a device consists of; activations are the rest. If there are masters, they are
// the weights, and the net holds their low-precision copies.
lockstep::MemorySplit split_memory(const torch::nn::Module& net,
                                   const torch::optim::Optimizer& optimizer, int64_t low_precision,
                                   int64_t peak_bytes,
                                   const std::optional<lockstep::MasterWeights>& masters) {
  lockstep::MemorySplit split;
  split.low_precision = low_precision;
  for (const auto& parameter : net.parameters()) {
    const auto bytes = static_cast<int64_t>(parameter.nbytes());
    (masters && masters->holds(parameter) ? split.low_precision : split.weights) += bytes;
    if (parameter.requires_grad()) split.gradients += bytes;
  }
  if (masters) split.weights += masters->bytes();
  for (const auto& buffer : net.buffers()) split.weights += static_cast<int64_t>(buffer.nbytes());
  split.optimizer_state = state_bytes(optimizer);
  const int64_t known =
      split.weights + split.gradients + split.optimizer_state + split.low_precision;
  split.activations = std::max<int64_t>(0, peak_bytes - known);
  return split;
}

// `net` may hold low-precision copies of the masters' weights.
lockstep::ModelRecord describe_net(const torch::nn::Module& net, const Options& options,
                                   const std::optional<lockstep::MasterWeights>& masters) {
  lockstep::ModelRecord model{.description = describe_model(options), .parameters = 0, .dtype = {}};
  for (const auto& parameter : net.parameters()) {
    if (parameter.requires_grad()) model.parameters += parameter.numel();
  }
  const auto parameters = net.parameters();
  if (parameters.empty()) return model;
  const std::string dtype = lockstep::dtype_text(parameters.front().scalar_type());
  model.dtype = masters ? fmt::format("float32, copied to {}", dtype) : dtype;
  return model;
}

// Whether a line on this stream can be written over.
bool can_rewrite(std::FILE* stream) {
  const char* term = std::getenv("TERM");
  return ::isatty(fileno(stream)) == 1 && term != nullptr && std::string_view(term) != "dumb";
}

std::string for_terminal(const lockstep::Table& table, std::FILE* stream) {
  const int descriptor = fileno(stream);
  return table.terminal(lockstep::may_style(descriptor), lockstep::terminal_width(descriptor));
}

// A run whose last loss is not finite has learnt nothing, which must not go unnoticed.
void warn_of_losses(const lockstep::RunRecord& record) {
  const auto& losses = record.losses;
  const auto finite = [](double loss) { return std::isfinite(loss); };
  const auto last = std::find_if(losses.rbegin(), losses.rend(), finite);
  if (last == losses.rbegin()) return;
  std::fflush(stdout);
  const std::string text =
      fmt::format("warning[{}]: the loss is not finite from step {} to the last\n",
                  lockstep::code_name(lockstep::Code::kNonfinite),
                  record.resumed_after + (losses.rend() - last) + 1);
  std::fputs(text.c_str(), stderr);  // a failure is ignored: training has ended all the same
}

}  // namespace

Run::Run(const Options& options, const lockstep::Devices& devices)
    : Run(options, devices, nullptr) {}

Run::Run(const Options& options, const lockstep::World& world, std::vector<int64_t> split)
    : Run(options, world.devices(), &world) {
  record_.split = std::move(split);
}

Run::Run(const Options& options, const lockstep::Devices& devices, const lockstep::World* world)
    : options_(options),
      devices_(devices),
      world_(world),
      rank_(world != nullptr ? world->rank() : 0),
      rewrites_(can_rewrite(options.out())),
      capture_(capture_options(options, devices[0])),
      meter_(options.program, devices, options.steps,
             world != nullptr ? world->board_page() : std::nullopt) {
  if (options.checkpoint) checkpoint_.emplace(options, world);
  if (options.never_captured.empty()) {
    captured_.emplace(
        [this](const std::vector<torch::Tensor>& inputs) { return (*train_)(inputs); }, capture_);
  }
  record_.program = options.program;
  record_.options = options.as_text();
  record_.host = lockstep::describe_host();
  record_.versions = lockstep::describe_versions();
  record_.accum_steps = options.accum_steps;
  if (options.has_amp) record_.amp = options.amp;
  record_.effective_batch = options.batch * options.accum_steps;
  record_.split = {options.batch};
  if (!options.trace.empty()) start_trace();
  if (prints()) print_start_line();
}

// The devices and the model outlive the timeline that they record to.
Run::~Run() {
  for (size_t i = 0; i < devices_.size(); ++i) devices_[i].record_to(nullptr, rank_);
  if (sync_ != nullptr) sync_->record_to(nullptr, rank_, 0);
}

void Run::start_trace() {
  trace_.enable();
  trace_.name_rank(rank_, options_.program);
  for (size_t i = 0; i < devices_.size(); ++i) {
    trace_.name_device(rank_, static_cast<int>(i), devices_[i].name());
    devices_[i].record_to(&trace_, rank_);
  }
  // The clocks of hosts differ: this is a moment that all ranks share.
  if (world_ != nullptr && !world_->environment().one_host()) {
    world_->comm().barrier({.label = "clocks of the timeline"});
    clock_ns_ = lockstep::monotonic_ns();
  }
}

void Run::watch(lockstep::GradientSync& sync) {
  sync_ = &sync;
  meter_.watch(sync);
  if (trace_.enabled()) sync.record_to(&trace_, rank_, static_cast<int>(devices_.size()));
}

void Run::watch(const lockstep::Pipeline& pipeline, HybridFacts facts) {
  stages_ = std::make_unique<PipelineMeter>(pipeline, std::move(facts), options_, rank_);
}

void Run::print_start_line() const {
  std::vector<std::string> names;
  for (size_t i = 0; i < devices_.size(); ++i) {
    const auto& plan = devices_[i].plan();
    const bool shares_gpu = plan.kind == lockstep::DeviceKind::kCuda && plan.shared_by > 1;
    names.push_back(
        fmt::format("{} ({}{})", plan.name(), plan.physical(), shares_gpu ? ", shared" : ""));
  }
  const std::string where =
      world_ == nullptr
          ? fmt::format("devices: {} | threads per device: {}", fmt::join(names, ", "),
                        devices_[0].plan().threads)
          : fmt::format("ranks: {} | backend: {} | threads per rank: {}", world_->size(),
                        world_->comm().backend(), devices_[0].plan().threads);
  fmt::print(options_.out(), "lockstep {} | {} | {} | libtorch {}\n", lockstep::kVersion,
             options_.program, where, record_.versions.at("libtorch"));
}

int64_t Run::resume() {
  if (!checkpoint_) return 0;
  resumed_after_ = checkpoint_->resume();
  meter_.resume_after(resumed_after_);
  losses_computed_ = resumed_after_ * losses_in_step();
  return resumed_after_;
}

void Run::save_checkpoint() {
  if (checkpoint_) preempted_ = !checkpoint_->step(steps_done());
}

void Run::step(
    const Batch& batch,
    const std::function<torch::Tensor(const torch::Tensor&, const torch::Tensor&)>& train) {
  meter_.begin_step();
  end_step(train_on({batch.x, batch.y}, [&](const std::vector<torch::Tensor>& inputs) {
    begin_forward();
    return train(inputs[0], inputs[1]);
  }));
  save_checkpoint();
}

void Run::step(const StepBatches& batches,
               const std::function<torch::Tensor(const StepBatches&)>& train) {
  meter_.begin_step();
  const auto inputs = capture_.enabled ? batches.on_device() : batches.tensors();
  end_step(train_on(inputs, [&](const std::vector<torch::Tensor>& given) {
    return train(StepBatches(given, batches.device(), [this] { begin_forward(); }));
  }));
  save_checkpoint();
}

torch::Tensor Run::train_on(const std::vector<torch::Tensor>& inputs, const StepFunction& train) {
  if (!captured_) return train(inputs);
  train_ = &train;
  return (*captured_)(inputs);
}

void Run::begin_forward() {
  if (sync_ != nullptr) begin_phase("forward");
}

// Only the last rank plants an overflow, so that the others must learn of it.
void Run::before_loss(const torch::Tensor& out) {
  const int64_t computed = ++losses_computed_;
  if (computed == options_.overflow_at * losses_in_step() && world_->rank() + 1 == world_->size()) {
    plant_overflow(out);
  }
}

int64_t Run::losses_in_step() const {
  const int64_t parts =
      options_.virtual_shards > 0 ? options_.virtual_shards / world_->size() : int64_t{1};
  return options_.accum_steps * parts;
}

void Run::before_backward(const torch::Tensor& loss) {
  if (!low_precision_bytes_) low_precision_bytes_ = low_precision_bytes(loss);
  begin_phase("backward");
}

torch::Tensor MseLoss::operator()(const torch::Tensor& out, const torch::Tensor& y) const {
  run_.before_loss(out);
  const auto loss = torch::mse_loss(out, y);
  run_.before_backward(loss);
  return loss;
}

void Run::before_update() {
  const bool first = resumed_after_ == 0 && !record_.gradient_check;
  if (first && (options_.has_accumulation || options_.has_amp)) {
    record_.gradient_check = check_gradients(*net_, scaler_ != nullptr ? scaler_->get_scale() : 1);
  }
  begin_phase("optimizer");
}

bool Run::prints_micro_steps(int64_t step) const {
  return options_.has_accumulation && !options_.quiet &&
         step < resumed_after_ + options_.print_steps;
}

void Run::after_micro_step(int64_t micro) {
  const int64_t step = steps_done();
  if (!prints_micro_steps(step)) return;
  const lockstep::DdpStats stats = sync_->stats();
  const int64_t all_reduces =
      stats.all_reduces - std::exchange(printed_reduces_, stats.all_reduces);
  const int64_t bytes = stats.bytes - std::exchange(printed_bytes_, stats.bytes);
  const std::string what =
      world_->size() == 1 ? "one rank: there is nothing to synchronise"
      : all_reduces == 0  ? "not synchronised: gradients are added up on this rank"
                          : fmt::format("synchronised: {} all-reduce{}, {}", all_reduces,
                                       all_reduces == 1 ? "" : "s", lockstep::format_bytes(bytes));
  calls_text_ += fmt::format("step {} | rank {} | micro-step {} of {} | {}\n", step + 1, rank_,
                             micro + 1, options_.accum_steps, what);
}

// What the optimizer did at the end of a step, as a line for people. A scaler counts the steps of
// this process.
std::string Run::update_line(int64_t step) const {
  const bool skipped = scaler_ != nullptr && !scaler_->skipped_steps().empty() &&
                       scaler_->skipped_steps().back().step + resumed_after_ == step + 1;
  const std::string rows =
      fmt::format("{} micro-step{} and {} rows", options_.accum_steps,
                  options_.accum_steps == 1 ? "" : "s", options_.batch * options_.accum_steps);
  return fmt::format("step {} | rank {} | update | {}\n", step + 1, rank_,
                     skipped ? "skipped by the scaler: the weights stay as they were"
                             : "the weights changed once, for " + rows);
}

void Run::after_pipeline_step(int64_t micro_step) {
  stages_->note_call();
  if (trace_.enabled()) trace_pipeline_step();
  const int64_t step = steps_done();
  if (!prints_micro_steps(step)) return;
  calls_text_ +=
      describe_call(stages_->pipeline(), stages_->facts().plan, rank_, {step, micro_step},
                    options_.accum_steps, meter_.last_step_started_ns());
}

// After the step: what ranks send each other for it must not count as the step's time.
void Run::print_calls() {
  const int64_t step = steps_done() - 1;
  if (!prints_micro_steps(step)) return;
  if (!stages_) calls_text_ += update_line(step);
  close_line();
  print_from_all_ranks(*world_, options_, std::exchange(calls_text_, ""));
}

void Run::trace_pipeline_step() {
  const auto& trace = stages_->pipeline().last_step();
  const bool over_ranks = stages_->facts().plan.over_ranks;
  for (const auto& [action, pipeline_rank, begin_ns, end_ns] : trace.actions) {
    trace_.add({.rank = rank_,
                .device = over_ranks ? 0 : pipeline_rank,
                .name = fmt::format("{}{}", letter(action.kind), action.micro_batch),
                .begin_ns = begin_ns,
                .end_ns = end_ns,
                .args = {{"action", action_name(action.kind)},
                         {"stage", std::to_string(action.stage)},
                         {"micro_batch", std::to_string(action.micro_batch)}}});
  }
  for (const auto& sync : trace.syncs) {
    trace_.add({.rank = rank_,
                .device = static_cast<int>(devices_.size()),
                .name = fmt::format("synchronise stage {}", sync.stage),
                .begin_ns = sync.begin_ns,
                .end_ns = sync.end_ns,
                .args = {{"all_reduces", std::to_string(sync.all_reduces)},
                         {"bytes", std::to_string(sync.bytes)}}});
  }
}

void Run::end_step(const torch::Tensor& loss) {
  meter_.end_step(loss);
  end_phase(meter_.last_step_ended_ns());
  if (trace_.enabled() && sync_ != nullptr) trace_wait();
  if (stages_) stages_->end_step(/*timed=*/!meter_.step_ms().empty());
  print_calls();
  if (!prints()) return;
  if (scaler_ != nullptr) print_skipped_steps();
  const int64_t done = steps_done();
  const bool first = meter_.losses().size() == 1;
  const int64_t now_ns = lockstep::monotonic_ns();
  const int64_t pause_ns = rewrites_ ? 100'000'000 : 2'000'000'000;
  if (first) first_step_ended_ns_ = now_ns;
  if (first || done == options_.steps || now_ns - last_print_ns_ > pause_ns) {
    print_progress();
    last_print_ns_ = now_ns;
  }
}

void Run::begin_phase(const char* name) {
  if (!trace_.enabled()) return;
  const int64_t now_ns = lockstep::monotonic_ns();
  end_phase(now_ns);
  phase_ = name;
  phase_began_ns_ = now_ns;
}

void Run::end_phase(int64_t at_ns) {
  if (phase_ == nullptr) return;
  trace_.add({.rank = rank_,
              .device = 0,
              .name = std::exchange(phase_, nullptr),
              .begin_ns = phase_began_ns_,
              .end_ns = at_ns});
}

// Draws the end of a backward that had all its gradients and only waited for buckets. If a GPU's
// stream waits instead, the host, whose phases these are, goes on.
void Run::trace_wait() {
  if (sync_->comm().side_stream()) return;
  const lockstep::DdpStats stats = sync_->stats();
  if (stats.backward_started_ns < meter_.last_step_started_ns()) return;  // not in this step
  int64_t averaged_ns = 0;
  for (const auto& bucket : stats.last_step)
    averaged_ns = std::max(averaged_ns, bucket.finished_ns);
  if (averaged_ns <= stats.backward_finished_ns) return;
  trace_.add({.rank = rank_,
              .device = 0,
              .name = "wait for buckets",
              .begin_ns = stats.backward_finished_ns,
              .end_ns = averaged_ns});
}

// A line that rewrites itself on a terminal, and a line of its own elsewhere.
void Run::print_progress() {
  const int64_t done = steps_done();
  const int64_t timed = done - resumed_after_ - 1;
  const bool of_one = world_ == nullptr || world_->size() == 1;
  std::string line = fmt::format("step {}/{} | loss{} {:.6f} | {}", done, options_.steps,
                                 of_one ? "" : " of rank 0", meter_.losses().back(),
                                 lockstep::format_seconds(meter_.last_step_ms() * 1e-3));
  const bool last = done == options_.steps;
  if (rewrites_ && !last && timed > 0) {
    const double step_s = static_cast<double>(lockstep::monotonic_ns() - first_step_ended_ns_) *
                          1e-9 / static_cast<double>(timed);
    line +=
        fmt::format(" | {:.3g} steps/s | {} left", 1 / step_s,
                    lockstep::format_seconds(step_s * static_cast<double>(options_.steps - done)));
  }
  if (!rewrites_) {
    fmt::print(options_.out(), "{}\n", line);
  } else {
    const size_t width = lockstep::terminal_width(fileno(options_.out()));
    fmt::print(options_.out(), "\r\033[K{}{}", lockstep::clip_text(line, width - 1),
               last ? "\n" : "");
  }
  line_is_open_ = rewrites_ && !last;
  std::fflush(options_.out());
}

// Ends the line that rewrites itself, before other text.
void Run::close_line() {
  if (line_is_open_) fmt::print(options_.out(), "\n");
  line_is_open_ = false;
}

void Run::print_skipped_steps() {
  const auto skipped = scaler_->skipped_steps();
  for (; skipped_printed_ < skipped.size(); ++skipped_printed_) {
    const auto& each = skipped[skipped_printed_];
    close_line();
    fmt::print(options_.out(),
               "step {} skipped: the gradient of {} is not finite; scale {:g} -> {:g}\n",
               each.step + resumed_after_, each.parameter, each.scale_before, each.scale_after);
  }
}

void Run::note_precision() {
  if (scaler_ == nullptr || !scaler_->is_enabled()) return;
  record_.scale = scaler_->get_scale();
  for (const auto& each : scaler_->skipped_steps()) {
    record_.skipped_steps.push_back(
        {each.step + resumed_after_, each.parameter, each.scale_before, each.scale_after});
  }
}

void Run::note_capture() {
  if (!captured_ || !devices_.is_cuda()) return;
  const lockstep::CaptureStats stats = captured_->stats();
  const std::string by_flags = why_not_captured(options_);
  record_.capture = {.captured = captured_->replayed(),
                     .reason = by_flags.empty() ? captured_->why_not() : by_flags,
                     .graphs = stats.graphs,
                     .replays = stats.replays,
                     .memory_bytes = stats.memory_bytes};
}

void Run::note_replicas() {
  if (options_.shapes == nullptr) return;
  for (size_t i = 0; i < devices_.size(); ++i) {
    for (const auto& replica : options_.shapes->replicas) {
      if (replica.device == devices_[i].name()) record_.replicas.push_back(replica);
    }
  }
}

void Run::complete_record(const torch::nn::Module& net,
                          const std::optional<lockstep::MasterWeights>& masters) {
  if (checkpoint_) checkpoint_->save_last(steps_done());
  record_.model = describe_net(net, options_, masters);
  note_replicas();
  meter_.fill(record_);
  if (stages_ && !record_.losses.empty()) stages_->fill(record_);
  note_precision();
  note_capture();
}

void Run::finish(const torch::nn::Module& net) {
  complete_record(net, std::nullopt);
  write_results(net);
}

void Run::finish(torch::nn::Module& net, const torch::optim::Optimizer& optimizer,
                 const std::optional<lockstep::MasterWeights>& masters) {
  complete_record(net, masters);
  record_.memory = split_memory(net, optimizer, low_precision_bytes_.value_or(0),
                                record_.devices.front().peak_bytes, masters);
  if (masters) masters->restore(net);  // float32 weights are saved
  write_results(net);
}

void Run::write_results(const torch::nn::Module& net) {
  if (world_ == nullptr) {
    finish_process(net);
  } else {
    finish_job(net);
  }
  if (checkpoint_) checkpoint_->finish();
}

void Run::finish_process(const torch::nn::Module& net) {
  if (!options_.save.empty()) lockstep::save_weights(net, options_.save);
  if (!options_.trace.empty()) trace_.write(options_.trace);
  if (prints() && !record_.losses.empty()) {
    fmt::print(options_.out(), "{}", for_terminal(device_table(record_), options_.out()));
  }
  if (!options_.json.empty()) lockstep::write_record(record_, options_.json);
  warn_of_losses(record_);
}

void Run::finish_job(const torch::nn::Module& net) {
  RankReport mine{record_, meter_.step_ms(), trace_.spans(), clock_ns_};
  const bool trained = !record_.losses.empty();  // false: a checkpoint had the last step
  if (stages_ && trained) mine.pipeline = stages_->report();
  const auto reports = gather_reports(world_->comm(), mine);
  if (rank_ != 0) return;
  lockstep::RunRecord job = job_record(reports);
  if (stages_ && trained) {
    const HybridFacts& facts = stages_->facts();
    job.pipeline = job_pipeline(reports, facts.plan, facts.links.pipeline);
  }
  job.nonfinite = std::count_if(job.losses.begin(), job.losses.end(),
                                [](double loss) { return !std::isfinite(loss); });
  if (!options_.save.empty()) lockstep::save_weights(net, options_.save);
  if (!options_.trace.empty()) {
    lockstep::Trace whole;
    fill_job_trace(reports, whole);
    whole.write(options_.trace);
  }
  if (prints() && trained) {
    std::FILE* out = options_.out();
    fmt::print(out, "{}", for_terminal(rank_table(job, reports), out));
    if (job.pipeline) {
      fmt::print(out, "{}{}", for_terminal(stage_table(*job.pipeline), out),
                 for_terminal(axis_table(*job.pipeline), out));
    }
  }
  if (!options_.json.empty()) lockstep::write_record(job, options_.json);
  warn_of_losses(job);
}

}  // namespace course
