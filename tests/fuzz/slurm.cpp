// SLURM's variables as `lockstep run` reads them: lines of NAME=VALUE.

#include "launch/slurm.hpp"

#include "base/slurm_lists.hpp"
#include "fuzz.hpp"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace lockstep;
  using namespace lockstep::fuzz;
  const Variables variables({reinterpret_cast<const char*>(data), size});
  accepts([&] {
    const auto job = read_slurm([&](const char* name) { return variables.find(name); }, "node1");
    if (!job) return;
    require(job->node_rank >= 0 && job->node_rank < job->nnodes(), "a host is one of the job");
    require(job->port > 0 && job->port <= 65535, "a port is a port");
    for (const auto& host : job->hosts) require(!host.empty(), "every host has a name");
    Settings settings;
    const ClusterStart start = apply_slurm(*job, settings);
    require(start.srun.empty() || start.srun.front() == "srun", "srun starts launchers");
  });
  const std::string_view list = Input(data, size).until('\n');
  accepts([&] { expand_slurm_hosts("LIST", list); });
  accepts([&] {
    for (const int count : expand_slurm_counts("LIST", list)) {
      require(count >= 1, "every node has a task");
    }
  });
  return 0;
}
