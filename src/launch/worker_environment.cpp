#include "launch/worker_environment.hpp"

#include <fmt/format.h>

#include <map>

#include "base/lists.hpp"

namespace lockstep {
namespace {

using EnvironmentMap = std::map<std::string, std::string>;

void set_torchrun_variables(const LaunchPlan& plan, const AttemptEnvironment& environment,
                            int local_rank, EnvironmentMap& variables) {
  const JobLayout& layout = environment.layout;
  const int rank = layout.first_rank() + local_rank;
  const auto nodes = layout.local_world_sizes.size();
  variables["RANK"] = variables["ROLE_RANK"] = std::to_string(rank);
  variables["WORLD_SIZE"] = variables["ROLE_WORLD_SIZE"] = std::to_string(layout.world_size());
  variables["LOCAL_RANK"] = std::to_string(local_rank);
  variables["LOCAL_WORLD_SIZE"] = std::to_string(plan.local_world_size);
  variables["GROUP_RANK"] = std::to_string(layout.node_rank);
  variables["GROUP_WORLD_SIZE"] = std::to_string(nodes);
  variables["ROLE_NAME"] = plan.role;
  variables["MASTER_ADDR"] = layout.master_addr;
  variables["MASTER_PORT"] = std::to_string(layout.master_port);
  variables["TORCHELASTIC_RESTART_COUNT"] = std::to_string(layout.attempt);
  variables["TORCHELASTIC_MAX_RESTARTS"] = std::to_string(plan.max_restarts);
  variables["TORCHELASTIC_RUN_ID"] = plan.job_id;
  variables["TORCHELASTIC_USE_AGENT_STORE"] = "False";  // rank 0 serves MASTER_PORT itself
  variables["TORCHELASTIC_ERROR_FILE"] = error_file_of(environment.logs, rank);
  variables.try_emplace("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1");
  variables.try_emplace("NCCL_ASYNC_ERROR_HANDLING", "1");
}

void set_lockstep_variables(const LaunchPlan& plan, const AttemptEnvironment& environment,
                            EnvironmentMap& variables) {
  // These may be inherited from an outer launcher.
  for (const char* name : {"LOCKSTEP_STORE", "LOCKSTEP_TOKEN", "LOCKSTEP_TIMEOUT_S",
                           "LOCKSTEP_BACKEND", "LOCKSTEP_INJECT", "LOCKSTEP_STACK_FILE"}) {
    variables.erase(name);
  }
  variables["LOCKSTEP_RUN"] = plan.run_name;
  variables["LOCKSTEP_SESSION"] = environment.layout.session;
  variables["LOCKSTEP_BOARD"] = environment.board;
  variables["LOCKSTEP_HOST_CORES"] = format_number_list(plan.host_cores);
  if (plan.timeout_s) variables["LOCKSTEP_TIMEOUT_S"] = fmt::format("{}", *plan.timeout_s);
  if (!plan.faults.empty()) variables["LOCKSTEP_INJECT"] = format_faults(plan.faults);
  if (!plan.backend.empty()) variables["LOCKSTEP_BACKEND"] = plan.backend;
  if (!environment.layout.store.empty()) variables["LOCKSTEP_STORE"] = environment.layout.store;
  if (!environment.token.empty()) variables["LOCKSTEP_TOKEN"] = environment.token;
}

}  // namespace

std::string error_file_of(const std::string& logs, int rank) {
  return fmt::format("{}/rank{}.error.json", logs, rank);
}

std::string stack_file_of(const std::string& logs, int rank) {
  return fmt::format("{}/rank{}.stack", logs, rank);
}

std::vector<std::string> worker_environment(const LaunchPlan& plan,
                                            const AttemptEnvironment& environment, int local_rank,
                                            const std::vector<std::string>& inherited) {
  EnvironmentMap variables;
  for (const auto& entry : inherited) {
    const size_t equals = entry.find('=');
    if (equals != std::string::npos) variables[entry.substr(0, equals)] = entry.substr(equals + 1);
  }
  set_torchrun_variables(plan, environment, local_rank, variables);
  set_lockstep_variables(plan, environment, variables);
  variables["LOCKSTEP_STACK_FILE"] =
      stack_file_of(environment.logs, environment.layout.first_rank() + local_rank);
  variables["OMP_NUM_THREADS"] = std::to_string(plan.threads);
  // Python buffers output to a pipe, too; programs of lockstep flush lines themselves.
  variables.try_emplace("PYTHONUNBUFFERED", "1");
  std::vector<std::string> entries;
  entries.reserve(variables.size());
  for (const auto& [name, value] : variables) entries.push_back(fmt::format("{}={}", name, value));
  return entries;
}

}  // namespace lockstep
