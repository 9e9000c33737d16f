#pragma once

#include <cstdint>
#include <string>

#include "course/hybrid.hpp"
#include "course/options.hpp"
#include "lockstep/pipeline.hpp"
#include "lockstep/record.hpp"
#include "lockstep/table.hpp"
#include "lockstep/world.hpp"

namespace course {

/// "Rank: 0 | Local Rank: 0 | Devices: stage 0 on cpu:0 (core 0), …", unless --quiet. Rank 0 adds
/// the number of processes, the micro-batches and the schedule as a grid.
void print_placement(const lockstep::Pipeline& pipeline, const HybridPlan& plan,
                     const lockstep::World& world, const Options& options);

/// Where one call of Pipeline::step stands in the training, from 0.
struct CallNumber {
  int64_t step = 0;
  int64_t micro_step = 0;
};

/// Every forward, backward and synchronisation of a call in the order of their begins, a line each;
/// times are milliseconds since `since_ns`.
std::string describe_call(const lockstep::Pipeline& pipeline, const HybridPlan& plan, int rank,
                          const CallNumber& number, int64_t accum_steps, int64_t since_ns);

/// What each stage did, and the bubble as predicted and measured.
lockstep::Table stage_table(const lockstep::PipelineRecord& pipeline);

/// What ranks told each other along each axis, as predicted and measured.
lockstep::Table axis_table(const lockstep::PipelineRecord& pipeline);

}  // namespace course
