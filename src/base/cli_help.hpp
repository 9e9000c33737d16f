#pragma once

#include <string>

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace lockstep {

/// Gives the app and its subcommands lockstep's help: examples first, 80 columns, defaults in
/// words.
void use_lockstep_help(CLI::App& app);

/// What an option takes, as help and manual pages name it: "N", "FILE", "sgd|adamw"; "" for a
/// switch.
std::string value_name(const CLI::Option& option);

/// What an option does, with its default: "optimizer updates (default: 20)".
std::string description_with_default(const CLI::Option& option);

}  // namespace lockstep
