#pragma once

#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace lockstep::cli {

/// A command line in two: `lockstep run FLAGS` for the parser, and the program with all that
/// follows it, which is not lockstep's business.
struct ProgramLine {
  std::vector<std::string> flags;    ///< from argv[0] on; each flag as --name=value
  std::vector<std::string> program;  ///< empty: none was named

  std::vector<const char*> flag_pointers() const;
};

/// Cuts at the first word that is neither a flag nor a flag's value, or after "--". Underscores in
/// flags become dashes, as torchrun takes both. Lines of other commands stay as they are.
ProgramLine cut_at_program(int argc, const char* const* argv,
                           const std::vector<const CLI::App*>& commands);

}  // namespace lockstep::cli
