// Prints one JSON object: the libtorch that is loaded, the BLAS it calls, how fast one thread of it
// is, whether a budget of one thread holds, and the GPUs libtorch can use. The command `lockstep`
// runs this program because it does not link libtorch itself.

#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <torch/torch.h>

#if LOCKSTEP_CUDA
#include <cuda_runtime_api.h>
#endif

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <ctime>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "base/machine.hpp"
#include "lockstep/error.hpp"
#include "lockstep/version.hpp"

namespace {

using nlohmann::json;
using Clock = std::chrono::steady_clock;

double cpu_seconds(clockid_t clock) {
  timespec now{};
  clock_gettime(clock, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Best of several products of two 1024 x 1024 matrices, in GFLOP/s.
double measure_gflops() {
  constexpr int64_t kSize = 1024;
  constexpr double kFlop = 2.0 * kSize * kSize * kSize;
  const auto a = torch::rand({kSize, kSize});
  const auto b = torch::rand({kSize, kSize});
  auto c = torch::mm(a, b);  // warm-up
  double best = 0;
  const auto start = Clock::now();
  for (int run = 0; run < 8 && seconds_since(start) < 1.0; ++run) {
    const auto begin = Clock::now();
    torch::mm_out(c, a, b);
    best = std::max(best, kFlop / seconds_since(begin) / 1e9);
  }
  return best;
}

// CPU time of the whole process over CPU time of this thread while it multiplies. Wall time would
// also count what other programs take; this ratio is always 1 if a budget of one thread holds.
double measure_threads_used() {
  const auto a = torch::rand({512, 512});
  auto c = torch::mm(a, a);
  const double process = cpu_seconds(CLOCK_PROCESS_CPUTIME_ID);
  const double thread = cpu_seconds(CLOCK_THREAD_CPUTIME_ID);
  const auto start = Clock::now();
  while (seconds_since(start) < 0.4) torch::mm_out(c, a, a);
  const double of_thread = cpu_seconds(CLOCK_THREAD_CPUTIME_ID) - thread;
  return (cpu_seconds(CLOCK_PROCESS_CPUTIME_ID) - process) / of_thread;
}

// Whether processes may share memory and events on every GPU that can be used; null without one.
json ipc_support() {
  json supported;
#if LOCKSTEP_CUDA
  const int gpus = torch::cuda::is_available() ? static_cast<int>(torch::cuda::device_count()) : 0;
  for (int gpu = 0; gpu < gpus; ++gpu) {
    int value = 0;
    const bool answered =
        cudaDeviceGetAttribute(&value, cudaDevAttrIpcEventSupport, gpu) == cudaSuccess;
    supported = supported.is_null() ? answered && value != 0
                                    : supported.get<bool>() && answered && value != 0;
  }
#endif
  return supported;
}

// Which parts of lockstep were built for GPUs.
json cuda_facts() {
#if LOCKSTEP_CUDA
  const bool code = true;
  const json architectures = LOCKSTEP_CUDA_ARCHITECTURES;
#else
  const bool code = false;
  const json architectures = nullptr;
#endif
#if LOCKSTEP_NCCL
  const bool nccl = true;
#else
  const bool nccl = false;
#endif
  return {{"code", code}, {"architectures", architectures}, {"nccl", nccl}, {"ipc", ipc_support()}};
}

int probe(int argc, char** argv) {
  const bool measure = argc < 2 || std::string_view(argv[1]) != "--no-measure";
  torch::NoGradGuard no_grad;
  torch::set_num_threads(1);
  const auto versions = lockstep::describe_versions();
  const std::string config = at::show_config();

  json facts;
  facts["lockstep"] = versions.at("lockstep");
  facts["torch"] = {{"built", TORCH_VERSION},
                    {"loaded", versions.at("libtorch")},
                    {"libraries", lockstep::loaded_libraries({"libtorch", "libc10"})},
                    {"cxx11_abi", _GLIBCXX_USE_CXX11_ABI != 0},
                    {"cuda_built", !lockstep::loaded_libraries({"libtorch_cuda"}).empty()},
                    {"config", config}};
  facts["blas"] = {{"libraries", lockstep::loaded_libraries({"blas", "mkl", "blis"})}};
  facts["cuda"] = cuda_facts();
  facts["gpus_usable"] = torch::cuda::is_available() ? torch::cuda::device_count() : 0;
  if (measure) {
    facts["blas"]["gflops_one_thread"] = measure_gflops();
    facts["threads_used_of_one"] = measure_threads_used();
  }
  std::printf("%s\n", facts.dump(2).c_str());
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return lockstep::run_program(probe, argc, argv);
}
