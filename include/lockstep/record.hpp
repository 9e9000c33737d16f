#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace lockstep {

/// A distribution of measured values.
struct Stats {
  double mean = 0;
  double stddev = 0;  ///< of the sample; 0 for fewer than two values
  double median = 0;
  double p95 = 0;
  double min = 0;
  double max = 0;
  int64_t n = 0;
};

Stats summarize(std::span<const double> values);

/// What one logical device did in a run.
struct DeviceRecord {
  std::string name;                 ///< "cpu:0"
  std::string physical;             ///< "core 0"
  int shared_by = 1;                ///< logical devices on the same hardware, this one included
  int threads = 1;                  ///< compute threads
  int64_t peak_bytes = 0;           ///< most bytes live at once during the timed steps
  int64_t final_bytes = 0;          ///< bytes live after the last step
  double busy_fraction = 0;         ///< busy time over the time of the timed steps
  int64_t sent_bytes_per_step = 0;  ///< to other logical devices
  int64_t received_bytes_per_step = 0;
};

/// What one collective operation cost per optimizer step.
struct AllReduces {
  double count = 0;
  int64_t bytes = 0;
};

/// When one gradient bucket was communicated in the last step, from the begin of its backward.
struct BucketRecord {
  int index = 0;  ///< in launch order
  int64_t bytes = 0;
  int64_t parameters = 0;  ///< how many parameters share it
  double launched_ms = 0;
  double finished_ms = 0;  ///< after RunRecord::backward_ms: not wholly hidden behind backward
};

/// What one rank of a job did.
struct RankRecord {
  std::string host;
  double step_ms = 0;  ///< its own mean
};

/// An update that was not made because a gradient was not finite.
struct SkippedStepRecord {
  int64_t step = 0;  ///< of the optimizer, from 1
  std::string parameter;
  double scale_before = 0;
  double scale_after = 0;
};

/// What the peak memory of rank 0's device is made of, in bytes.
struct MemorySplit {
  int64_t weights = 0;  ///< with buffers
  int64_t gradients = 0;
  int64_t optimizer_state = 0;
  int64_t low_precision = 0;  ///< autocast's copies of weights
  int64_t activations = 0;    ///< the rest of the peak: activations, inputs, temporaries
};

/// What the gradients of the first optimizer step look like.
struct GradientCheck {
  double norm = 0;
  int64_t count = 0;                ///< elements
  double zero_share = 0;            ///< elements that are exactly 0, of all
  double fp16_lost = 0;             ///< elements that are not 0 but would be in fp16, of all
  double fp16_lost_scaled = 0;      ///< the same after a multiplication by 65536
  double fp16_overflow_scaled = 0;  ///< elements too large for fp16 after that, of all
};

/// Whether the training step was captured into CUDA graphs, and what that cost. Of rank 0.
struct CaptureRecord {
  bool captured = false;     ///< the last step was replayed
  std::string reason;        ///< why it was not; "" where it was
  int64_t graphs = 0;        ///< of a step
  int64_t replays = 0;       ///< of all steps
  int64_t memory_bytes = 0;  ///< held for the graphs' intermediate results
};

/// One action of a pipeline, measured or predicted. Times are from the step's begin.
struct ActionRecord {
  std::string kind;  ///< F, B, I or W as in schedules; S: a stage's gradients were averaged
  int rank = 0;
  int stage = 0;
  int micro_batch = 0;  ///< 0 for S
  std::string device;
  double begin_ms = 0;
  double end_ms = 0;
};

/// One stage of a pipeline on one rank. Times are means over the timed steps.
struct StageRecord {
  int rank = 0;
  int stage = 0;
  std::string device;
  int64_t layers = 0;
  int64_t parameters = 0;  ///< elements
  double forward_ms = 0;
  double backward_ms = 0;          ///< whole, or of the input where it is split
  double weight_ms = 0;            ///< of the weights, where it is split
  int64_t peak_micro_batches = 0;  ///< whose activations it held at once, at most
  int64_t message_bytes = 0;       ///< largest output that went to the next stage; 0 for the last
};

