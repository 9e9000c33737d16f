#pragma once

#include <string>

namespace CLI {
class App;
}

namespace lockstep {

/// Parses a command line. What CLI11 refuses becomes an Error with Code::kUsage that names the flag
/// and the nearest one that exists. --help and --version print to standard output and exit with 0;
/// the help text begins with the app's footer, which is meant for examples.
void parse_or_throw(CLI::App& app, int argc, const char* const* argv);

/// The arguments as one line that a shell reads back as the same arguments.
std::string shell_line(int argc, const char* const* argv);

}  // namespace lockstep
