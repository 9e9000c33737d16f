#pragma once

#include <functional>
#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace lockstep {

/// A command line and what it is good for.
struct Example {
  std::string command;
  std::string meaning;
};

/// The examples of a help text, in 80 columns. Meant for an app's footer.
std::string format_examples(const std::vector<Example>& examples);

/// Parses a command line. If CLI11 rejects it, throws an Error (kUsage) that names the flag and the
/// nearest one that exists. --help and --version print to standard output and exit with 0. The help
/// text starts with the app's footer, which is meant for examples, and takes 80 columns. `prepare`
/// is called before help is printed or an error is worded; it may hide flags (group "") that do
/// not go with the words parsed so far.
void parse_or_throw(
    CLI::App& app, int argc, const char* const* argv, const std::function<void()>& prepare = [] {});

/// The arguments as one line, quoted for a shell.
std::string shell_line(int argc, const char* const* argv);

}  // namespace lockstep
