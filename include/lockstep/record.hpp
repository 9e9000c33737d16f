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
  std::string name;          ///< "cpu:0"
  std::string physical;      ///< "core 0"
  int shared_by = 1;         ///< logical devices on the same hardware, this one included
  int threads = 1;           ///< compute threads
  int64_t peak_bytes = 0;    ///< most bytes live at once during the timed steps
  int64_t final_bytes = 0;   ///< bytes live after the last step
  double busy_fraction = 0;  ///< busy time over the time of the timed steps
  /// Share of the same time in which the threads that lead its work were ready to run but had no
  /// core. None on a GPU, and where the kernel does not tell.
  std::optional<double> queued_fraction = {};
  int64_t sent_bytes_per_step = 0;  ///< to other logical devices
  int64_t received_bytes_per_step = 0;

  bool on_cpu() const { return name.starts_with("cpu"); }
  std::string hardware() const;  ///< "core 0", "all cores, shared by 4", "GPU 0, shared by 2"
};

/// The model that was trained.
struct ModelRecord {
  std::string description;  ///< its layers and widths, for people
  int64_t parameters = 0;   ///< trained elements; of rank 0 if ranks divide matrices
  std::string dtype;        ///< of the weights: "float32"
};

/// What one replica of DataParallel saw in its first forward.
struct ReplicaRecord {
  std::string device;
  std::vector<int64_t> input;  ///< shape
  std::vector<int64_t> output;
};

/// All-reduces per optimizer step.
struct AllReduces {
  double count = 0;
  int64_t bytes = 0;
};

/// When one gradient bucket was communicated in the last step. Times count from the start of its
/// backward.
struct BucketRecord {
  int index = 0;  ///< in launch order
  int64_t bytes = 0;
  int64_t parameters = 0;  ///< how many parameters share it
  double launched_ms = 0;
  double finished_ms = 0;  ///< past RunRecord::backward_ms if backward did not hide all of it
};

/// What one rank of a job did.
struct RankRecord {
  std::string host;
  double step_ms = 0;  ///< mean of this rank
};

/// An update that was not made because a gradient was not finite.
struct SkippedStepRecord {
  int64_t step = 0;  ///< of the optimizer, from 1
  std::string parameter;
  double scale_before = 0;
  double scale_after = 0;
};

/// The peak memory of rank 0's device by use, in bytes.
struct MemorySplit {
  int64_t weights = 0;  ///< with buffers
  int64_t gradients = 0;
  int64_t optimizer_state = 0;
  int64_t low_precision = 0;  ///< copies of weights that autocast keeps
  int64_t activations = 0;    ///< the rest of the peak: activations, inputs, temporaries
};

/// Statistics of the gradients of the first optimizer step.
struct GradientCheck {
  double norm = 0;
  int64_t count = 0;                ///< elements
  double zero_share = 0;            ///< share of elements that are exactly 0
  double fp16_lost = 0;             ///< share of elements that fp16 would round to 0
  double fp16_lost_scaled = 0;      ///< the same after multiplication by 65536
  double fp16_overflow_scaled = 0;  ///< share of elements too large for fp16 after that
};

/// Whether rank 0 captured its training step into CUDA graphs, and at what cost.
struct CaptureRecord {
  bool captured = false;     ///< whether the last step was replayed
  std::string reason;        ///< why it was not; "" if it was
  int64_t graphs = 0;        ///< per step
  int64_t replays = 0;       ///< in all steps
  int64_t memory_bytes = 0;  ///< held for the graphs' intermediate results
};

/// One action of a pipeline, measured or predicted. Times count from the start of the step.
struct ActionRecord {
  std::string kind;  ///< F, B, I or W as in schedules, or S for averaging a stage's gradients
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
  double backward_ms = 0;          ///< of the input only, if backward is split
  double weight_ms = 0;            ///< of the weights, if backward is split
  int64_t peak_micro_batches = 0;  ///< the most whose activations it held at once
  int64_t message_bytes = 0;       ///< largest output sent to the next stage; 0 for the last
};

