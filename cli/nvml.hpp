#pragma once

#include <nlohmann/json_fwd.hpp>

namespace lockstep::cli {

/// The NVIDIA driver's version and its GPUs (name, memory_bytes); null where there is no driver.
/// The driver's own library is opened at run time, so that lockstep runs where there is none.
nlohmann::json driver_facts();

}  // namespace lockstep::cli
