#pragma once

#include "course/options.hpp"

namespace CLI {
class App;
}

namespace course {

/// The flags of programs that train in stages.
void add_pipeline_flags(CLI::App& app, Options& options);

/// Refuses values that no model and no number of ranks could make right; plan_hybrid() refuses the
/// rest.
void check_pipeline_flags(const Options& options);

}  // namespace course
