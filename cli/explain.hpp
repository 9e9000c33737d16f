#pragma once

#include <string>

namespace lockstep::cli {

/// What one code means ("LS0002", "ls0002" or "2"), or the list of all where `code` is empty.
/// An unknown code is an Error that names the nearest.
std::string explain(const std::string& code);

}  // namespace lockstep::cli
