#pragma once

#include <string>

#include "cli/lab/lab.hpp"

namespace lockstep::cli {

/// The source of a program of the course, as it was when lockstep was built. `program` is its name
/// without ".cpp". cmake/embed_sources.cmake writes the definition.
SourceListing course_source(const std::string& program);

}  // namespace lockstep::cli
