#include "gradients/nonfinite_gradients.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/process.hpp"
#include "lockstep/error.hpp"
#include "lockstep/grad_scaler.hpp"
#include "precision/gradient_scan.hpp"

namespace lockstep {
namespace {

constexpr int64_t kReadWhole = 16384;  // elements: reading gradients up to this size is cheap

bool is_finite(double value) {
  return std::isfinite(value);
}
bool is_finite(c10::Half value) {
  return std::isfinite(static_cast<float>(value));
}
bool is_finite(c10::BFloat16 value) {
  return std::isfinite(static_cast<float>(value));
}

// One element of each row and of each column; rows are those of dimension 0.
template <class T>
bool sample_is_finite(const T* data, int64_t rows, int64_t columns) {
  bool finite = true;
  int64_t row = 0;
  int64_t column = 0;
  for (int64_t i = 0; i < std::max(rows, columns); ++i) {
    finite &= is_finite(data[row * columns + column]);  // no branch: loads overlap
    if (++row == rows) row = 0;
    if (++column == columns) column = 0;
  }
  return finite;
}

// `gradient` is dense, as all gradients in buckets are, in any memory order.
bool sample_is_finite(const torch::Tensor& gradient) {
  const int64_t rows = gradient.size(0);
  const int64_t columns = gradient.numel() / rows;
  const void* data = gradient.data_ptr();
  switch (gradient.scalar_type()) {
    case torch::kFloat:
      return sample_is_finite(static_cast<const float*>(data), rows, columns);
    case torch::kDouble:
      return sample_is_finite(static_cast<const double*>(data), rows, columns);
    case torch::kHalf:
      return sample_is_finite(static_cast<const c10::Half*>(data), rows, columns);
    case torch::kBFloat16:
      return sample_is_finite(static_cast<const c10::BFloat16*>(data), rows, columns);
    default:
      return true;
  }
}

bool all_finite(const torch::Tensor& tensor) {
  return scan_gradients(std::span(&tensor, 1)).first_nonfinite < 0;
}

// 1, 10, 100 and so on.
bool is_power_of_ten(int64_t number) {
  while (number % 10 == 0) number /= 10;
  return number == 1;
}

}  // namespace

NonfiniteGradients::NonfiniteGradients(std::span<const TrainedParameter> parameters,
                                       const Communicator& comm, Nonfinite answer, DdpStats& stats,
                                       std::string prefix)
    : parameters_(parameters),
      comm_(comm),
      answer_(answer),
      stats_(stats),
      prefix_(std::move(prefix)) {}

bool NonfiniteGradients::looks() const {
  return answer_ != Nonfinite::kIgnore && !GradScaler::any_enabled();
}

void NonfiniteGradients::look(const GradientBuckets& buckets, size_t bucket) {
  if (bucket == 0) ++step_;
  if (!looks()) return;
  settle();
  if (buckets.bucket(bucket).gradients.is_cpu()) return look_on_cpu(buckets, bucket);
  std::vector<torch::Tensor> gradients;
  std::vector<int32_t> numbers;
  for (const PlannedGradient& planned : buckets.plan(bucket).gradients) {
    if (parameters_[planned.parameter].tensor.numel() == 0) continue;
    gradients.push_back(buckets.view(planned.parameter));
    numbers.push_back(static_cast<int32_t>(planned.parameter));
  }
  look_on_gpu(gradients, numbers);
}

void NonfiniteGradients::look(std::span<const torch::Tensor> gradients, bool first) {
  if (first) ++step_;
  if (!looks()) return;
  settle();
  std::vector<torch::Tensor> on_gpu;
  std::vector<int32_t> numbers;
  for (size_t i = 0; i < gradients.size(); ++i) {
    if (!gradients[i].defined() || gradients[i].numel() == 0) continue;
    if (!gradients[i].is_cpu()) {
      on_gpu.push_back(gradients[i]);
      numbers.push_back(static_cast<int32_t>(i));
    } else if (!is_finite_on_cpu(gradients[i])) {
      return report(i, step_);
    }
  }
  look_on_gpu(on_gpu, numbers);
}

bool NonfiniteGradients::is_finite_on_cpu(const torch::Tensor& gradient) const {
  const bool whole = answer_ == Nonfinite::kStop || gradient.numel() <= kReadWhole ||
                     !gradient.is_non_overlapping_and_dense();
  return whole ? all_finite(gradient) : sample_is_finite(gradient);
}

void NonfiniteGradients::look_on_cpu(const GradientBuckets& buckets, size_t bucket) {
  for (const PlannedGradient& planned : buckets.plan(bucket).gradients) {
    const torch::Tensor gradient = buckets.view(planned.parameter);
    if (gradient.numel() > 0 && !is_finite_on_cpu(gradient)) {
      return report(planned.parameter, step_);
    }
  }
}

#if LOCKSTEP_CUDA

void NonfiniteGradients::look_on_gpu(const std::vector<torch::Tensor>& gradients,
                                     const std::vector<int32_t>& numbers) {
  if (gradients.empty()) return;
  const GpuScan scan = scan_on_gpu(gradients, numbers, /*squares=*/false);
  const torch::Tensor first =
      torch::empty({}, torch::TensorOptions(torch::kInt).pinned_memory(true));
  first.copy_(scan.first, /*non_blocking=*/true);
  checks_.push_back({step_, first, DeviceEvent::now(gradients.front().device())});
}

#else

void NonfiniteGradients::look_on_gpu(const std::vector<torch::Tensor>&,
                                     const std::vector<int32_t>&) {}

#endif

void NonfiniteGradients::settle() {
  while (!checks_.empty() && checks_.front().done.reached()) {
    const Check oldest = checks_.front();
    checks_.pop_front();
    const auto first = oldest.first.item<int32_t>();
    if (first >= 0) report(static_cast<size_t>(first), oldest.step);
  }
}

void NonfiniteGradients::report(size_t parameter, int64_t step) {
  if (reported_step_ == step) return;  // another bucket of the same step
  reported_step_ = step;
  const TrainedParameter& target = parameters_[parameter];
  stats_.nonfinite_steps += 1;
  if (stats_.nonfinite_steps == 1) {
    stats_.first_nonfinite_step = step;
    stats_.first_nonfinite_parameter = target.name;
  }
  // A GPU's weights have been updated meanwhile and say nothing about this step.
  const bool weights_finite = !target.tensor.is_cpu() || all_finite(target.tensor.detach());
  const int rank = comm_.world_ranks().at(static_cast<size_t>(comm_.rank()));
  const std::string message = fmt::format(
      "rank {}, step {}: {}the gradient of {} is not finite{}", rank, resumed_steps() + step,
      prefix_, target.name,
      weights_finite ? "" : ", and neither are its weights: an earlier step spoiled them");
  if (answer_ != Nonfinite::kStop) return warn(message, weights_finite);
  comm_.abort(message);
  throw Error(Code::kNonfinite, message,
              "look at the batch and the loss of this rank in this step; a smaller learning rate, "
              "clipping or a GradScaler (fp16) may help");
}

// Once one rank's gradient has spoiled the weights, the gradients of all ranks are not finite: only
// the first warnings matter.
void NonfiniteGradients::warn(const std::string& message, bool weights_finite) {
  const bool warned_before = warnings_due_ > 0 || warned_of_weights_;
  if (weights_finite) {
    ++warnings_due_;
    if (!is_power_of_ten(warnings_due_)) return;
  } else if (comm_.rank() != 0 || warned_before) {
    return;
  } else {
    warned_of_weights_ = true;
  }
  print_error(fmt::format(
      "warning[{}]: {}; the mean passes it on to all ranks\n"
      "help: look at the batch and the loss of this rank; nonfinite = Nonfinite::kStop in "
      "the options of DistributedDataParallel or Pipeline ends the job here, kIgnore says "
      "nothing\n",
      code_name(Code::kNonfinite), message));
}

}  // namespace lockstep
