#pragma once

#include <optional>
#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace lockstep::cli {

/// What a batch file for SLURM asks for.
struct SlurmScriptOptions {
  int nodes = 1;
  std::string ranks = "auto";  ///< per host: a number or auto
  std::optional<int> gpus;     ///< per host
  std::optional<int> cpus;     ///< per host
  std::string time = "01:00:00";
  std::string partition;
  std::string account;
};

CLI::App* add_slurm_script_command(CLI::App& app, SlurmScriptOptions& options);

/// A batch file that runs `program` on every host of the job: sbatch takes it as it is.
std::string slurm_script(const SlurmScriptOptions& options,
                         const std::vector<std::string>& program);

}  // namespace lockstep::cli
