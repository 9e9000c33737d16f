#pragma once

#include <string>

namespace lockstep {

/// The remedy for an errno that tells of a limit of this process: of open files (EMFILE, ENFILE) or
/// of a file's size (EFBIG). Any other errno gets `otherwise`. `files_needed` is how many files the
/// caller's work keeps open; 0 where it does not know.
std::string limit_help(int error, std::string otherwise, int files_needed = 0);

}  // namespace lockstep
