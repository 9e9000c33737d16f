#pragma once

#include <nlohmann/json_fwd.hpp>

#include "cli/child.hpp"

namespace lockstep::cli {

/// What this machine offers: cores, quota, memory, shared memory, limits, host name, environment,
/// transports between hosts, GPUs as the driver counts them, leftover boards. Values that cannot be
/// determined are null.
nlohmann::json machine_facts();

/// What `lockstep-probe` says about libtorch; {"error": text} if it cannot be run.
/// Measuring takes a second or two; without it there are only versions, libraries and GPUs.
nlohmann::json probe_facts(bool measure, const Interrupts& interrupts);

/// How many cores this machine keeps busy right now, watched for a moment.
double busy_cores();

}  // namespace lockstep::cli
