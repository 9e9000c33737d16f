#pragma once

#include <string>
#include <string_view>
#include <vector>

// The two notations in which SLURM's variables write lists. An Error (kWorld) names the variable.

namespace lockstep {

/// "n[01-03,07],gpu2" is n01 n02 n03 n07 gpu2; several brackets multiply, the last one fastest.
std::vector<std::string> expand_slurm_hosts(const std::string& variable, std::string_view text);

/// "2(x3),1" is 2 2 2 1.
std::vector<int> expand_slurm_counts(const std::string& variable, std::string_view text);

/// A port for a job's ranks or launchers to meet at: the same on all its hosts, rarely that of
/// another job, and below the range the kernel hands out by itself.
int slurm_port(std::string_view job_id, std::string_view step_id, int offset);

}  // namespace lockstep
