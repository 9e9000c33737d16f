#pragma once

#include <string>

namespace CLI {
class App;
}

namespace lockstep::cli {

/// What `lockstep top` was asked for.
struct TopOptions {
  std::string run = {};  ///< a run's name or its beginning; empty: all
  bool once = false;
  bool json = false;
  double interval_s = 1;
};

/// `lockstep top`: shows this user's live runs until the user quits. It needs only their boards.
int run_top(const TopOptions& options);

CLI::App* add_top_command(CLI::App& app, TopOptions& options);

}  // namespace lockstep::cli
