#pragma once

#include <cstdint>
#include <cstdio>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace course {

/// The flags that all programs of the course share. One step is one optimizer update.
struct Options {
  int64_t steps = 20;
  int64_t batch = 64;
  int64_t dim = 1024;
  int64_t hidden = 1024;
  int64_t depth = 2;
  double lr = 0;  // where not given: as the help text says
  int64_t seed = 0;
  std::string model = "mlp";
  std::string optimizer = "sgd";
  std::string devices;  // empty: every GPU, or cpu:2
  std::string json;     // where the record goes; "-" is standard output
  std::string trace;
  std::string init;
  std::string save;
  std::string data;
  bool quiet = false;
  std::string capture = "auto";  // of the step into CUDA graphs: auto, on or off
  bool print_shapes = false;     // practical5_dp only

  // Of programs that are started once for each rank.
  std::string backend = "auto";
  std::optional<double> timeout_s = {};  // of every wait for other ranks
  int64_t check_replicas = 0;            // steps between comparisons of all weights; 0: never
  std::string compress = "off";          // gradients on their way: off, bf16 or fp16
  double bucket_mib = 25;
  std::string nonfinite = "warn";  // gradients that are not finite: warn, stop or ignore

  // Of programs that accumulate gradients.
  int64_t accum_steps = 1;  // micro-steps in one optimizer step
  bool sync_every_step = false;
  bool no_divide = false;

  // Of programs that compute in a lower precision.
  std::string amp;  // off, bf16 or fp16; empty: what suits the device
  bool no_scaler = false;
  bool master_weights = false;
  int64_t overflow_at = 0;  // plants an infinite gradient in this step, from 1; 0: never

  // Of programs that train in stages.
  int64_t micro_batches = 4;
  int64_t stages = 2;
  std::string schedule = "1f1b";
  int64_t chunks = 2;           // stages on each place, with --schedule interleaved
  std::string place = "split";  // same, split, ranks, or a device of the rank for each stage
  int64_t tensor_parallel = 1;  // ranks that divide a stage's matrices
  std::string cut = "count";    // count, time, or layers per stage
  bool recompute = false;
  int64_t print_steps = 1;  // whose every action is printed

  std::string program;
  bool has_ranks = false;
  bool has_accumulation = false;
  bool has_amp = false;
  bool has_pipeline = false;
  std::string never_captured;  // why the program's step cannot be; "": it can

  /// Every flag with its value, as the record keeps them.
  std::map<std::string, std::string> as_text() const;

  /// Where text for people goes: standard error where standard output carries the record.
  std::FILE* out() const { return json == "-" ? stderr : stdout; }
};

/// What a program adds to the shared flags.
struct Program {
  const char* name;
  const char* about;
  bool has_print_shapes = false;
  bool has_ranks = false;  ///< one process of several: flags of communication, and the transformer
  bool has_accumulation = false;  ///< several micro-steps in one optimizer step
  bool has_amp = false;           ///< lower precision
  bool has_pipeline = false;      ///< stages; with accumulation and lower precision where asked for
  const char* never_captured = "";  ///< why its step cannot be; "": it can
};

/// Reads the command line. A bad flag, value or folder is an Error before anything is started.
Options parse_options(const Program& program, int argc, char** argv);

/// The flag that makes the host look into single steps, which a captured one does not let it; ""
/// where none does.
std::string host_work_of_steps(const Options& options);

/// Refuse a flag's value that is out of range or none of those known.
void require_range(const char* flag, int64_t value, int64_t least, int64_t most);
void require_one_of(const char* flag, const std::string& value,
                    const std::vector<std::string>& known);

}  // namespace course
