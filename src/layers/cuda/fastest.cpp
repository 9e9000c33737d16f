#include "layers/cuda/fastest.hpp"

#include <c10/cuda/CUDAException.h>

#include <algorithm>
#include <limits>
#include <numeric>

namespace lockstep::layers {
namespace {

constexpr float kBriefMs = 1;
constexpr int kBriefRounds = 3;
constexpr float kWorthALongOne = 1.1F;  // times the fastest brief time
constexpr size_t kFinalists = 4;
constexpr float kLongMs = 50;
constexpr int kLongRounds = 2;
constexpr float kClearlyFaster = 0.99F;  // of the time of an earlier one
constexpr float kCannot = std::numeric_limits<float>::infinity();

class Stopwatch {
 public:
  explicit Stopwatch(cudaStream_t stream) : stream_(stream) {
    C10_CUDA_CHECK(cudaEventCreate(&begin_));
    C10_CUDA_CHECK(cudaEventCreate(&end_));
  }
  ~Stopwatch() {
    if (begin_) (void)cudaEventDestroy(begin_);
    if (end_) (void)cudaEventDestroy(end_);
  }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

  /// Milliseconds of one, of as many in a row as take about `ms`, after as many that do not count.
  float measure(const Way& way, float ms) {
    if (!way()) return kCannot;
    const float once_ms = mean_of(way, 1);
    const int repeats = std::clamp(static_cast<int>(ms / once_ms), 2, kMostRepeats);
    for (int i = 0; i < repeats; ++i) way();
    return mean_of(way, repeats);
  }

 private:
  static constexpr int kMostRepeats = 10000;

  float mean_of(const Way& way, int repeats) {
    C10_CUDA_CHECK(cudaEventRecord(begin_, stream_));
    for (int i = 0; i < repeats; ++i) way();
    C10_CUDA_CHECK(cudaEventRecord(end_, stream_));
    C10_CUDA_CHECK(cudaEventSynchronize(end_));
    float ms = 0;
    C10_CUDA_CHECK(cudaEventElapsedTime(&ms, begin_, end_));
    return ms / static_cast<float>(repeats);
  }

  cudaStream_t stream_;
  cudaEvent_t begin_ = nullptr;
  cudaEvent_t end_ = nullptr;
};

// Positions of the ways worth a long comparison, in their order.
std::vector<size_t> finalists(const std::vector<Way>& ways, Stopwatch& watch) {
  std::vector<float> best(ways.size(), kCannot);
  for (int round = 0; round < kBriefRounds; ++round) {
    for (size_t i = 0; i < ways.size(); ++i) {
      best[i] = std::min(best[i], watch.measure(ways[i], kBriefMs));
    }
  }
  std::vector<size_t> order(ways.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return best[a] < best[b]; });
  const float limit = best[order.front()] * kWorthALongOne;
  std::erase_if(order, [&](size_t i) { return best[i] == kCannot || best[i] > limit; });
  order.resize(std::min(order.size(), kFinalists));
  std::sort(order.begin(), order.end());
  return order;
}

}  // namespace

size_t fastest(const std::vector<Way>& ways, cudaStream_t stream) {
  if (ways.size() < 2) return 0;
  Stopwatch watch(stream);
  const auto compared = finalists(ways, watch);
  if (compared.empty()) return 0;
  if (compared.size() == 1) return compared.front();

  std::vector<float> total(compared.size(), 0);
  for (int round = 0; round < kLongRounds; ++round) {
    for (size_t i = 0; i < compared.size(); ++i) {
      total[i] += watch.measure(ways[compared[i]], kLongMs);
    }
  }
  size_t chosen = 0;
  for (size_t i = 1; i < total.size(); ++i) {
    if (total[i] < total[chosen] * kClearlyFaster) chosen = i;
  }
  return compared[chosen];
}

}  // namespace lockstep::layers
