// Matrix products on the workers of logical devices: how fast they are, and how many cores they
// use. bench/blas runs this once for each BLAS package to find the one that serves several workers
// best.
//
// usage: bench_gemm DEVICES THREADS   e.g. bench_gemm 2 1: two devices with one thread each
// prints: GFLOP/s and the processor time used per second

#include <fmt/format.h>
#include <torch/torch.h>

#include <cstdlib>
#include <ctime>

#include "lockstep/clock.hpp"
#include "lockstep/device.hpp"
#include "lockstep/error.hpp"

namespace {

double process_cpu_seconds() {
  timespec now{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// The product of a layer in practical 5: few rows, wide weights.
constexpr int64_t kRows = 64, kWidth = 2048;
constexpr int kProducts = 40;

void multiply() {
  const auto x = torch::rand({kRows, kWidth});
  const auto w = torch::rand({kWidth, kWidth});
  auto out = torch::empty({kRows, kWidth});
  for (int i = 0; i < kProducts; ++i) torch::mm_out(out, x, w);
}

int measure(int argc, char** argv) {
  if (argc != 3) {
    throw lockstep::Error(lockstep::Code::kUsage, "bench_gemm takes two numbers",
                          "write bench_gemm DEVICES THREADS");
  }
  const int count = std::atoi(argv[1]);
  auto hardware = lockstep::detect_hardware();
  hardware.threads_per_device = std::atoi(argv[2]);
  const lockstep::Devices devices(lockstep::plan_devices(fmt::format("cpu:{}", count), hardware));

  const auto round = [&] {
    std::vector<std::future<void>> running;
    for (size_t i = 0; i < devices.size(); ++i)
      running.push_back(devices[i].submit("multiply", multiply));
    for (auto& each : running) each.get();
  };
  round();
  const int64_t began_ns = lockstep::monotonic_ns();
  const double cpu_began = process_cpu_seconds();
  for (int i = 0; i < 3; ++i) round();
  const double seconds = static_cast<double>(lockstep::monotonic_ns() - began_ns) * 1e-9;
  const double flop = 3.0 * kProducts * count * 2.0 * kRows * kWidth * kWidth;
  fmt::print("{:.1f} {:.2f}\n", flop / seconds * 1e-9,
             (process_cpu_seconds() - cpu_began) / seconds);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return lockstep::run_program(measure, argc, argv);
}
