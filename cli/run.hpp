#pragma once

#include <map>
#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace lockstep::cli {

/// The flags of `lockstep run` as texts: [name without dashes].
class RunFlags {
 public:
  /// Registers the command, one option for each entry of launch/flags.hpp's table.
  explicit RunFlags(CLI::App& app);
  RunFlags(const RunFlags&) = delete;  // the parser writes into this very object
  RunFlags& operator=(const RunFlags&) = delete;

  CLI::App* command() const { return command_; }

  /// Those that were given; switches have an empty text.
  std::map<std::string, std::string> given() const;

 private:
  CLI::App* command_;
  std::map<std::string, std::string> texts_;
};

/// Starts the ranks and gives the exit code of the run. `words` is the whole command line, for srun
/// to repeat on every host.
int run_launch(const RunFlags& flags, const std::vector<std::string>& program,
               const std::vector<std::string>& words);

}  // namespace lockstep::cli
