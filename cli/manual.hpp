#pragma once

#include <string>
#include <vector>

#include "cli/command_info.hpp"

namespace lockstep::cli {

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
