#include "course/run.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "course/hybrid_text.hpp"
#include "course/pipeline_job.hpp"
#include "course/pipeline_meter.hpp"
#include "course/result_table.hpp"
#include "course/setup.hpp"
#include "course/step_facts.hpp"
#include "lockstep/clock.hpp"
#include "lockstep/engine.hpp"
#include "lockstep/error.hpp"
#include "lockstep/tensor_file.hpp"
#include "lockstep/units.hpp"
#include "lockstep/version.hpp"

namespace course {
namespace {

// A run that ends with a loss that is not finite has learnt nothing: that must not pass unseen.
void warn_of_losses(const std::vector<double>& losses) {
  const auto finite = [](double loss) { return std::isfinite(loss); };
  const auto last = std::find_if(losses.rbegin(), losses.rend(), finite);
  if (last == losses.rbegin()) return;
  std::fflush(stdout);
  const std::string text =
      fmt::format("warning[{}]: the loss is not finite from step {} to the last\n",
                  lockstep::code_name(lockstep::Code::kNonfinite), losses.rend() - last + 1);
  std::fputs(text.c_str(), stderr);  // where nobody reads it, training has ended all the same
}

}  // namespace

Run::Run(const Options& options, const lockstep::Devices& devices)
    : Run(options, devices, nullptr) {}

Run::Run(const Options& options, const lockstep::World& world)
    : Run(options, world.devices(), &world) {}

Run::Run(const Options& options, const lockstep::Devices& devices, const lockstep::World* world)
    : options_(options),
      devices_(devices),
      world_(world),
      rank_(world != nullptr ? world->rank() : 0),
      meter_(options.program, devices, options.steps,
             world != nullptr ? world->board_page() : std::nullopt) {
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

// The devices and the model outlive the timeline they record to.
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
  // Hosts count their time from different moments: here is one that all ranks share.
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

void Run::note_call(int64_t micro_step) {
  stages_->note_call();
  if (trace_.enabled()) trace_call();
  const auto step = static_cast<int64_t>(meter_.losses().size());
  if (options_.quiet || step >= options_.print_steps) return;
  fmt::print(options_.out(), "{}",
             describe_call(stages_->pipeline(), stages_->facts().plan, rank_, {step, micro_step},
                           options_.accum_steps, meter_.last_step_started_ns()));
  std::fflush(options_.out());
}

void Run::trace_call() {
  const auto& trace = stages_->pipeline().last_step();
  const bool over_ranks = stages_->facts().plan.over_ranks;
  for (const auto& [action, place, begin_ns, end_ns] : trace.actions) {
    trace_.add({.rank = rank_,
                .device = over_ranks ? 0 : place,
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

void Run::print_start_line() const {
  std::vector<std::string> names;
  for (size_t i = 0; i < devices_.size(); ++i) {
    const auto& plan = devices_[i].plan();
    const bool say_shared = plan.shared_by > 1 && !plan.physical().ends_with("shared");
    names.push_back(
        fmt::format("{} ({}{})", plan.name(), plan.physical(), say_shared ? ", shared" : ""));
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

void Run::end_step(const torch::Tensor& loss) {
  meter_.end_step(loss);
  end_phase(meter_.last_step_ended_ns());
  if (trace_.enabled() && sync_ != nullptr) trace_wait();
  if (stages_) stages_->end_step(/*timed=*/!meter_.step_ms().empty());
  if (!prints()) return;
  if (scaler_ != nullptr) print_skipped_steps();
  const auto done = static_cast<int64_t>(meter_.losses().size());
  const int64_t now_ns = lockstep::monotonic_ns();
  const int64_t pause_ns = isatty(fileno(options_.out())) != 0 ? 100'000'000 : 2'000'000'000;
  if (done == 1 || done == options_.steps || now_ns - last_print_ns_ > pause_ns) {
    print_progress();
    last_print_ns_ = now_ns;
  }
}

void Run::phase(const char* name) {
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

// The end of a backward that had all its gradients and only waited for buckets. Where a GPU's
// stream waits, the host, whose phases these are, goes on.
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

void Run::print_progress() const {
  const auto done = static_cast<int64_t>(meter_.losses().size());
  const bool live = isatty(fileno(options_.out())) != 0;
  const bool of_one = world_ == nullptr || world_->size() == 1;
  fmt::print(options_.out(), "{}step {}/{} | loss{} {:.6f} | {}{}", live ? "\r" : "", done,
             options_.steps, of_one ? "" : " of rank 0", meter_.losses().back(),
             lockstep::format_seconds(meter_.last_step_ms() * 1e-3),
             live && done < options_.steps ? "   " : "\n");
  std::fflush(options_.out());
}

void Run::print_skipped_steps() {
  const auto skipped = scaler_->skipped_steps();
  for (; skipped_printed_ < skipped.size(); ++skipped_printed_) {
    const auto& each = skipped[skipped_printed_];
    fmt::print(options_.out(),
               "step {} skipped: the gradient of {} is not finite; scale {:g} -> {:g}\n", each.step,
               each.parameter, each.scale_before, each.scale_after);
  }
}

void Run::note_forward(const torch::Tensor& loss) {
  if (!low_precision_bytes_) low_precision_bytes_ = low_precision_bytes(loss);
}

void Run::note_gradients(const torch::nn::Module& net) {
  if (record_.gradient_check) return;
  record_.gradient_check = check_gradients(net, scaler_ != nullptr ? scaler_->get_scale() : 1);
}

void Run::note_precision() {
  if (scaler_ == nullptr || !scaler_->is_enabled()) return;
  record_.scale = scaler_->get_scale();
  for (const auto& each : scaler_->skipped_steps()) {
    record_.skipped_steps.push_back(
        {each.step, each.parameter, each.scale_before, each.scale_after});
  }
}

void Run::note_capture() {
  if (step_ == nullptr || !devices_.is_cuda()) return;
  const lockstep::CaptureStats stats = step_->stats();
  const std::string by_flags = why_not_captured(options_);
  record_.capture = {.captured = step_->replayed(),
                     .reason = by_flags.empty() ? step_->why_not() : by_flags,
                     .graphs = stats.graphs,
                     .replays = stats.replays,
                     .memory_bytes = stats.memory_bytes};
}

void Run::finish(const torch::nn::Module& net, const torch::optim::Optimizer* optimizer) {
  complete_record(net, optimizer, std::nullopt);
  write_results(net);
}

void Run::finish(torch::nn::Module& net, const torch::optim::Optimizer& optimizer,
                 const std::optional<lockstep::MasterWeights>& masters) {
  complete_record(net, &optimizer, masters);
  if (masters) masters->restore(net);  // what is saved is float32
  write_results(net);
}

void Run::complete_record(const torch::nn::Module& net, const torch::optim::Optimizer* optimizer,
                          const std::optional<lockstep::MasterWeights>& masters) {
  meter_.fill(record_);
  if (stages_) stages_->fill(record_);
  note_precision();
  note_capture();
  if (optimizer != nullptr) {
    record_.memory = split_memory(net, *optimizer, low_precision_bytes_.value_or(0),
                                  record_.devices.front().peak_bytes, masters);
  }
}

void Run::write_results(const torch::nn::Module& net) {
  if (world_ == nullptr) {
    finish_process(net);
  } else {
    finish_job(net);
  }
}

void Run::finish_process(const torch::nn::Module& net) {
  if (!options_.save.empty()) lockstep::save_weights(net, options_.save);
  if (!options_.trace.empty()) trace_.write(options_.trace);
  if (prints()) {
    fmt::print(options_.out(), "{}",
               device_table(record_).terminal(lockstep::may_style(fileno(options_.out()))));
  }
  if (!options_.json.empty()) lockstep::write_record(record_, options_.json);
  warn_of_losses(record_.losses);
}

void Run::finish_job(const torch::nn::Module& net) {
  RankReport mine{record_, meter_.step_ms(), trace_.spans(), clock_ns_};
  if (stages_) mine.pipeline = stages_->report();
  const auto reports = gather_reports(world_->comm(), mine);
  if (rank_ != 0) return;
  lockstep::RunRecord job = job_record(reports);
  if (stages_) {
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
  if (prints()) {
    const bool bold = lockstep::may_style(fileno(options_.out()));
    fmt::print(options_.out(), "{}", rank_table(job, reports).terminal(bold));
    if (job.pipeline) {
      fmt::print(options_.out(), "{}{}", stage_table(*job.pipeline).terminal(bold),
                 axis_table(*job.pipeline).terminal(bold));
    }
  }
  if (!options_.json.empty()) lockstep::write_record(job, options_.json);
  warn_of_losses(job.losses);
}

}  // namespace course
