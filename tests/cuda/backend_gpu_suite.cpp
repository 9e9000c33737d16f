#include <cctype>
#include <cstdlib>
#include <filesystem>

#include "backend_gpu_view.hpp"
#include "ranks/backend_world.hpp"

// The suite of the GPU's backends: all ranks share GPU 0. The process that runs the tests never
// calls CUDA, since what it forks could not use it then.

namespace lockstep::test {
namespace {

bool has_gpu() {
  for (const auto& entry : std::filesystem::directory_iterator("/dev")) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with("nvidia") && name.size() > 6 && std::isdigit(name[6]) != 0) return true;
  }
  return false;
}

#if LOCKSTEP_NCCL
// NCCL refuses a second rank of a host on the same GPU. Ranks of different hosts talk through
// sockets, here those of one.
void pretend_own_host(int rank) {
  ::setenv("NCCL_HOSTID", ("host" + std::to_string(rank)).c_str(), 1);
  ::setenv("NCCL_NET", "Socket", 1);
  ::setenv("NCCL_SOCKET_IFNAME", "lo", 1);
}
#endif

std::unique_ptr<Backend> build(const WorldCase& world, std::unique_ptr<Backend> host) {
  const GpuBackendOptions options{
      .host = host.get(), .gpu = 0, .deadline_ns = monotonic_ns() + 40'000'000'000};
#if LOCKSTEP_NCCL
  if (world.backend == "nccl") {
    if (world.ranks == Ranks::kProcesses) pretend_own_host(host->rank());
    auto gpu = make_nccl_backend(options);
    return std::make_unique<GpuView>(std::move(host), std::move(gpu));
  }
#endif
  (void)world;
  auto gpu = make_ipc_backend(options);
  return std::make_unique<GpuView>(std::move(host), std::move(gpu));
}

}  // namespace

const Suite& suite_under_test() {
  static const Suite suite = {
#if LOCKSTEP_NCCL
    .backends = {"ipc", "nccl"},
#else
    .backends = {"ipc"},
#endif
    .missing = [](const std::string&) -> std::string {
      return has_gpu() ? "" : "there is no GPU: no /dev/nvidia0";
    },
    .host = [](const std::string&) -> std::string { return "shm"; },
    .build = build,
    .fork_threads = true,
  };
  return suite;
}

}  // namespace lockstep::test
