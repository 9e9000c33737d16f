#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace lockstep::cli {

/// A command line in two: `lockstep run FLAGS` for the parser, and the program with all that
/// follows it, which is not lockstep's business.
struct ProgramLine {
  std::vector<std::string> flags;    ///< from argv[0] on; each flag as --name=value
  std::vector<std::string> program;  ///< empty: none was named

  std::vector<const char*> flag_pointers() const;
};

/// Cuts at the first word that is neither a flag nor a flag's value, or after "--". Underscores in
/// flags become dashes, as torchrun takes both. Lines of other commands stay as they are.
ProgramLine cut_at_program(const std::vector<std::string>& words,
                           const std::vector<const CLI::App*>& commands);

/// The flags of `lockstep run` as texts: [name without dashes].
class RunFlags {
 public:
  /// Registers the command, one option for each entry of launch/flags.hpp's table.
  explicit RunFlags(CLI::App& app);
  RunFlags(const RunFlags&) = delete;  // the parser writes into this very object
  RunFlags& operator=(const RunFlags&) = delete;

  CLI::App* command() const { return command_; }

  /// The flags that were given; switches have an empty text.
  std::map<std::string, std::string> given() const;

 private:
  CLI::App* command_;
  std::map<std::string, std::string> texts_;
};

/// Starts the ranks and gives the exit code of the run. `words` is the whole command line, for srun
/// to repeat on every host.
int run_launch(const RunFlags& flags, const std::vector<std::string>& program,
               const std::vector<std::string>& words);

/// What a batch file for SLURM asks for.
struct SlurmScriptOptions {
  int nodes = 1;
  std::string ranks = "auto";  ///< per host: a number or auto
  std::optional<int> gpus;     ///< per host
  std::optional<int> cpus;     ///< per host
  std::string time = "01:00:00";
  std::optional<int> requeue;  ///< seconds before the time limit at which ranks save and stop
  std::string partition;
  std::string account;
};

CLI::App* add_slurm_script_command(CLI::App& app, SlurmScriptOptions& options);

/// A batch file that runs `program` on every host of the job: sbatch takes it as it is.
std::string slurm_script(const SlurmScriptOptions& options,
                         const std::vector<std::string>& program);

}  // namespace lockstep::cli
