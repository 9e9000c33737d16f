#include "course/run.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/torch.h>
#include <unistd.h>

#include "lockstep/clock.hpp"
#include "lockstep/engine.hpp"
#include "lockstep/table.hpp"
#include "lockstep/tensor_file.hpp"
#include "lockstep/units.hpp"
#include "lockstep/version.hpp"

namespace course {
namespace {

std::string device_label(const lockstep::DeviceRecord& device) {
  return device.shared_by > 1
             ? fmt::format("{} ({}, shared by {})", device.name, device.physical, device.shared_by)
             : fmt::format("{} ({})", device.name, device.physical);
}

}  // namespace

Run::Run(const Options& options, const lockstep::Devices& devices)
    : options_(options),
      devices_(devices),
      out_(options.json == "-" ? stderr : stdout),
      meter_(options.program, devices, options.steps) {
  record_.program = options.program;
  record_.options = options.as_text();
  record_.host = lockstep::describe_host();
  record_.versions = lockstep::describe_versions();
  record_.effective_batch = options.batch;
  record_.split = {options.batch};
  if (!options.trace.empty()) {
    trace_.enable();
    trace_.name_rank(0, options.program);
    for (size_t i = 0; i < devices.size(); ++i) {
      trace_.name_device(0, static_cast<int>(i), devices[i].name());
      devices[i].record_to(&trace_, 0);
    }
  }
  print_start_line();
}

// The devices outlive the timeline they record to.
Run::~Run() {
  for (size_t i = 0; i < devices_.size(); ++i) devices_[i].record_to(nullptr, 0);
}

void Run::print_start_line() const {
  if (options_.quiet) return;
  std::vector<std::string> names;
  for (size_t i = 0; i < devices_.size(); ++i) {
    const auto& plan = devices_[i].plan();
    names.push_back(fmt::format("{} ({}{})", plan.name(), plan.physical(),
                                plan.shared_by > 1 ? ", shared" : ""));
  }
  fmt::print(out_, "lockstep {} | {} | devices: {} | threads per device: {} | libtorch {}\n",
             lockstep::kVersion, options_.program, fmt::join(names, ", "),
             devices_[0].plan().threads, record_.versions.at("libtorch"));
}

void Run::end_step(const torch::Tensor& loss) {
  meter_.end_step(loss);
  if (options_.quiet) return;
  const auto done = static_cast<int64_t>(meter_.losses().size());
  const int64_t now_ns = lockstep::monotonic_ns();
  const int64_t pause_ns = isatty(fileno(out_)) != 0 ? 100'000'000 : 2'000'000'000;
  if (done == 1 || done == options_.steps || now_ns - last_print_ns_ > pause_ns) {
    print_progress();
    last_print_ns_ = now_ns;
  }
}

void Run::print_progress() const {
  const auto done = static_cast<int64_t>(meter_.losses().size());
  const bool live = isatty(fileno(out_)) != 0;
  fmt::print(out_, "{}step {}/{} | loss {:.6f} | {}{}", live ? "\r" : "", done, options_.steps,
             meter_.losses().back(), lockstep::format_seconds(meter_.last_step_ms() * 1e-3),
             live && done < options_.steps ? "   " : "\n");
  std::fflush(out_);
}

void Run::print_result() const {
  lockstep::Table table("Result", {{"device"},
                                   {"rows", lockstep::Align::kRight},
                                   {"busy", lockstep::Align::kRight},
                                   {"peak memory", lockstep::Align::kRight},
                                   {"memory at rest", lockstep::Align::kRight},
                                   {"sent a step", lockstep::Align::kRight},
                                   {"received a step", lockstep::Align::kRight}});
  for (size_t i = 0; i < record_.devices.size(); ++i) {
    const auto& device = record_.devices[i];
    table.add_row(
        {device_label(device), std::to_string(i < record_.split.size() ? record_.split[i] : 0),
         fmt::format("{:.0f} %", device.busy_fraction * 100),
         lockstep::format_bytes(device.peak_bytes), lockstep::format_bytes(device.final_bytes),
         lockstep::format_bytes(device.sent_bytes_per_step),
         lockstep::format_bytes(device.received_bytes_per_step)});
  }
  const auto& step = record_.step_ms;
  table.add_note(fmt::format(
      "step time {:.3f} ms ± {:.3f} (median {:.3f}, {:.3f} to {:.3f}, {} steps after {} of "
      "warm-up), {:.0f} samples/s, {} in all",
      step.mean, step.stddev, step.median, step.min, step.max, step.n, record_.warmup_steps,
      record_.samples_per_s, lockstep::format_seconds(record_.total_s)));
  fmt::print(out_, "{}", table.terminal(lockstep::may_style(fileno(out_))));
}

void Run::finish(const torch::nn::Module& net) {
  meter_.fill(record_);
  if (!options_.save.empty()) lockstep::save_weights(net, options_.save);
  if (!options_.trace.empty()) trace_.write(options_.trace);
  if (!options_.quiet) print_result();
  if (!options_.json.empty()) lockstep::write_record(record_, options_.json);
}

std::unique_ptr<torch::optim::Optimizer> make_optimizer(std::vector<torch::Tensor> parameters,
                                                        const Options& options) {
  if (options.optimizer == "adamw") {
    return std::make_unique<torch::optim::AdamW>(std::move(parameters),
                                                 torch::optim::AdamWOptions(options.lr));
  }
  return std::make_unique<torch::optim::SGD>(std::move(parameters),
                                             torch::optim::SGDOptions(options.lr));
}

void load_initial_weights(torch::nn::Module& net, const Options& options) {
  if (!options.init.empty()) lockstep::load_weights(net, options.init);
}

}  // namespace course
