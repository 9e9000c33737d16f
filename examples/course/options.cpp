#include "course/options.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>

#include "course/model.hpp"
#include "lockstep/cli_parse.hpp"
#include "lockstep/error.hpp"
#include "lockstep/rank_environment.hpp"
#include "lockstep/schedule.hpp"

namespace course {
namespace {

using lockstep::Code;
using lockstep::Error;

constexpr int64_t kLargestSize = 1 << 20;

void require_range(const char* flag, int64_t value, int64_t least, int64_t most) {
  if (value >= least && value <= most) return;
  throw Error(Code::kUsage, fmt::format("{} {} is out of range", flag, value),
              fmt::format("give a whole number from {} to {}", least, most));
}

void require_one_of(const char* flag, const std::string& value,
                    const std::vector<std::string>& known) {
  if (std::find(known.begin(), known.end(), value) != known.end()) return;
  const std::string near = lockstep::did_you_mean(value, known);
  throw Error(Code::kUsage, fmt::format("{} \"{}\" is unknown", flag, value),
              fmt::format("use {}{}", fmt::join(known, ", "),
                          near.empty() ? "" : fmt::format("; did you mean {}?", near)));
}

// Checked at the start: a run of an hour must not fail at its end because its output has no folder,
// or one that takes no file. Only a file shows that: what the permissions say does not hold for
// root, quotas and network folders.
void require_writable_folder(const char* flag, const std::string& path) {
  if (path.empty() || path == "-") return;
  const auto folder = std::filesystem::absolute(path).parent_path();
  if (std::filesystem::is_directory(path)) {
    throw Error(Code::kFileWrite, fmt::format("{} {}: that is a folder", flag, path),
                "name a file in it");
  }
  if (!std::filesystem::is_directory(folder)) {
    throw Error(Code::kFileWrite,
                fmt::format("{} {}: there is no folder {}", flag, path, folder.string()),
                "make the folder first, or name a file in one that exists");
  }
  std::string trial = (folder / ".lockstep-XXXXXX").string();
  const int file = ::mkstemp(trial.data());
  if (file < 0) {
    throw Error(Code::kFileWrite,
                fmt::format("{} {}: no file can be written to {}: {}", flag, path, folder.string(),
                            std::strerror(errno)),
                "name a file in a folder you may write to");
  }
  ::close(file);
  ::unlink(trial.c_str());
}

void require_readable(const char* flag, const std::string& path) {
  if (path.empty() || std::filesystem::is_regular_file(path)) return;
  throw Error(Code::kFileRead, fmt::format("{} {}: there is no such file", flag, path),
              "name a safetensors file; --save writes one");
}

void check_model(const Options& options) {
  if (!options.has_ranks && options.model == "transformer") {
    throw Error(Code::kUsage, fmt::format("{} trains the mlp only", options.program),
                "leave --model out");
  }
  if (!options.has_ranks && options.model != "mlp") {
    throw Error(Code::kUsage, fmt::format("--model \"{}\" is unknown", options.model),
                "use --model mlp");
  }
  require_one_of("--model", options.model, {"mlp", "transformer"});
  if (options.model == "transformer") require_transformer_sizes(options);
}

// Checked before any rank waits for another, so that a mistake costs nothing.
void check_ranks(const Options& options) {
  require_one_of("--backend", options.backend, lockstep::backend_names());
  require_one_of("--nonfinite", options.nonfinite, {"warn", "stop", "ignore"});
  if (!options.has_pipeline) {
    require_one_of("--compress", options.compress, {"off", "bf16", "fp16"});
    require_range("--check-replicas", options.check_replicas, 0, 100'000'000);
  }
  if (options.timeout_s && !(*options.timeout_s > 0 && *options.timeout_s <= 1e6)) {
    throw Error(Code::kUsage, fmt::format("--timeout {} is out of range", *options.timeout_s),
                "give seconds above 0, a million at most");
  }
  if (!(options.bucket_mib > 0 && options.bucket_mib <= 1 << 20)) {
    throw Error(Code::kUsage, fmt::format("--bucket-mib {} is out of range", options.bucket_mib),
                "give MiB above 0, such as 25 or 0.5");
  }
  require_range("--virtual-shards", options.virtual_shards, 0, 1 << 20);
  if (options.virtual_shards > 0 && options.batch % options.virtual_shards != 0) {
    throw Error(Code::kSplit,
                fmt::format("--batch {} cannot be cut into {} equal parts", options.batch,
                            options.virtual_shards),
                "give a --batch that is a multiple of --virtual-shards");
  }
  if (options.has_pipeline) return;  // its ranks need not have rows of their own
  const int ranks = lockstep::RankEnvironment::from_env().world_size;
  if (options.virtual_shards % ranks != 0) {
    throw Error(Code::kSplit,
                fmt::format("--virtual-shards {} cannot be divided over {} ranks",
                            options.virtual_shards, ranks),
                "give a multiple of every number of ranks that you will use");
  }
  if (options.virtual_shards > 0 && options.compress != "off") {
    throw Error(Code::kUsage,
                "--compress adds gradients in an order that depends on the ranks, and "
                "--virtual-shards does not",
                "leave one of them out");
  }
  if (options.batch < ranks) {
    throw Error(Code::kSplit,
                fmt::format("--batch {} cannot be divided over {} ranks: each needs a row",
                            options.batch, ranks),
                fmt::format("give --batch {} or more, or start fewer ranks", ranks));
  }
}

void check_capture(const Options& options) {
  require_one_of("--capture", options.capture, {"auto", "on", "off"});
  if (options.capture != "on") return;
  if (!options.never_captured.empty()) {
    throw Error(Code::kUsage, fmt::format("--capture on: {}", options.never_captured),
                "leave --capture out");
  }
  const std::string seen = host_work_of_steps(options);
  if (seen.empty()) return;
  throw Error(Code::kUsage,
              fmt::format("--capture on and {}, which looks into single steps: a captured one runs "
                          "without the host",
                          seen),
              "leave one of them out");
}

void check_amp(const Options& options) {
  if (!options.amp.empty()) require_one_of("--amp", options.amp, {"off", "bf16", "fp16"});
  if (options.master_weights && options.amp == "off") {
    throw Error(Code::kUsage, "--master-weights needs a lower precision to copy the weights to",
                "add --amp bf16 or --amp fp16");
  }
  if (options.overflow_at < 0 || options.overflow_at > options.steps) {
    throw Error(Code::kUsage,
                fmt::format("--overflow-at {} is none of the steps 1 to {}", options.overflow_at,
                            options.steps),
                fmt::format("give a step from 1 to {}, or leave it out", options.steps));
  }
}

// Refuses what is wrong for every model and number of ranks; plan_hybrid() refuses the rest.
void check_pipeline_flags(const Options& options) {
  constexpr int64_t kMost = 1 << 16;
  require_range("--micro-batches", options.micro_batches, 1, kMost);
  require_range("--stages", options.stages, 1, kMost);
  require_range("--chunks", options.chunks, 1, kMost);
  require_range("--tensor-parallel", options.tensor_parallel, 1, kMost);
  require_one_of("--schedule", options.schedule, lockstep::schedule_names());
  if (options.tensor_parallel > 1 && options.place != "ranks") {
    throw Error(
        Code::kUsage,
        fmt::format("--tensor-parallel {} divides matrices over ranks, but --place {} gives each "
                    "rank whole ones",
                    options.tensor_parallel, options.place),
        "add --place ranks");
  }
}

void check(const Options& options) {
  require_range("--steps", options.steps, 1, 100'000'000);
  require_range("--batch", options.batch, 1, 1 << 24);
  require_range("--dim", options.dim, 1, kLargestSize);
  require_range("--hidden", options.hidden, 1, kLargestSize);
  require_range("--depth", options.depth, 0, 10'000);
  require_range("--seed", options.seed, 0, INT64_MAX);
  if (!std::isfinite(options.lr) || options.lr <= 0) {
    throw Error(Code::kUsage, fmt::format("--lr {} is not a learning rate", options.lr),
                "give a number above 0");
  }
  check_model(options);
  if (options.optimizer != "sgd" && options.optimizer != "adamw") {
    throw Error(Code::kUsage, fmt::format("--optimizer \"{}\" is unknown", options.optimizer),
                "use sgd or adamw");
  }
  check_capture(options);
  if (options.has_ranks) check_ranks(options);
  if (options.has_accumulation) {
    require_range("--accum-steps", options.accum_steps, 1, 1 << 20);
    require_range("--print-steps", options.print_steps, 0, 100'000'000);
  }
  if (options.has_amp) check_amp(options);
  if (options.has_pipeline) check_pipeline_flags(options);
  if (options.checkpoint) {
    require_range("--checkpoint-every", options.checkpoint_every, 1, 100'000'000);
    require_range("--checkpoint-keep", options.checkpoint_keep, 1, 1'000'000);
  }
  require_readable("--init", options.init);
  require_readable("--data", options.data);
  require_writable_folder("--json", options.json);
  require_writable_folder("--trace", options.trace);
  require_writable_folder("--save", options.save);
}

double default_lr(const Options& options) {
  if (options.optimizer == "adamw") return 1e-3;
  return options.model == "transformer" ? 0.01 : 0.5;
}

CLI::Option* add_shared_flags(CLI::App& app, Options& options) {
  app.add_option("--steps", options.steps, "optimizer updates")->capture_default_str();
  app.add_option("--batch", options.batch,
                 options.has_accumulation ? "rows of one micro-step over all ranks"
                 : options.has_ranks      ? "rows of one step over all ranks"
                                          : "rows of one step over all devices")
      ->capture_default_str();
  app.add_option("--dim", options.dim, "width of input and output")->capture_default_str();
  app.add_option("--hidden", options.hidden, "width of the hidden layers")->capture_default_str();
  app.add_option("--depth", options.depth,
                 options.has_ranks ? "hidden-to-hidden layers, or blocks of the transformer"
                                   : "hidden-to-hidden layers")
      ->capture_default_str();
  auto* lr = app.add_option("--lr", options.lr,
                            options.has_ranks
                                ? "learning rate (default: 0.5 for sgd, with the transformer 0.01; "
                                  "0.001 for adamw)"
                                : "learning rate (default: 0.5 for sgd, 0.001 for adamw)");
  app.add_option("--seed", options.seed, "of initial weights and generated batches")
      ->capture_default_str();
  app.add_option("--model", options.model, "what is trained")
      ->type_name(options.has_ranks ? "mlp|transformer" : "mlp")
      ->capture_default_str();
  app.add_option("--optimizer", options.optimizer, "how weights are updated")
      ->capture_default_str()
      ->type_name("sgd|adamw");
  app.add_option("--devices", options.devices,
                 options.has_ranks
                     ? "logical devices of this host, for all of its ranks: cpu:4, cuda, "
                       "cuda:0,1 or cuda:0*4 (default: a GPU each, shared where there are too few; "
                       "without any a share of the cores)"
                     : "logical devices: cpu:4, cuda, cuda:0,1 or cuda:0*4 (default: every GPU, "
                       "or cpu:2)")
      ->type_name("SPEC");
  app.add_option("--json", options.json, "write the result record here; - is standard output")
      ->envname("LOCKSTEP_RECORD")
      ->type_name("FILE");
  app.add_option("--trace", options.trace, "write a timeline here; ui.perfetto.dev opens it")
      ->type_name("FILE");
  app.add_option("--init", options.init, "start from these weights (safetensors)")
      ->type_name("FILE");
  app.add_option("--save", options.save, "write the trained weights here (safetensors)")
      ->type_name("FILE");
  app.add_option("--data", options.data, "train on tensors x and y of this file (safetensors)")
      ->type_name("FILE");
  auto* folder = app.add_option("--checkpoint", options.checkpoint,
                                "save the run to this folder, and resume from it if it has any")
                     ->type_name("DIR");
  app.add_option("--checkpoint-every", options.checkpoint_every,
                 "steps between two checkpoints; the last step is saved too")
      ->capture_default_str()
      ->needs(folder);
  app.add_option("--checkpoint-keep", options.checkpoint_keep, "how many checkpoints to keep")
      ->capture_default_str()
      ->needs(folder);
  app.add_option("--capture", options.capture,
                 "replay the step as CUDA graphs; auto: on a GPU, where it is safe")
      ->capture_default_str()
      ->type_name("auto|on|off");
  app.add_flag("--quiet", options.quiet, "print nothing but errors");
  return lr;
}

void add_rank_flags(CLI::App& app, Options& options) {
  app.add_option("--backend", options.backend, "how ranks communicate")
      ->capture_default_str()
      ->type_name("auto|self|shm|gloo|two_level|mpi|nccl|ipc");
  app.add_option("--timeout", options.timeout_s,
                 "seconds to wait for other ranks (default: the launcher's, or 300)");
  app.add_option("--bucket-mib", options.bucket_mib, "largest gradient bucket, in MiB")
      ->capture_default_str();
  app.add_option("--nonfinite", options.nonfinite,
                 "what to do if a gradient of a rank is infinite or not a number")
      ->capture_default_str()
      ->type_name("warn|stop|ignore");
  app.add_option("--virtual-shards", options.virtual_shards,
                 "cut each batch into so many parts, whatever the number of ranks: the weights are "
                 "the same bits then; 0: off")
      ->capture_default_str();
  if (options.has_pipeline) return;
  app.add_option("--check-replicas", options.check_replicas,
                 "compare the weights of all ranks every so many steps; 0: never")
      ->capture_default_str();
  app.add_option("--compress", options.compress, "precision in which gradients are sent")
      ->capture_default_str()
      ->type_name("off|bf16|fp16");
}

void add_accumulation_flags(CLI::App& app, Options& options) {
  options.accum_steps = options.has_pipeline ? 1 : 4;
  options.print_steps = options.has_pipeline ? 1 : 2;
  app.add_option("--accum-steps", options.accum_steps, "micro-steps in one optimizer step")
      ->capture_default_str();
  app.add_option("--print-steps", options.print_steps,
                 options.has_pipeline
                     ? "first steps whose forwards, backwards and synchronisations are printed"
                     : "first steps of which a line says what each micro-step did")
      ->capture_default_str();
  if (options.has_pipeline) return;
  app.add_flag("--sync-every-step", options.sync_every_step,
               "average gradients in every micro-step: what happens without no_sync");
  app.add_flag(
      "--no-divide", options.no_divide,
      "do not divide the loss by --accum-steps: gradients become that many times as large");
}

void add_amp_flags(CLI::App& app, Options& options) {
  if (options.has_pipeline) {
    options.amp = "off";
    app.add_option("--amp", options.amp, "precision of matrix products")
        ->type_name("off|bf16|fp16")
        ->capture_default_str();
    return;
  }
  app.add_option("--amp", options.amp,
                 "precision of matrix products (default: fp16 on a GPU, bf16 on the CPU)")
      ->type_name("off|bf16|fp16");
  app.add_flag("--no-scaler", options.no_scaler, "train without GradScaler");
  app.add_flag(
      "--master-weights", options.master_weights,
      "keep the weights in float32 beside low-precision ones that the model computes with");
  app.add_option("--overflow-at", options.overflow_at,
                 "plant an infinite gradient on the last rank in this step, counted from 1");
}

void add_pipeline_flags(CLI::App& app, Options& options) {
  app.add_option("--micro-batches", options.micro_batches,
                 "parts of a rank's rows that flow through the stages; with --virtual-shards its "
                 "share of them")
      ->capture_default_str()
      ->excludes("--virtual-shards");
  app.add_option("--stages", options.stages, "parts of the model")->capture_default_str();
  app.add_option("--schedule", options.schedule, "order of forwards and backwards")
      ->type_name(fmt::format("{}", fmt::join(lockstep::schedule_names(), "|")))
      ->capture_default_str();
  app.add_option("--chunks", options.chunks,
                 "stages on each pipeline rank, with --schedule interleaved only")
      ->capture_default_str();
  app.add_option("--place", options.place,
                 "split: a device of the rank for each stage; same: one device for all; ranks: a "
                 "rank for each; or a device for each stage, such as 0,0,1,1")
      ->type_name("split|same|ranks|LIST")
      ->capture_default_str();
  app.add_option("--tensor-parallel", options.tensor_parallel,
                 "ranks that divide the matrices of a stage, with --place ranks only")
      ->capture_default_str();
  app.add_option(
         "--cut", options.cut,
         "layers of each stage. count: equally many; time: equally long; or a list such as 3,2")
      ->type_name("count|time|LIST")
      ->capture_default_str();
  app.add_flag("--recompute", options.recompute,
               "keep a stage's inputs only and compute its activations again for backward");
}

std::string examples_of(const Program& program) {
  const std::string name = program.name;
  if (!program.has_ranks) {
    return lockstep::format_examples({{name, "on every GPU, or on cpu:2"},
                                      {name + " --devices cpu:4 --steps 100", "four devices"},
                                      {name + " --json - --quiet", "the record alone"},
                                      {name + " --trace run.json", "a timeline for Perfetto"}});
  }
  const std::string on_two = "lockstep run -n 2 " + name;
  std::vector<lockstep::Example> examples = {{on_two, "two ranks on this host"}};
  if (program.has_accumulation) {
    examples.push_back({on_two + " --accum-steps 8", "eight micro-steps in an update"});
  }
  if (program.has_amp) examples.push_back({on_two + " --amp bf16", "in mixed precision"});
  if (program.has_pipeline) {
    examples.push_back({on_two + " --stages 4 --schedule gpipe", "four stages, another schedule"});
    examples.push_back({"lockstep run -n 4 " + name + " --place ranks", "a stage on each rank"});
  }
  examples.push_back({on_two + " --json job.json", "with a record of the job"});
  return lockstep::format_examples(examples);
}

}  // namespace

std::string host_work_of_steps(const Options& options) {
  if (!options.trace.empty()) return "--trace";
  if (options.shapes != nullptr) return "--print-shapes";
  if (options.check_replicas > 0) return "--check-replicas";
  if (options.overflow_at > 0) return "--overflow-at";
  if (options.virtual_shards > 0) return "--virtual-shards";
  if (options.has_accumulation && !options.quiet && options.print_steps > kCaptureWarmup) {
    return "--print-steps";
  }
  return "";
}

Options parse_options(const Program& program, int argc, char** argv) {
  Options options;
  options.program = program.name;
  options.has_ranks = program.has_ranks;
  options.has_accumulation = program.has_accumulation || program.has_pipeline;
  options.has_amp = program.has_amp || program.has_pipeline;
  options.has_pipeline = program.has_pipeline;
  options.never_captured = program.never_captured;
  CLI::App app(program.about, program.name);
  app.footer(examples_of(program));
  // The last value of a flag wins, so that a wrapper's defaults can be overridden.
  app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  const auto* lr = add_shared_flags(app, options);
  if (program.has_print_shapes) {
    app.add_flag_callback(
        "--print-shapes", [&options] { options.shapes = std::make_shared<SeenShapes>(); },
        "print the device and shape each replica sees");
  }
  if (program.has_ranks) add_rank_flags(app, options);
  if (options.has_accumulation) add_accumulation_flags(app, options);
  if (options.has_amp) add_amp_flags(app, options);
  if (options.has_pipeline) add_pipeline_flags(app, options);
  lockstep::parse_or_throw(app, argc, argv);
  if (lr->count() == 0) options.lr = default_lr(options);
  check(options);
  return options;
}

std::map<std::string, std::string> Options::as_text() const {
  std::map<std::string, std::string> text = {{"steps", std::to_string(steps)},
                                             {"batch", std::to_string(batch)},
                                             {"dim", std::to_string(dim)},
                                             {"hidden", std::to_string(hidden)},
                                             {"depth", std::to_string(depth)},
                                             {"lr", fmt::format("{}", lr)},
                                             {"seed", std::to_string(seed)},
                                             {"model", model},
                                             {"optimizer", optimizer},
                                             {"devices", devices},
                                             {"init", init},
                                             {"data", data},
                                             {"capture", capture}};
  if (checkpoint) {
    text.insert({{"checkpoint", *checkpoint},
                 {"checkpoint-every", std::to_string(checkpoint_every)},
                 {"checkpoint-keep", std::to_string(checkpoint_keep)}});
  }
  if (has_ranks) {
    text.insert({{"backend", backend},
                 {"timeout", timeout_s ? fmt::format("{}", *timeout_s) : ""},
                 {"bucket-mib", fmt::format("{}", bucket_mib)},
                 {"nonfinite", nonfinite}});
  }
  if (has_ranks && !has_pipeline) {
    text.insert({{"check-replicas", std::to_string(check_replicas)}, {"compress", compress}});
  }
  if (has_ranks) text.insert({"virtual-shards", std::to_string(virtual_shards)});
  const auto yes_no = [](bool flag) { return flag ? "yes" : "no"; };
  if (has_accumulation) {
    text.insert({{"accum-steps", std::to_string(accum_steps)},
                 {"print-steps", std::to_string(print_steps)}});
  }
  if (has_accumulation && !has_pipeline) {
    text.insert({{"sync-every-step", yes_no(sync_every_step)}, {"no-divide", yes_no(no_divide)}});
  }
  if (has_amp) text.insert({"amp", amp});
  if (has_amp && !has_pipeline) {
    text.insert({{"no-scaler", yes_no(no_scaler)},
                 {"master-weights", yes_no(master_weights)},
                 {"overflow-at", std::to_string(overflow_at)}});
  }
  if (has_pipeline) {
    text.insert({{"micro-batches", std::to_string(micro_batches)},
                 {"stages", std::to_string(stages)},
                 {"schedule", schedule},
                 {"chunks", std::to_string(chunks)},
                 {"place", place},
                 {"tensor-parallel", std::to_string(tensor_parallel)},
                 {"cut", cut},
                 {"recompute", yes_no(recompute)}});
  }
  return text;
}

}  // namespace course
