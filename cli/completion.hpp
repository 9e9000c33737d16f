#pragma once

#include <string>

#include "cli/command_info.hpp"

namespace lockstep::cli {

/// A script that completes `lockstep` in "bash", "zsh" or "fish". Commands below a command are
/// offered as its first argument, with flags of their own. Another shell is an Error.
std::string completion_script(const CommandInfo& app, const std::string& shell);

}  // namespace lockstep::cli
