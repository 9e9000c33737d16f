#pragma once

#include <string>

namespace lockstep::cli {

/// What one code means ("LS0002", "ls0002" or "2"), or the list of all codes if `code` is empty.
/// An unknown code is an Error that names the nearest.
std::string explain(const std::string& code);

/// The command `lockstep`: parses, runs one command and returns its exit code. Errors escape.
int run_command(int argc, char** argv);

/// The same, but prints every error: 130 after Ctrl-C, 2 if a child found the request at fault.
int run_cli(int argc, char** argv);

}  // namespace lockstep::cli
