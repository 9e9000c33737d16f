#include "device/parallel_ranges.hpp"

#include <ATen/Parallel.h>
#include <dlfcn.h>

#include <algorithm>
#include <atomic>

namespace lockstep {
namespace {

constexpr int64_t kPartsPerThread = 4;  // so that a delayed thread does not delay all

// The function that GCC calls for "omp parallel". LLVM's and Intel's runtimes have it too.
using Fork = void (*)(void (*run)(void*), void* data, unsigned int threads, unsigned int flags);

Fork find_fork() {
  return reinterpret_cast<Fork>(::dlsym(RTLD_DEFAULT, "GOMP_parallel"));
}

struct Ranges {
  int64_t count;
  int64_t part;  // elements
  const std::function<void(int64_t, int64_t)>& body;
  std::atomic<int64_t> next = 0;

  void run() {
    for (;;) {
      const int64_t begin = next.fetch_add(part, std::memory_order_relaxed);
      if (begin >= count) return;
      body(begin, std::min(begin + part, count));
    }
  }
};

}  // namespace

void parallel_ranges(int64_t count, int64_t grain,
                     const std::function<void(int64_t begin, int64_t end)>& body) {
  static const Fork fork = find_fork();
  if (count <= 0) return;
  const int64_t threads =
      std::min<int64_t>(at::get_num_threads(), std::max<int64_t>(count / grain, 1));
  if (threads == 1 || fork == nullptr || at::in_parallel_region()) return body(0, count);
  const int64_t parts = std::min(threads * kPartsPerThread, count / grain);
  Ranges ranges{count, (count + parts - 1) / parts, body};
  fork([](void* data) { static_cast<Ranges*>(data)->run(); }, &ranges,
       static_cast<unsigned int>(threads), 0);
}

}  // namespace lockstep
