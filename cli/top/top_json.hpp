#pragma once

#include <nlohmann/json_fwd.hpp>

#include "cli/top/top_sample.hpp"

namespace lockstep::cli {

/// One object: {"schema", "runs": [{…, "ranks": [{…, "devices": […]}]}], "gpus": […]}. What is not
/// known is null; a loss that is not finite is the text "nan", "inf" or "-inf", as in records.
nlohmann::json top_json(const TopView& view);

}  // namespace lockstep::cli
