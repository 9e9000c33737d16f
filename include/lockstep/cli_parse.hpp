#pragma once

#include <string>

namespace CLI {
class App;
}

namespace lockstep {

/// Parses a command line. If CLI11 rejects it, throws an Error (kUsage) that names the flag and the
/// nearest one that exists. --help and --version print to standard output and exit with 0. The help
/// text starts with the app's footer, which is meant for examples.
void parse_or_throw(CLI::App& app, int argc, const char* const* argv);

/// The arguments as one line, quoted for a shell.
std::string shell_line(int argc, const char* const* argv);

}  // namespace lockstep
