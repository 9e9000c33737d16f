#pragma once

namespace lockstep::cli {

/// The command `lockstep`: parses, runs one command and returns its exit code. Errors escape.
int run_command(int argc, char** argv);

/// The same with every error printed: 130 after Ctrl-C, 2 where a child found the request at fault.
int run_cli(int argc, char** argv);

}  // namespace lockstep::cli
