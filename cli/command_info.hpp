#pragma once

#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace lockstep::cli {

/// A flag or a positional argument.
struct ArgumentInfo {
  std::vector<std::string> names;    ///< {"-n", "--nproc-per-node"}, or {"RUN"}
  std::string value;                 ///< what it takes: "N|auto"; "" for a switch
  std::vector<std::string> choices;  ///< the words of `value`: {"auto"}; none for a free text
  std::string help;                  ///< with the default
  std::string group;                 ///< heading in help
  bool required = false;

  bool takes_folder() const { return value == "DIR"; }
  bool takes_file() const { return value == "FILE"; }
};

/// A command as completion and manual pages need it.
struct CommandInfo {
  std::string name;  ///< "run"; of a lab its name
  std::string about;
  std::string examples;
  std::vector<ArgumentInfo> flags;
  std::vector<ArgumentInfo> positionals;
  std::vector<CommandInfo> commands;  ///< those below it, hidden ones left out

  /// Whether its positional is a program, with arguments that are not lockstep's.
  bool starts_program() const;
};

/// Reads a command and those below it from their CLI11 definition. Hidden flags are left out.
CommandInfo describe_command(const CLI::App& app);

}  // namespace lockstep::cli
