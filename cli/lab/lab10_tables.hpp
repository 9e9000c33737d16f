#pragma once

#include <string>
#include <vector>

#include "cli/lab/lab10_results.hpp"
#include "cli/lab/lab_charts.hpp"
#include "lockstep/table.hpp"

namespace lockstep::cli {

/// Every set-up of parts 10.1 to 10.5 with its name, in their order.
std::vector<NamedSet> parts_of(const Lab10Results& results);

/// The schedules that ran against each other, sequential first.
std::vector<NamedSet> schedules_of(const Lab10Results& results);

/// The comparison with sequential in which runs varied most.
Comparison noisiest_of(const Lab10Results& results);

/// Which stage of which rank lies on which device, in parts 10.1, 10.4 and 10.5.
Table placement_table(const Lab10Results& results);

/// When each stage's gradients were averaged in one step of the base.
Table synchronisation_table(const Lab10Results& results);

/// What a step does in each part, counted in its trace.
Table actions_table(const Lab10Results& results);

/// Bubble, step time and memory of each part.
Table timing_table(const Lab10Results& results);

/// Schedules that ran: bubble and span predicted and measured, step time, memory.
Table schedules_table(const Lab10Results& results);

/// Schedules played with the measured stage times.
Table simulated_table(const Lab10Results& results);

/// Volume and cost of communication per axis, predicted and measured.
Table communication_table(const Lab10Results& results);

}  // namespace lockstep::cli
