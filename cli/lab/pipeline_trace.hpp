#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "cli/lab/lab.hpp"
#include "lockstep/schedule.hpp"

// What the record of a pipelined step tells.

namespace lockstep::cli {

/// How the last step of a set-up's first run went; an empty record if it was not recorded.
const PipelineRecord& pipeline_of(const RunSet& set_up);

/// Mean over the repetitions.
double mean_of(const RunSet& set_up, double PipelineRecord::*value);

/// Actions of a step, counted in the trace.
struct ActionCounts {
  int64_t forwards = 0;
  int64_t backwards = 0;         ///< whole ones, or of the input if they are split
  int64_t synchronisations = 0;  ///< of a stage's gradients
};

/// The actions of all ranks.
ActionCounts counts_of(const PipelineRecord& pipeline);

/// The same of one rank.
ActionCounts counts_of(const PipelineRecord& pipeline, int rank);

/// "F0 F1 B0 B1" of each rank's device, under "rank 0 cpu:0", without synchronisation.
std::vector<std::pair<std::string, std::string>> order_of(const PipelineRecord& pipeline);

/// Names of the devices that the stages of one rank lie on, each once, by stage.
std::vector<std::string> devices_of(const PipelineRecord& pipeline, int rank);

/// Devices that any stage of any rank lies on.
int64_t devices_used(const PipelineRecord& pipeline);

int ranks_of(const PipelineRecord& pipeline);

/// The share of rank 0's computing time in which several of its devices computed.
double overlap_of(const PipelineRecord& pipeline);

/// When the gradients of one stage were averaged, in milliseconds from the step's begin.
struct Synchronisation {
  int rank = 0;
  int stage = 0;
  double last_backward_ms = 0;  ///< end of the stage's last backward
  double begin_ms = 0;
  double end_ms = 0;
  double hidden_ms = 0;  ///< while other stages of the rank still computed
};

/// By rank and begin.
std::vector<Synchronisation> synchronisations_of(const PipelineRecord& pipeline);

/// The most micro-batches whose activations a stage held at once, over all stages.
int64_t most_held(const PipelineRecord& pipeline);

/// Largest message from a stage to the next.
int64_t message_bytes(const PipelineRecord& pipeline);

/// A schedule played with the times of a measured run.
struct SimulatedSchedule {
  Schedule schedule;
  Simulation simulation;
};

/// gpipe, 1f1b, interleaved and zero-bubble with the mean stage times of a set-up on one rank. In
/// interleaved each pipeline rank has two half stages; it is left out if the micro-batches do not
/// fit. A backward that was measured whole is divided evenly. Empty if no times were recorded.
std::vector<SimulatedSchedule> simulate_schedules(const RunSet& set_up);

/// (stages - 1) / (micro-batches + stages - 1): gpipe's bubble if all stages take equally long.
double ideal_bubble(int64_t stages, int64_t micro_batches);

/// The largest loss_deviation from the reference among the set-ups with the same rows, -1 if none
/// can be compared.
double largest_deviation(const RunSet& reference, const std::vector<const RunSet*>& set_ups);

}  // namespace lockstep::cli
