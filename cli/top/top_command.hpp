#pragma once

#include "cli/top/top.hpp"

namespace CLI {
class App;
}

namespace lockstep::cli {

CLI::App* add_top_command(CLI::App& app, TopOptions& options);

}  // namespace lockstep::cli
