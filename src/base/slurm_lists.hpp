#pragma once

#include <string>
#include <string_view>
#include <vector>

// The two notations for lists in SLURM's variables. An Error (kWorld) names the variable.

namespace lockstep {

/// Expands "n[01-03,07],gpu2" to n01 n02 n03 n07 gpu2. If a name has several brackets, the last one
/// varies fastest.
std::vector<std::string> expand_slurm_hosts(const std::string& variable, std::string_view text);

/// Expands "2(x3),1" to 2 2 2 1.
std::vector<int> expand_slurm_counts(const std::string& variable, std::string_view text);

/// A port for the rendezvous of a step's ranks (offset 0) or launchers (1). It is the same on all
/// hosts of the job, rarely the same for two steps, and below the kernel's range of ephemeral
/// ports.
int slurm_port(std::string_view job_id, std::string_view step_id, int offset);

}  // namespace lockstep
