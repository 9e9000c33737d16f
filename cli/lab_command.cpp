#include "cli/lab_command.hpp"

#include <fmt/format.h>

#include <CLI/CLI.hpp>

#include "cli/lab5.hpp"
#include "cli/lab6.hpp"
#include "lockstep/error.hpp"

namespace lockstep::cli {
namespace {

constexpr const char* kExamples =
    "Examples:\n"
    "  lockstep lab 5                                     on every GPU, or on cpu:2\n"
    "  lockstep lab 5 --quick --devices cuda:0*2          two logical devices share GPU 0\n"
    "  lockstep lab 5 --split-rows 9 --split-devices 4,7  two more rows in the split table\n"
    "  lockstep lab 6                                     DDP with 1, 2 and 4 ranks\n"
    "  lockstep lab 6 --ranks 1,2,3 --bucket-mib 1        other ranks, smaller buckets\n";

// Without a text of its own a validator would put its range into the name of every flag.
CLI::Validator range(int64_t first, int64_t last) {
  return CLI::Range(first, last).description("");
}

void refuse(bool given, const char* flag, const std::string& number, const char* owner) {
  if (!given) return;
  throw Error(Code::kUsage, fmt::format("lab {} has no {}", number, flag),
              fmt::format("that flag belongs to lab {}", owner));
}

}  // namespace

CLI::App* add_lab_command(CLI::App& app, LabRequest& request) {
  auto* lab = app.add_subcommand("lab", "run a practical of the course and answer its questions");
  lab->footer(kExamples);
  LabOptions& options = request.options;
  lab->add_option("NUMBER", request.number, "which practical: 5 or 6")->required()->type_name("");
  lab->add_option("--devices", options.devices,
                  "logical devices: cpu:4, cuda, cuda:0,1, cuda:0*4 (default: every GPU, or the "
                  "cores)")
      ->type_name("SPEC");
  lab->add_option("--out", options.out,
                  "folder for the report, the tables and the records (default: reports/labN)")
      ->type_name("DIR");
  lab->add_flag("--quick", options.quick, "smaller sizes and fewer repetitions");
  const auto add_size = [lab](const char* flag, std::optional<int64_t>& value, const char* what) {
    lab->add_option(flag, value, what)->check(range(1, 1'000'000))->type_name("N");
  };
  const auto add_list = [lab](const char* flag, std::vector<int>& values, const char* what) {
    lab->add_option(flag, values, what)
        ->delimiter(',')
        ->allow_extra_args(false)
        ->check(range(1, 256))
        ->type_name("LIST");
  };
  add_size("--steps", options.steps, "optimizer updates per run");
  add_size("--batch", options.batch, "rows per step, over all devices");
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
  return lab;
}

int run_lab_command(const LabRequest& request, const std::string& command) {
  const auto& [number, options] = request;
  if (number == "5") {
    refuse(!options.ranks.empty(), "--ranks", number, "6");
    refuse(options.bucket_mib.has_value(), "--bucket-mib", number, "6");
    return run_lab(lab5(), options, command);
  }
  if (number == "6") {
    refuse(options.split_rows.has_value(), "--split-rows", number, "5");
    refuse(!options.split_devices.empty(), "--split-devices", number, "5");
    return run_lab(lab6(), options, command);
  }
  throw Error(Code::kUsage,
              fmt::format("there is no lab \"{}\": this version has labs 5 and 6", number),
              "run `lockstep lab 5` or `lockstep lab 6`");
}

}  // namespace lockstep::cli
