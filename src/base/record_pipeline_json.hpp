#pragma once

#include <optional>

#include "base/record_fields.hpp"
#include "lockstep/record.hpp"

namespace lockstep {

/// Adds what a pipeline did to a record's JSON: the contract's fields beside the others, all else
/// in "pipeline".
void add_pipeline(const PipelineRecord& pipeline, nlohmann::json& record);

/// None where the record has none of these fields; one of them calls for all.
std::optional<PipelineRecord> read_pipeline(const Fields& record);

}  // namespace lockstep
