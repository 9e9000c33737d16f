#include "lockstep/pipeline.hpp"

#include <fmt/format.h>

#include <exception>

#include "base/standard_streams.hpp"
#include "lockstep/error.hpp"
#include "parallel/model_tensors.hpp"
#include "pipeline/pipeline_state.hpp"

namespace lockstep {

std::function<double(const torch::Tensor&)> count_targets(int64_t ignore_index) {
  return [ignore_index](const torch::Tensor& target) {
    return static_cast<double>(target.ne(ignore_index).sum().item<int64_t>());
  };
}

Pipeline::Pipeline(std::vector<torch::nn::Sequential> stages, const Devices& devices,
                   Schedule schedule, PipelineOptions options)
    : state_(std::make_unique<State>(std::move(stages), devices, std::move(schedule),
                                     std::move(options))) {}

Pipeline::Pipeline(std::vector<torch::nn::Sequential> stages, const Communicator& axis,
                   Device& device, Schedule schedule, PipelineOptions options)
    : state_(std::make_unique<State>(std::move(stages), axis, device, std::move(schedule),
                                     std::move(options))) {}

// No step follows that could refuse it: the last gradients were applied on each rank alone.
Pipeline::~Pipeline() {
  const int64_t steps = state_->spoiled_steps();
  if (std::uncaught_exceptions() > 0 || steps == 0) return;
  print_error(fmt::format(
      "warning[{}]: the last update used the gradients of {} steps with synchronise = false "
      "that were not averaged: the data ranks' weights differ\n",
      code_name(Code::kSyncMisuse), steps));
}

torch::Tensor Pipeline::step(const torch::Tensor& x, const torch::Tensor& y,
                             const PipelineStep& how) {
  return state_->step(x, y, how);
}

torch::Tensor Pipeline::evaluate(const torch::Tensor& x) {
  return state_->evaluate(x);
}

const Schedule& Pipeline::schedule() const {
  return state_->schedule;
}

const std::vector<int>& Pipeline::local_stages() const {
  return state_->local_stages;
}

const torch::nn::Sequential& Pipeline::stage(int stage) const {
  return state_->local(stage).stage.module();
}

Device& Pipeline::device_of(int stage) const {
  return state_->local(stage).stage.device();
}

std::vector<torch::Tensor> Pipeline::parameters() const {
  std::vector<torch::Tensor> parameters;
  for (const int stage : local_stages()) {
    for (auto& each : trained_in(*this->stage(stage))) parameters.push_back(std::move(each.tensor));
  }
  return parameters;
}

void Pipeline::for_each_stage(const char* name, const std::function<void(int)>& work) {
  state_->for_each_stage(name, work);
}

const StepTrace& Pipeline::last_step() const {
  if (!state_->last_step) state_->last_step = state_->trace();
  return *state_->last_step;
}

LinkStats Pipeline::links() const {
  return state_->links();
}

}  // namespace lockstep
