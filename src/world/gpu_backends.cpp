#include "world/gpu_backends.hpp"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <vector>

#include "base/backends.hpp"
#include "comm/gpu/gpu_reduce.hpp"
#include "lockstep/error.hpp"

#if LOCKSTEP_CUDA
#include "device/cuda/support.hpp"
#endif

namespace lockstep {
namespace {

bool same_gpu(const GpuInfo& a, const GpuInfo& b) {
  return a.on_gpu != 0 && b.on_gpu != 0 && a.uuid == b.uuid;
}

// The first ranks found to share a GPU; none if each has its own.
std::vector<size_t> sharing_ranks(std::span<const GpuInfo> infos) {
  for (const GpuInfo& info : infos) {
    std::vector<size_t> ranks;
    for (size_t rank = 0; rank < infos.size(); ++rank) {
      if (same_gpu(info, infos[rank])) ranks.push_back(rank);
    }
    if (ranks.size() > 1) return ranks;
  }
  return {};
}

// The first rank that computes on the CPU; infos.size() if none does.
size_t rank_on_cpu(std::span<const GpuInfo> infos) {
  const auto found = std::find_if(infos.begin(), infos.end(),
                                  [](const GpuInfo& info) { return info.on_gpu == 0; });
  return static_cast<size_t>(found - infos.begin());
}

// NCCL refuses ranks of one host on one GPU, unless NCCL_HOSTID says that they are on different
// ones.
bool named_hosts(std::span<const GpuInfo> infos) {
  return std::all_of(infos.begin(), infos.end(),
                     [](const GpuInfo& info) { return info.names_host != 0; });
}

bool reaches(const GpuInfo& from, const GpuInfo& to) {
  const auto end = from.reached.begin() + from.reached_count;
  return same_gpu(from, to) || std::find(from.reached.begin(), end, to.uuid) != end;
}

// As far as is known: a GPU that a rank does not see may still be within its reach.
bool can_use_ipc(std::span<const GpuInfo> infos) {
  if (infos.size() > kMostGpuReduceRanks) return false;
  return std::all_of(infos.begin(), infos.end(), [&](const GpuInfo& from) {
    return from.shares != 0 && std::all_of(infos.begin(), infos.end(),
                                           [&](const GpuInfo& to) { return reaches(from, to); });
  });
}

std::string choose_automatically(std::span<const GpuInfo> infos, bool one_host, bool has_nccl) {
  if (infos.size() == 1 || rank_on_cpu(infos) < infos.size()) return "";
  if (has_nccl && sharing_ranks(infos).empty()) return "nccl";
  return one_host && can_use_ipc(infos) ? "ipc" : "";
}

}  // namespace

std::string choose_gpu_backend(const std::string& asked, std::span<const GpuInfo> infos,
                               bool one_host, bool has_nccl) {
  if (asked == "auto") return choose_automatically(infos, one_host, has_nccl);
  const size_t on_cpu = rank_on_cpu(infos);
  if (on_cpu < infos.size()) {
    throw Error(Code::kBackend,
                fmt::format("backend {} moves the memory of GPUs, but rank {} computes on the CPU",
                            asked, on_cpu),
                asked == "nccl" ? "give each rank a GPU of its own with --devices cuda, or use auto"
                                : "give the ranks GPUs with --devices, such as cuda:0*2 for two "
                                  "that share one, or use auto");
  }
  if (find_backend(asked)->one_host && !one_host) {
    throw Error(
        Code::kBackend,
        fmt::format("backend {} serves the ranks of one host, but these are on several", asked),
        "use auto, or nccl with a GPU for each rank");
  }
  const std::vector<size_t> sharing = sharing_ranks(infos);
  if (asked == "nccl" && !sharing.empty() && !named_hosts(infos)) {
    throw Error(Code::kBackend,
                fmt::format("backend nccl needs a GPU for each rank, but ranks {} share the GPU {}",
                            fmt::join(sharing, ", "), infos[sharing[0]].bus_id),
                one_host ? "use auto or ipc, or give each rank a GPU of its own with --devices"
                         : "use auto or gloo, or give each rank a GPU of its own with --devices");
  }
  return asked;
}

bool names_gpu_backend(const std::string& name) {
  const BackendInfo* const backend = find_backend(name);
  return backend != nullptr && backend->on_gpus;
}

#if LOCKSTEP_CUDA

namespace {

c10::Stream current_stream(int gpu) {
  return c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA)
      .getStream(c10::Device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(gpu)));
}

std::vector<GpuInfo> exchange_infos(const Device& device, Backend& host, int64_t deadline_ns) {
  const bool on_gpu = device.plan().kind == DeviceKind::kCuda;
  const GpuInfo mine = on_gpu ? cuda::info_of(device.plan().gpu) : GpuInfo{};
  std::vector<GpuInfo> all(static_cast<size_t>(host.size()));
  const int64_t bytes = sizeof(GpuInfo);
  host.all_gather({&mine, bytes, Dtype::kU8}, {all.data(), bytes * host.size(), Dtype::kU8},
                  {.deadline_ns = deadline_ns, .label = "GPUs of the ranks"})
      ->wait();
  return all;
}

}  // namespace

void require_gpu_backend_built(const std::string& name) {
  if (name != "nccl" || nccl_is_built()) return;
  throw Error(Code::kBackend, "this build of lockstep has no NCCL",
              "configure it with a libtorch that nccl.h and libnccl.so lie beside, or use auto");
}

std::unique_ptr<Backend> rendezvous_on_gpus(const std::string& asked, const Device& device,
                                            Backend& host, bool one_host, int64_t deadline_ns) {
  const auto infos = exchange_infos(device, host, deadline_ns);
  const std::string name = choose_gpu_backend(asked, infos, one_host, nccl_is_built());
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

std::unique_ptr<Backend> rendezvous_on_gpus(const std::string& asked, const Device&, Backend&, bool,
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
