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

/// A script that completes `lockstep` in "bash", "zsh" or "fish". Commands below a command are
/// offered as its first argument, with flags of their own. Another shell is an Error.
std::string completion_script(const CommandInfo& app, const std::string& shell);

struct ManualPage {
  std::string name;  ///< "lockstep-run"
  std::string text;  ///< in the macros of man(7)
};

/// lockstep(1), and a page for each command: lockstep-run(1), …
std::vector<ManualPage> manual_pages(const CommandInfo& app);

/// Writes what is installed below share: manual pages into man/man1, and completion where bash, zsh
/// and fish look for it.
void write_share(const CommandInfo& app, const std::string& folder);

}  // namespace lockstep::cli
