#pragma once

#include <vector>

#include "course/job_record.hpp"
#include "lockstep/record.hpp"
#include "lockstep/table.hpp"

namespace course {

/// What each device of one process did.
lockstep::Table device_table(const lockstep::RunRecord& record);

/// What each rank of a job did, how much of the communication was hidden, and who was slowest.
lockstep::Table rank_table(const lockstep::RunRecord& job, const std::vector<RankReport>& reports);

}  // namespace course
