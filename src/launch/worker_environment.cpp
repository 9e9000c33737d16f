#include "launch/worker_environment.hpp"

#include <fmt/format.h>

#include <map>

#include "launch/number_list.hpp"

namespace lockstep {
namespace {

using Variables = std::map<std::string, std::string>;

void set_torchrun_variables(const LaunchPlan& plan, const RoundEnvironment& round, int local_rank,
                            Variables& variables) {
  const JobLayout& layout = round.layout;
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
  variables["TORCHELASTIC_RESTART_COUNT"] = std::to_string(round.round);
  variables["TORCHELASTIC_MAX_RESTARTS"] = std::to_string(plan.max_restarts);
  variables["TORCHELASTIC_RUN_ID"] = plan.job_id;
  variables["TORCHELASTIC_USE_AGENT_STORE"] = "False";  // rank 0 serves MASTER_PORT itself
  variables["TORCHELASTIC_ERROR_FILE"] = error_file(round.logs, rank);
  variables.try_emplace("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1");
  variables.try_emplace("NCCL_ASYNC_ERROR_HANDLING", "1");
}

void set_lockstep_variables(const LaunchPlan& plan, const RoundEnvironment& round,
                            Variables& variables) {
  // A launcher above this one may have left its own.
  for (const char* name :
       {"LOCKSTEP_STORE", "LOCKSTEP_TOKEN", "LOCKSTEP_TIMEOUT_S", "LOCKSTEP_BACKEND"}) {
    variables.erase(name);
  }
  variables["LOCKSTEP_RUN"] = plan.run_name;
  variables["LOCKSTEP_SESSION"] = round.layout.session;
  variables["LOCKSTEP_BOARD"] = round.board;
  variables["LOCKSTEP_HOST_CORES"] = format_number_list(plan.host_cores);
  if (plan.timeout_s) variables["LOCKSTEP_TIMEOUT_S"] = fmt::format("{}", *plan.timeout_s);
  if (!plan.backend.empty()) variables["LOCKSTEP_BACKEND"] = plan.backend;
  if (!round.layout.store.empty()) variables["LOCKSTEP_STORE"] = round.layout.store;
  if (!round.token.empty()) variables["LOCKSTEP_TOKEN"] = round.token;
}

}  // namespace

std::vector<std::string> worker_environment(const LaunchPlan& plan, const RoundEnvironment& round,
                                            int local_rank,
                                            const std::vector<std::string>& inherited) {
  Variables variables;
  for (const auto& entry : inherited) {
    const size_t equals = entry.find('=');
    if (equals != std::string::npos) variables[entry.substr(0, equals)] = entry.substr(equals + 1);
  }
  set_torchrun_variables(plan, round, local_rank, variables);
  set_lockstep_variables(plan, round, variables);
  variables["OMP_NUM_THREADS"] = std::to_string(plan.threads);
  // Python keeps lines back before a pipe, too; a program of lockstep sends them by itself.
  variables.try_emplace("PYTHONUNBUFFERED", "1");
  std::vector<std::string> entries;
  entries.reserve(variables.size());
  for (const auto& [name, value] : variables) entries.push_back(fmt::format("{}={}", name, value));
  return entries;
}

std::string error_file(const std::string& logs, int rank) {
  return fmt::format("{}/rank{}.error.json", logs, rank);
}

}  // namespace lockstep
