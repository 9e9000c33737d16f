#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "course/hybrid_links.hpp"
#include "course/hybrid_shapes.hpp"
#include "course/job_record.hpp"
#include "lockstep/pipeline.hpp"
#include "lockstep/record.hpp"

namespace course {

/// What is known about training in stages before it begins.
struct HybridFacts {
  HybridPlan plan;
  ModelCut cut;
  Links links;
  lockstep::Mesh mesh;
  int64_t rows = 0;  ///< of this rank's pipeline in one call
  std::function<lockstep::CommStats()> tensor_traffic;
};

/// Measures what this rank's stages do, from the traces of Pipeline::step.
class PipelineMeter {
 public:
  PipelineMeter(const lockstep::Pipeline& pipeline, HybridFacts facts, const Options& options,
                int rank);

  /// After each call of Pipeline::step.
  void note_call() { pending_.push_back(pipeline_.last_step()); }

  /// After the optimizer; a step that is not timed leaves no figures.
  void end_step(bool timed);

  const HybridFacts& facts() const { return facts_; }
  const lockstep::Pipeline& pipeline() const { return pipeline_; }

  /// This rank's part of the record: its pipeline, and what synchronisation cost.
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
    int64_t travelling_ns = 0;  // in which at least one stage synchronised
    int64_t exposed_ns = 0;     // after the last action
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
  std::vector<StageSums> stages_;  // [stage], of which only local ones are used
  SyncSums sync_;
  TrafficSums traffic_;
  TrafficSums traffic_before_;  // this step
};

}  // namespace course
