#include "parallel/gradient_sum.hpp"

#include <algorithm>

#include "device/stream_order.hpp"
#include "parallel/running.hpp"

namespace lockstep {
namespace {

bool is_flat(const torch::Tensor& tensor) {
  return !tensor.is_sparse() && tensor.is_contiguous();
}

// Whether a gradient may be added to in place: nobody else can see its memory.
bool is_ours_alone(const torch::Tensor& tensor) {
  return !tensor.is_sparse() && tensor.use_count() == 1 && tensor.storage().use_count() == 1 &&
         tensor.is_non_overlapping_and_dense();
}

torch::Tensor bring_home(const torch::Tensor& gradient, const Device& home) {
  keep_for_current_stream(gradient);
  return gradient.to(home.torch_device(), /*non_blocking=*/true);
}

}  // namespace

GradientSum::GradientSum(std::vector<torch::Tensor> parts, const Device& home) {
  if (parts.empty()) return;
  const bool is_cpu = home.torch_device().is_cpu();
  total_ = bring_home(parts.front(), home);
  parts.front().reset();
  const bool elsewhere = is_cpu && account_of(total_) != nullptr && !home.owns(total_);
  if (elsewhere || (parts.size() > 1 && !total_.is_sparse() && !is_ours_alone(total_))) {
    total_ = total_.clone();
  }
  for (size_t i = 1; i < parts.size(); ++i) others_.push_back(bring_home(parts[i], home));
  divisible_ = is_flat(total_) && std::all_of(others_.begin(), others_.end(), is_flat);
}

void GradientSum::add_share(int64_t share, int64_t shares) {
  for (const auto& other : others_) {
    if (divisible_) {
      const int64_t count = total_.numel();
      const int64_t begin = count * share / shares;
      const int64_t length = count * (share + 1) / shares - begin;
      total_.view(-1).narrow(0, begin, length).add_(other.view(-1).narrow(0, begin, length));
    } else if (share == 0) {
      total_ = total_.is_sparse() ? other + total_ : total_.add_(other);
    }
  }
}

void add_up(std::vector<GradientSum>& sums, const Devices& devices, size_t workers) {
  const auto add = [&](int64_t share, int64_t shares) {
    const torch::NoGradGuard no_grad;
    for (auto& sum : sums) sum.add_share(share, shares);
  };
  if (devices.is_cuda()) {
    add(0, 1);
    return;
  }
  Running<void> running;
  for (size_t share = 0; share < workers; ++share) {
    running.add(devices[share].submit("sum gradients", [&, share] {
      add(static_cast<int64_t>(share), static_cast<int64_t>(workers));
    }));
  }
  running.wait(devices, "sum of gradients");
}

int64_t gradient_bytes(const torch::Tensor& gradient) {
  if (!gradient.is_sparse()) return static_cast<int64_t>(gradient.nbytes());
  return static_cast<int64_t>(gradient._indices().nbytes() + gradient._values().nbytes());
}

}  // namespace lockstep
