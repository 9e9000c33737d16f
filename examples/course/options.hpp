#pragma once

#include <cstdint>
#include <cstdio>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/record.hpp"

namespace course {

/// Steps that run on the host before one is captured, so that the timed ones are replayed.
inline constexpr int64_t kCaptureWarmup = 2;

/// What the replicas of a model saw in their first forward, in the order in which they ran.
struct SeenShapes {
  std::mutex mutex;  // guards replicas: they run at the same time
  std::vector<lockstep::ReplicaRecord> replicas;
};

/// All flags of the course's programs; each program has those that its Program names. One step is
/// one optimizer update.
struct Options {
  int64_t steps = 20;
  int64_t batch = 64;
  int64_t dim = 1024;
  int64_t hidden = 1024;
  int64_t depth = 2;
  double lr = 0;  // the help text has the default
  int64_t seed = 0;
  std::string model = "mlp";
  std::string optimizer = "sgd";
  std::string devices;  // empty: every GPU, or cpu:2
  std::string json;     // where the record goes; "-" is standard output
  std::string trace;
  std::string init;
  std::string save;
  std::string data;
  std::optional<std::string> checkpoint = {};  // folder to save to and to resume from
  int64_t checkpoint_every = 10;
  int64_t checkpoint_keep = 3;
  bool quiet = false;
  std::string capture = "auto";             // whether a step becomes a CUDA graph: auto, on or off
  std::shared_ptr<SeenShapes> shapes = {};  // with --print-shapes: what the replicas saw

  // Programs that are started once for each rank.
  std::string backend = "auto";
  std::optional<double> timeout_s = {};  // of every wait for another rank
  int64_t check_replicas = 0;            // steps between comparisons of all weights; 0: never
  std::string compress = "off";          // what gradients are sent as: off, bf16 or fp16
  double bucket_mib = 25;
  std::string nonfinite = "warn";  // where a gradient is not finite: warn, stop or ignore
  int64_t virtual_shards = 0;      // parts that every batch is cut into; 0: as many as ranks

  // Programs that accumulate gradients.
  int64_t accum_steps = 1;  // micro-steps in one optimizer step
  int64_t print_steps = 0;  // first steps whose every micro-step or action is printed
  bool sync_every_step = false;
  bool no_divide = false;

  // Programs that compute in a lower precision.
  std::string amp;  // off, bf16 or fp16; empty: the device's default
  bool no_scaler = false;
  bool master_weights = false;
  int64_t overflow_at = 0;  // plants an infinite gradient in this step, from 1; 0: never

  // Programs that train in stages.
  int64_t micro_batches = 4;
  int64_t stages = 2;
  std::string schedule = "1f1b";
  int64_t chunks = 2;           // stages on each pipeline rank, with --schedule interleaved
  std::string place = "split";  // same, split, ranks, or a device number for each stage
  int64_t tensor_parallel = 1;  // ranks that divide a stage's matrices
  std::string cut = "count";    // count, time, or layers per stage
  bool recompute = false;
  std::string program;
  bool has_ranks = false;
  bool has_accumulation = false;
  bool has_amp = false;
  bool has_pipeline = false;
  std::string never_captured;  // why this program's step cannot be captured; "": it can

  /// Every flag and its value, as the record keeps them.
  std::map<std::string, std::string> as_text() const;

  /// Where text for people goes: standard error if the record goes to standard output.
  std::FILE* out() const { return json == "-" ? stderr : stdout; }
};

/// What a program adds to the shared flags.
struct Program {
  const char* name;
  const char* about;
  bool has_print_shapes = false;
  bool has_ranks = false;  ///< one process of several: flags for communication, and the transformer
  bool has_accumulation = false;    ///< several micro-steps in one optimizer step
  bool has_amp = false;             ///< lower precision
  bool has_pipeline = false;        ///< stages, with accumulation and lower precision on request
  const char* never_captured = "";  ///< why its step cannot be captured; "": it can
};

/// Reads the command line. A bad flag, value or folder is an Error before anything is started.
Options parse_options(const Program& program, int argc, char** argv);

/// The flag, if any, that makes the host look into single steps, which a captured step does not
/// allow; "" if there is none.
std::string host_work_of_steps(const Options& options);

}  // namespace course
