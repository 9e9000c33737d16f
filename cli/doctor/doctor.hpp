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
  std::string remedy;  ///< what to do about it; empty if all is well
};

/// Judges facts: {"lockstep": version, "machine": machine_facts(), "probe": probe_facts()}.
/// A missing fact never counts as a good one.
std::vector<Finding> diagnose(const nlohmann::json& facts);

/// Whether code that CMake built for `architectures` ("80-real,90") runs on a GPU of this compute
/// capability ("9.0"): machine code runs on its own major version from its minor version on;
/// intermediate code, which all but -real architectures include, runs on whatever is newer.
bool gpu_code_serves(const std::string& architectures, const std::string& capability);

/// `lockstep doctor`: prints the findings; 0 if nothing failed, 1 otherwise.
int run_doctor(bool as_json);

}  // namespace lockstep::cli
