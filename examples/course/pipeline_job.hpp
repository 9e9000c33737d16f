#pragma once

#include <vector>

#include "course/hybrid.hpp"
#include "course/hybrid_links.hpp"
#include "course/job_record.hpp"
#include "lockstep/record.hpp"

namespace course {

/// The pipeline of the whole job from those of its ranks: stages and actions of all, span and
/// bubble as measured and as the schedule predicts them from the stages' mean times, and the mean
/// of what the ranks said along each axis.
lockstep::PipelineRecord job_pipeline(const std::vector<RankReport>& reports,
                                      const HybridPlan& plan, const Link& link);

}  // namespace course
