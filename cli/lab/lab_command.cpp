#include "cli/lab/lab_command.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cstdio>
#include <filesystem>

#include "base/standard_streams.hpp"
#include "cli/lab/homework2.hpp"
#include "cli/lab/lab10.hpp"
#include "cli/lab/lab5.hpp"
#include "cli/lab/lab6.hpp"
#include "cli/lab/lab7.hpp"
#include "lockstep/error.hpp"

namespace lockstep::cli {
namespace {

constexpr const char* kExamples =
    "Examples:\n"
    "  lockstep lab 5                                     on every GPU, or on cpu:2\n"
    "  lockstep lab 5 --quick --devices cuda:0*2          two logical devices share GPU 0\n"
    "  lockstep lab 5 --split-rows 9 --split-devices 4,7  two more rows in the split table\n"
    "  lockstep lab 6                                     DDP with 1, 2 and 4 ranks\n"
    "  lockstep lab 6 --ranks 1,2,3 --bucket-mib 1        other ranks, smaller buckets\n"
    "  lockstep lab 7                                     accumulation and mixed precision\n"
    "  lockstep lab 10                                    data, model and pipeline parallel\n"
    "  lockstep lab 10 --stages 3 --micro-batches 3,6     other stages and MICRO_BATCHES\n"
    "  lockstep lab homework2 --quick                     codes 1 to 3, the report to hand in\n"
    "  lockstep lab homework2 --accum-steps 2,4           other ACCUM_STEPS\n"
    "  lockstep lab all --out reports                     every lab, one after the other\n";

// Without a text of its own a validator would put its range into the name of every flag.
CLI::Validator range(int64_t first, int64_t last) {
  return CLI::Range(first, last).description("");
}

struct NamedLab {
  const char* name;
  Lab (*make)();
};

constexpr std::array kLabs = {NamedLab{"5", lab5}, NamedLab{"6", lab6}, NamedLab{"7", lab7},
                              NamedLab{"10", lab10}, NamedLab{"homework2", homework2}};

// A flag that only some labs have, and whether it was given.
struct OwnFlag {
  bool given;
  const char* flag;
  std::vector<std::string> owners;
};

void refuse_flags_of_others(const std::string& lab, const LabOptions& options) {
  const OwnFlag flags[] = {
      {options.split_rows.has_value(), "--split-rows", {"5"}},
      {!options.split_devices.empty(), "--split-devices", {"5"}},
      {!options.ranks.empty(), "--ranks", {"6"}},
      {options.bucket_mib.has_value(), "--bucket-mib", {"6"}},
      {!options.accum_steps.empty(), "--accum-steps", {"7", "homework2"}},
      {!options.amp.empty(), "--amp", {"7", "homework2"}},
      {!options.micro_batches.empty(), "--micro-batches", {"10"}},
      {!options.batches.empty(), "--batches", {"10"}},
      {options.stages.has_value(), "--stages", {"10"}},
  };
  for (const auto& [given, flag, owners] : flags) {
    if (!given || std::find(owners.begin(), owners.end(), lab) != owners.end()) continue;
    throw Error(Code::kUsage, fmt::format("lab {} has no {}", lab, flag),
                fmt::format("that flag belongs to lab {}", fmt::join(owners, " and lab ")));
  }
}

// Each into a folder of its own; the first that fails ends it. A flag of one lab reaches that one.
int run_all(const LabOptions& options, const std::string& command) {
  for (const auto& [name, make] : kLabs) {
    const Lab lab = make();
    LabOptions own = options;
    if (!own.out.empty()) {
      own.out = (std::filesystem::path(own.out) / std::filesystem::path(lab.folder).filename());
    }
    std::fflush(stdout);  // the last lab's text, before news of this one
    print_error(fmt::format("lab {}\n", name));
    if (const int code = run_lab(lab, own, command); code != 0) return code;
  }
  return 0;
}

}  // namespace

CLI::App* add_lab_command(CLI::App& app, LabRequest& request) {
  auto* lab = app.add_subcommand("lab", "run a practical of the course and answer its questions");
  lab->footer(kExamples);
  LabOptions& options = request.options;
  lab->add_option("NUMBER", request.number, "which practical: 5, 6, 7, 10, homework2, or all")
      ->required()
      ->type_name("");
  lab->add_option("--devices", options.devices,
                  "logical devices: cpu:4, cuda, cuda:0,1, cuda:0*4 (default: every GPU, or the "
                  "cores)")
      ->type_name("SPEC");
  lab->add_option("--out", options.out,
                  "folder for the report, the tables and the records (default: reports/labN, "
                  "reports/homework2)")
      ->type_name("DIR");
  lab->add_flag("--quick", options.quick, "smaller sizes and fewer repetitions");
  const auto add_size = [lab](const char* flag, std::optional<int64_t>& value, const char* what) {
    lab->add_option(flag, value, what)->check(range(1, 1'000'000))->type_name("N");
  };
  const auto add_list = [lab](const char* flag, std::vector<int>& values, const char* what,
                              int first = 1, int last = 256) {
    lab->add_option(flag, values, what)
        ->delimiter(',')
        ->allow_extra_args(false)
        ->check(range(first, last))
        ->type_name("LIST");
  };
  add_size("--steps", options.steps, "optimizer updates per run");
  add_size("--batch", options.batch, "rows per step or micro-step, over all devices");
  add_size("--dim", options.dim, "width of the model's input and output");
  add_size("--hidden", options.hidden, "width of its hidden layers");
  add_size("--depth", options.depth, "hidden-to-hidden layers");
  add_size("--split-rows", options.split_rows,
           "lab 5: show one more split, that many rows (default: 64)");
  add_list("--split-devices", options.split_devices, "... over these numbers of devices");
  add_list("--ranks", options.ranks, "lab 6: how many ranks, one set-up each (default: 1,2,4)");
  lab->add_option("--bucket-mib", options.bucket_mib,
                  "lab 6: largest gradient bucket (default: 25)")
      ->check(CLI::PositiveNumber.description(""))
      ->type_name("X");
  add_list("--accum-steps", options.accum_steps,
           "lab 7, homework2: micro-steps in an optimizer step (default: 4,8 and 4,8,16,32)", 2);
  lab->add_option("--amp", options.amp,
                  "lab 7, homework2: bf16 or fp16 (default: bf16, fp16 on GPUs)")
      ->type_name("KIND");
  add_list("--micro-batches", options.micro_batches,
           "lab 10: MICRO_BATCHES, one run each (default: 2,4,8)");
  add_list("--batches", options.batches, "lab 10: BATCH_SIZE, one run each (default: 32,64,128)", 1,
           1'000'000);
  lab->add_option("--stages", options.stages, "lab 10: stages of the model (default: 2)")
      ->check(range(2, 64))
      ->type_name("N");
  return lab;
}

int run_lab_command(const LabRequest& request, const std::string& command) {
  const auto& [number, options] = request;
  if (number == "all") return run_all(options, command);
  const auto found =
      std::find_if(kLabs.begin(), kLabs.end(),
                   [&name = number](const NamedLab& lab) { return name == lab.name; });
  if (found == kLabs.end()) {
    throw Error(
        Code::kUsage,
        fmt::format("there is no lab \"{}\": this version has 5, 6, 7, 10 and homework2", number),
        "run `lockstep lab 7`, or `lockstep lab all` for every one");
  }
  refuse_flags_of_others(number, options);
  return run_lab(found->make(), options, command);
}

}  // namespace lockstep::cli
