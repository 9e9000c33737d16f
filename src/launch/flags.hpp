#pragma once

#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>

// The flags of `lockstep run`, and the lists and numbers they take.

namespace lockstep {

/// One flag. The command line, the PET_ variables and --help are all made from the table of these.
struct FlagInfo {
  std::string_view name;      ///< without dashes: "nproc-per-node"
  std::string_view letter;    ///< "n", or "" for none
  std::string_view value;     ///< the value's description in --help; "" for a switch
  std::string_view help;      ///< one line
  std::string_view group;     ///< heading in --help
  std::string_view variable;  ///< read if the flag is absent: "PET_NNODES"; "" for none

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

/// The given flags, completed from variables. A switch that is on has the text "1".
Settings collect_settings(const std::map<std::string, std::string>& given,
                          const VariableLookup& lookup);

/// The most hosts of a job.
inline constexpr int kMostHosts = 2048;

/// --nnodes: the hosts of a job. An attempt begins with `most` of them, or with fewer, but at least
/// `least`, if no more come.
struct HostCount {
  int least = 1;
  int most = 1;

  bool several() const { return most > 1; }
  bool elastic() const { return least < most; }
  std::string text() const;   ///< "3", "1:3"
  std::string words() const;  ///< "3", "1 to 3"
  bool operator==(const HostCount&) const = default;
};

/// "3" or "1:3"; nullopt for anything else, and for more than kMostHosts.
std::optional<HostCount> parse_host_count(std::string_view text);

/// A finite decimal number; nullopt for anything else.
std::optional<double> parse_finite_number(std::string_view text);

}  // namespace lockstep
