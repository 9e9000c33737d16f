#include "optim/captured_rates.hpp"

#include <c10/cuda/CUDAGuard.h>
#include <fmt/format.h>
#include <torch/torch.h>

#include <cstring>
#include <utility>

#include "lockstep/error.hpp"

namespace lockstep {
namespace {

constexpr int64_t kRatesDoubles = sizeof(GroupRates) / sizeof(double);
static_assert(sizeof(GroupRates) % sizeof(double) == 0);

// What decides which kernels run and on which memory cannot change with a number.
void check_kernels(const std::vector<GroupRates>& captured, const std::vector<GroupRates>& now) {
  const std::string help = "make the CapturedStep anew after such a change";
  if (captured.size() != now.size()) {
    throw Error(Code::kCapture,
                fmt::format("the optimizer had {} groups when its step was captured, and has {}",
                            captured.size(), now.size()),
                help);
  }
  for (size_t i = 0; i < now.size(); ++i) {
    if ((captured[i].momentum != 0) == (now[i].momentum != 0)) continue;
    throw Error(Code::kCapture,
                fmt::format("momentum of group {} was {} when the step was captured, and is {}", i,
                            captured[i].momentum, now[i].momentum),
                help);
  }
}

// Not of the graph's own memory: there, results of the same step may lie in the same place before,
// and each replay would write them over what refresh() wrote. The allocator tells by the stream.
torch::Tensor memory_of(c10::Stream stream, size_t groups) {
  const c10::cuda::CUDAStreamGuard not_captured(stream);
  return torch::empty({static_cast<int64_t>(groups), kRatesDoubles},
                      torch::device(stream.device()).dtype(torch::kDouble));
}

}  // namespace

std::shared_ptr<CapturedRates> CapturedRates::make(Capture& capture, torch::Device gpu,
                                                   RatesSource source) {
  const std::shared_ptr<CapturedRates> rates(new CapturedRates(gpu, std::move(source)));
  capture.before_replay([rates] { rates->refresh(); });
  return rates;
}

CapturedRates::CapturedRates(torch::Device gpu, RatesSource source)
    : source_(std::move(source)),
      captured_(source_()),
      made_on_(gpu),
      memory_(memory_of(made_on_.get(), captured_.size())) {}

void CapturedRates::refresh() {
  auto now = source_();
  if (now == written_) return;
  check_kernels(captured_, now);
  if (written_.empty()) made_on_.get().synchronize();  // whoever had this memory before
  const torch::NoGradGuard no_grad;
  // Memory of its own for each change, which libtorch hands out again when the copy is done.
  const auto staged =
      torch::empty(memory_.sizes(), torch::dtype(torch::kDouble).pinned_memory(true));
  std::memcpy(staged.data_ptr(), now.data(), now.size() * sizeof(GroupRates));
  memory_.copy_(staged, /*non_blocking=*/true);  // on the captured stream: between two replays
  written_ = std::move(now);
}

}  // namespace lockstep