/// Communication of one rank along one axis of the mesh, per step.
struct AxisRecord {
  std::string name;  ///< data, pipeline or tensor
  int size = 1;
  double calls = 0;
  int64_t predicted_bytes = 0;  ///< sent, according to the model's shapes
  int64_t bytes = 0;            ///< sent, counted
  double predicted_ms = 0;      ///< from those bytes and the link's speed before training
  double ms = 0;                ///< measured
};

/// How a pipeline ran. The span of a step is the time from its first action to its last, without
/// synchronisation and update. The bubble is the share of that time in which pipeline ranks wait.
struct PipelineRecord {
  std::string schedule;
  std::string place;  ///< the value of --place
  int64_t micro_batches = 1;
  std::vector<int64_t> rows;        ///< rows of each micro-batch on rank 0
  std::vector<StageRecord> stages;  ///< of all ranks, by rank and stage
  double predicted_span_ms = 0;     ///< simulated from the stages' times
  double span_ms = 0;               ///< mean over the timed steps
  double predicted_bubble = 0;
  double bubble = 0;                    ///< mean over the timed steps
  std::vector<ActionRecord> actions;    ///< of the last step on all ranks, by start
  std::vector<ActionRecord> predicted;  ///< of rank 0's pipeline, by start
  std::vector<AxisRecord> axes;
};

/// The measurements of one run. `--json` writes them; tables and reports are made from them.
struct RunRecord {
  static constexpr int kSchema = 1;

  std::string program;
  std::map<std::string, std::string> options;   ///< every flag with its value
  std::map<std::string, std::string> host;      ///< name, cpu, cores, memory, os
  std::map<std::string, std::string> versions;  ///< see describe_versions()
  std::optional<ModelRecord> model;             ///< set by the course's programs
  std::vector<ReplicaRecord> replicas;          ///< by device, set only with --print-shapes
  int world_size = 1;
  std::vector<DeviceRecord> devices;
  std::vector<int64_t> split;  ///< rows per device or rank
  Stats step_ms;
  int64_t warmup_steps = 0;  ///< steps excluded from step_ms and from the memory peaks
  double total_s = 0;
  std::vector<double> losses;  ///< one per optimizer step of this process
  int64_t resumed_after = 0;   ///< steps of earlier processes; losses and times are of later ones
  double samples_per_s = 0;
  int64_t effective_batch = 0;
  AllReduces all_reduces;
  double comm_ms = 0;          ///< communication per step
  double exposed_comm_ms = 0;  ///< the part that computation did not hide

  // Set only if gradients are reduced in buckets.
  std::vector<BucketRecord> buckets;  ///< of the last step, in launch order
  double backward_ms = 0;             ///< duration of the last step's backward
  std::vector<RankRecord> ranks;      ///< [rank]

  // Set only by programs that accumulate gradients or compute in lower precision.
  int64_t accum_steps = 1;  ///< micro-steps per optimizer step
  std::string amp = "off";  ///< off, bf16 or fp16
  std::vector<SkippedStepRecord> skipped_steps;
  std::optional<double> scale;  ///< of the GradScaler at the end, if there is one
  int64_t nonfinite = 0;        ///< number of losses that were not finite
  std::optional<MemorySplit> memory;
  std::optional<GradientCheck> gradient_check;

  std::optional<CaptureRecord> capture;  ///< set if capture was requested or found safe

  std::optional<PipelineRecord> pipeline;  ///< set by programs that train in stages
};

nlohmann::json to_json(const RunRecord& record);

/// Throws an Error that names the field if the schema is another one, or a field is missing, has
/// the wrong type or is out of range.
RunRecord record_from_json(const nlohmann::json& json);

RunRecord read_record(const std::string& path);

/// Writes one JSON object, atomically if `path` is a file; "-" is standard output.
void write_record(const RunRecord& record, const std::string& path);

/// name, cpu, cores, memory and os of this machine.
std::map<std::string, std::string> describe_host();

}  // namespace lockstep
