#pragma once

#include <nlohmann/json_fwd.hpp>

#include "cli/child.hpp"

namespace lockstep::cli {

/// What this machine offers: cores, quota, memory, shared memory, limits, host name, environment,
/// GPUs as the driver counts them, boards left over. Values that cannot be had are null.
nlohmann::json machine_facts();

/// What `lockstep-probe` says about libtorch; {"error": text} where it cannot be run.
/// Measuring takes a second or two; without it only versions, libraries and GPUs are there.
nlohmann::json probe_facts(bool measure, const Interrupts& interrupts);

/// How many cores' worth of time this machine spends right now, watched for a moment.
double busy_cores();

}  // namespace lockstep::cli
