#include "parallel/accumulation_window.hpp"

#include <algorithm>
#include <cmath>

namespace lockstep {

void AccumulationWindow::add_micro_step() {
  ++micro_steps_;
  marks_ = read_marks();
}

void AccumulationWindow::forward_ended() {
  if (micro_steps_ > 0) marks_ = read_marks();
}

void AccumulationWindow::follow(int64_t micro_steps) {
  if (micro_steps_ == 0) marks_ = read_marks();
  micro_steps_ = micro_steps;
}

bool AccumulationWindow::gradients_dropped() const {
  return std::none_of(parameters_.begin(), parameters_.end(),
                      [](const TrainedParameter& each) { return each.tensor.grad().defined(); });
}

std::vector<AccumulationWindow::Mark> AccumulationWindow::read_marks() const {
  std::vector<Mark> marks;
  marks.reserve(parameters_.size());
  for (const auto& [name, tensor] : parameters_) {
    Mark& mark = marks.emplace_back();
    mark.version = tensor.unsafeGetTensorImpl()->version_counter().current_version();
    if (!tensor.is_cpu() || tensor.numel() == 0) continue;
    if (tensor.scalar_type() == torch::kFloat) mark.first = *tensor.data_ptr<float>();
    if (tensor.scalar_type() == torch::kDouble) mark.first = *tensor.data_ptr<double>();
    if (std::isnan(mark.first)) mark.first = 0;  // it would differ from itself
  }
  return marks;
}

}  // namespace lockstep