/// What ranks of one axis told each other in a step, per rank.
struct AxisRecord {
  std::string name;  ///< data, pipeline or tensor
  int size = 1;
  double calls = 0;
  int64_t predicted_bytes = 0;  ///< sent, from the model's shapes
  int64_t bytes = 0;            ///< sent, counted
  double predicted_ms = 0;      ///< from those bytes and a link measured before training
  double ms = 0;                ///< measured
};

/// How the last step of a pipeline went. Its span is from the first action's begin to the last
/// one's end, without synchronisation and update; its bubble is the share of the places' time in it
/// that no action took.
struct PipelineRecord {
  std::string schedule;
  std::string place;  ///< --place
  int64_t micro_batches = 1;
  std::vector<int64_t> rows;        ///< of each micro-batch, on rank 0
  std::vector<StageRecord> stages;  ///< of all ranks, by rank and stage
  double predicted_span_ms = 0;     ///< simulated from the stages' times
  double span_ms = 0;               ///< mean over the timed steps
  double predicted_bubble = 0;
  double bubble = 0;                    ///< mean over the timed steps
  std::vector<ActionRecord> actions;    ///< of the last step on all ranks, by begin
  std::vector<ActionRecord> predicted;  ///< of rank 0's pipeline, by begin
  std::vector<AxisRecord> axes;
};

/// The result of one run: what `--json` writes and all that tables and reports are made from.
struct RunRecord {
  static constexpr int kSchema = 1;

  std::string program;
  std::map<std::string, std::string> options;   ///< every flag with the value it had
  std::map<std::string, std::string> host;      ///< name, cpu, cores, memory, os
  std::map<std::string, std::string> versions;  ///< lockstep, libtorch, blas, compiler, cuda
  int world_size = 1;
  std::vector<DeviceRecord> devices;
  std::vector<int64_t> split;  ///< rows per device or rank
  Stats step_ms;
  int64_t warmup_steps = 0;  ///< steps left out of step_ms and of the memory peaks
  double total_s = 0;
  std::vector<double> losses;  ///< one per optimizer step
  double samples_per_s = 0;
  int64_t effective_batch = 0;
  AllReduces all_reduces;
  double comm_ms = 0;          ///< communication per step
  double exposed_comm_ms = 0;  ///< the part of it that no computation hid

  // Only where gradients are reduced in buckets; a record without them reads as empty and 0.
  std::vector<BucketRecord> buckets;  ///< of the last step, in launch order
  double backward_ms = 0;             ///< when the last step's backward ended, from its begin
  std::vector<RankRecord> ranks;      ///< [rank]

  // Only of programs that accumulate gradients or compute in a lower precision.
  int64_t accum_steps = 1;  ///< micro-steps in an optimizer step
  std::string amp = "off";  ///< off, bf16 or fp16
  std::vector<SkippedStepRecord> skipped_steps;
  std::optional<double> scale;  ///< of the scaler at the end; none without one
  int64_t nonfinite = 0;        ///< losses that were not finite
  std::optional<MemorySplit> memory;
  std::optional<GradientCheck> gradient_check;

  std::optional<CaptureRecord> capture;  ///< only where capture was asked for or found safe

  std::optional<PipelineRecord> pipeline;  ///< only of programs that train in stages
};

nlohmann::json to_json(const RunRecord& record);

/// Refuses another schema, a missing field, or one of the wrong type or out of range, by name.
RunRecord record_from_json(const nlohmann::json& json);

RunRecord read_record(const std::string& path);

/// Writes one JSON object; "-" is standard output. Files are written beside and renamed.
void write_record(const RunRecord& record, const std::string& path);

/// name, cpu, cores, memory and os of this machine.
std::map<std::string, std::string> describe_host();

}  // namespace lockstep
