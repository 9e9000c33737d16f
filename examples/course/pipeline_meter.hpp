#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "course/hybrid.hpp"
#include "lockstep/mesh.hpp"
#include "lockstep/pipeline.hpp"
#include "lockstep/record.hpp"
#include "lockstep/world.hpp"

namespace course {

/// What messages cost: a time for each, and one for each byte.
struct Link {
  double call_ms = 0;
  double byte_ms = 0;

  double ms(double calls, int64_t bytes) const {
    return calls * call_ms + static_cast<double>(bytes) * byte_ms;
  }
};

/// The links along the three axes; an axis of size 1 costs nothing.
struct Links {
  Link data;      ///< an all-reduce, by the bytes that a rank sends in it
  Link pipeline;  ///< a message from one pipeline rank to the next
  Link tensor;    ///< as data
};

/// Sends a small and a large tensor along each axis, a few times. Collective.
Links measure_links(const HybridPlan& plan, const lockstep::World& world,
                    const lockstep::Mesh& mesh);

/// One call of Pipeline::step on one rank: from the begin of its first action to the end of its
/// last.
struct PipelineCall {
  int64_t begin_ns = 0;
  int64_t end_ns = 0;
  int64_t busy_ns = 0;  // of all its actions together
};

/// A rank's part of a pipeline, beyond what its record says.
struct PipelineReport {
  int pipeline = 0;  // which one of the job's: ranks with the same number have the same rows
  int ranks = 1;     // pipeline ranks that this process runs
  std::vector<PipelineCall> calls = {};  // of the timed steps; the actions recorded are the last's
};

/// What is known of training in stages before it begins.
struct HybridFacts {
  HybridPlan plan;
  ModelCut cut;
  Links links;
  lockstep::Mesh mesh;
  int64_t rows = 0;  ///< of this rank's pipeline in one call of Pipeline::step
  std::function<lockstep::CommStats()> tensor_traffic;
};

/// Measures what this rank's stages do, from the traces of Pipeline::step.
class PipelineMeter {
 public:
  PipelineMeter(const lockstep::Pipeline& pipeline, HybridFacts facts, const Options& options,
                int rank);

  /// Called after each Pipeline::step.
  void note_call() { pending_.push_back(pipeline_.last_step()); }

  /// Called after the optimizer; a step that is not timed leaves no figures.
  void end_step(bool timed);

  const HybridFacts& facts() const { return facts_; }
  const lockstep::Pipeline& pipeline() const { return pipeline_; }

  /// Fills in this rank's part of the record: its pipeline, and what synchronisation cost.
  void fill(lockstep::RunRecord& record) const;
  PipelineReport report() const;

 private:
  // Sums over the timed steps.
  struct StageSums {
    int64_t forward_ns = 0;
    int64_t forwards = 0;
    int64_t backward_ns = 0;
    int64_t backwards = 0;
    int64_t weight_ns = 0;
    int64_t weights = 0;
    int64_t peak_micro_batches = 0;  // the most of all steps
  };
  struct SyncSums {
    int64_t all_reduces = 0;
    int64_t bytes = 0;
    int64_t communication_ns = 0;  // in which at least one stage synchronised
    int64_t exposed_ns = 0;        // after the last action
  };
  struct TrafficSums {
    lockstep::LinkStats links;
    int64_t tensor_calls = 0;
    int64_t tensor_bytes = 0;
    int64_t tensor_ns = 0;
  };

  void count(const lockstep::StepTrace& trace);
  void count_sync(const lockstep::StepTrace& trace);
  TrafficSums read_traffic() const;
  std::vector<lockstep::StageRecord> stage_records() const;
  std::vector<lockstep::ActionRecord> last_actions() const;
  std::vector<lockstep::AxisRecord> axis_records() const;
  int64_t gradient_bytes() const;

  const lockstep::Pipeline& pipeline_;
  const HybridFacts facts_;
  const Options& options_;
  int rank_;
  std::vector<lockstep::StepTrace> pending_;  // of this step
  lockstep::StepTrace last_;
  int64_t timed_steps_ = 0;
  std::vector<PipelineCall> calls_;
  std::vector<StageSums> stages_;  // [stage]; only the local ones are used
  SyncSums sync_;
  TrafficSums traffic_;
  TrafficSums traffic_before_;  // before this step
};

}  // namespace course
