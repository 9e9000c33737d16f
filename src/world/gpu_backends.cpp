#include "world/gpu_backends.hpp"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>

#include <vector>

#include "lockstep/error.hpp"

#if LOCKSTEP_CUDA
#include "comm/gpu/nccl_backend.hpp"
#include "device/cuda/support.hpp"
#include "world/cuda/gpu.hpp"
#endif

namespace lockstep {

bool names_gpu_backend(const std::string& name) {
  return name == "nccl" || name == "ipc";
}

#if LOCKSTEP_CUDA

namespace {

c10::Stream current_stream(int gpu) {
  return c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA)
      .getStream(c10::Device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(gpu)));
}

std::vector<GpuCard> exchange_cards(const Device& device, Backend& host, int64_t deadline_ns) {
  const bool on_gpu = device.plan().kind == DeviceKind::kCuda;
  const GpuCard mine = on_gpu ? cuda::card_of(device.plan().gpu) : GpuCard{};
  std::vector<GpuCard> all(static_cast<size_t>(host.size()));
  const int64_t bytes = sizeof(GpuCard);
  host.all_gather({&mine, bytes, Dtype::kU8}, {all.data(), bytes * host.size(), Dtype::kU8},
                  {.deadline_ns = deadline_ns, .label = "GPUs of the ranks"});
  return all;
}

}  // namespace

void require_gpu_backend_built(const std::string& name) {
  if (name != "nccl" || nccl_is_built()) return;
  throw Error(Code::kBackend, "this build of lockstep has no NCCL",
              "configure it with a libtorch that nccl.h and libnccl.so lie beside, or use auto");
}

std::unique_ptr<Backend> meet_on_gpus(const std::string& asked, const Device& device, Backend& host,
                                      bool one_host, int64_t deadline_ns) {
  const auto cards = exchange_cards(device, host, deadline_ns);
  const std::string name = choose_gpu_backend(asked, cards, one_host, nccl_is_built());
  if (name.empty()) return nullptr;
  return make_gpu_backend(name,
                          {.host = &host, .gpu = device.plan().gpu, .deadline_ns = deadline_ns});
}

std::unique_ptr<Backend> make_gpu_backend(const std::string& name,
                                          const GpuBackendOptions& options) {
  require_gpu_backend_built(name);
  return name == "nccl" ? make_nccl_backend(options) : make_ipc_backend(options);
}

CudaStream current_cuda_stream(int gpu) {
  return cuda::raw_stream(current_stream(gpu));
}

MemoryAccount* current_gpu_account(int gpu) {
  return cuda::watching_account(current_stream(gpu));
}

#else

void require_gpu_backend_built(const std::string& name) {
  throw Error(Code::kBackend,
              fmt::format("backend {} moves the memory of GPUs, but this build of lockstep has no "
                          "CUDA",
                          name),
              "use auto, shm or gloo, or build lockstep with a libtorch that has CUDA");
}

std::unique_ptr<Backend> meet_on_gpus(const std::string& asked, const Device&, Backend&, bool,
                                      int64_t) {
  if (names_gpu_backend(asked)) require_gpu_backend_built(asked);
  return nullptr;
}

std::unique_ptr<Backend> make_gpu_backend(const std::string& name, const GpuBackendOptions&) {
  require_gpu_backend_built(name);
  return nullptr;
}

CudaStream current_cuda_stream(int) {
  return nullptr;
}

MemoryAccount* current_gpu_account(int) {
  return nullptr;
}

#endif

}  // namespace lockstep
