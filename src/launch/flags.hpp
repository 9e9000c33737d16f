#pragma once

#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>

namespace lockstep {

/// A flag of `lockstep run`. The table of them is what the command line, the PET_ variables and
/// --help are made from.
struct FlagInfo {
  std::string_view name;      ///< "nproc-per-node": the word without its dashes
  std::string_view letter;    ///< "n", or "" for none
  std::string_view value;     ///< what it takes, for --help; "": nothing, it is a switch
  std::string_view help;      ///< one line
  std::string_view group;     ///< heading in --help
  std::string_view variable;  ///< read where the flag is absent: "PET_NNODES"; "" for none

  bool is_switch() const { return value.empty(); }
};

std::span<const FlagInfo> run_flags();

/// A value as text, and where it came from: "--nnodes", "PET_NNODES", "SLURM_NNODES".
struct Setting {
  std::string text;
  std::string source;
};

/// What the command line and the environment ask for: [flag name].
using Settings = std::map<std::string, Setting, std::less<>>;

using VariableLookup = std::function<const char*(const char* name)>;  ///< as std::getenv

/// The flags that were given, completed from variables. A switch that is on has the text "1".
Settings collect_settings(const std::map<std::string, std::string>& given,
                          const VariableLookup& lookup);

}  // namespace lockstep
