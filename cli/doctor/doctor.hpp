#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

namespace lockstep::cli {

enum class Level { kPass, kWarn, kFail };

/// "pass", "warn", "fail".
const char* level_name(Level level);

/// What one check found.
struct Finding {
  std::string check;  ///< "BLAS"
  Level level = Level::kPass;
  std::string value;   ///< what was measured
  std::string remedy;  ///< what to do about it; empty where all is well
};

/// Judges facts: {"lockstep": version, "machine": machine_facts(), "probe": probe_facts()}.
/// A fact that is missing is never taken for a good one.
std::vector<Finding> diagnose(const nlohmann::json& facts);

/// `lockstep doctor`: prints the findings; 0 where nothing failed, 1 otherwise.
int run_doctor(bool as_json);

}  // namespace lockstep::cli
