#include "course/hybrid_options.hpp"

#include <fmt/format.h>

#include <CLI/CLI.hpp>

#include "lockstep/error.hpp"
#include "lockstep/schedule.hpp"

namespace course {

void add_pipeline_flags(CLI::App& app, Options& options) {
  app.add_option("--micro-batches", options.micro_batches,
                 "parts of a rank's rows that flow through the stages")
      ->capture_default_str();
  app.add_option("--stages", options.stages, "parts of the model")->capture_default_str();
  app.add_option("--schedule", options.schedule,
                 "gpipe, 1f1b, interleaved, zero-bubble or sequential")
      ->capture_default_str();
  app.add_option("--chunks", options.chunks,
                 "stages on each place, with --schedule interleaved only")
      ->capture_default_str();
  app.add_option("--place", options.place,
                 "split: a device of the rank for each stage; same: one device for all; ranks: a "
                 "rank for each; or a device for each stage, such as 0,0,1,1")
      ->capture_default_str();
  app.add_option("--tensor-parallel", options.tensor_parallel,
                 "ranks that divide the matrices of a stage, with --place ranks only")
      ->capture_default_str();
  app.add_option("--cut", options.cut,
                 "layers per stage: count: equally many; time: equally long; or a list such as 3,2")
      ->capture_default_str();
  app.add_flag("--recompute", options.recompute,
               "keep a stage's inputs only and compute its activations again for backward");
  app.add_option("--print-steps", options.print_steps,
                 "first steps whose forwards, backwards and synchronisations are printed")
      ->capture_default_str();
}

void check_pipeline_flags(const Options& options) {
  constexpr int64_t kMost = 1 << 16;
  require_range("--micro-batches", options.micro_batches, 1, kMost);
  require_range("--stages", options.stages, 1, kMost);
  require_range("--chunks", options.chunks, 1, kMost);
  require_range("--tensor-parallel", options.tensor_parallel, 1, kMost);
  require_range("--print-steps", options.print_steps, 0, 100'000'000);
  require_one_of("--schedule", options.schedule, lockstep::schedule_names());
  if (options.tensor_parallel > 1 && options.place != "ranks") {
    throw lockstep::Error(
        lockstep::Code::kUsage,
        fmt::format("--tensor-parallel {} divides matrices over ranks, but --place {} gives each "
                    "rank whole ones",
                    options.tensor_parallel, options.place),
        "add --place ranks");
  }
}

}  // namespace course
