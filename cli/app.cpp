#include "cli/app.hpp"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdio>

#include "cli/child.hpp"
#include "cli/doctor.hpp"
#include "cli/explain.hpp"
#include "cli/lab5.hpp"
#include "lockstep/cli_parse.hpp"
#include "lockstep/version.hpp"

namespace lockstep::cli {
namespace {

constexpr const char* kExamples =
    "Examples:\n"
    "  lockstep doctor                     is this machine ready? what is slow or missing?\n"
    "  lockstep lab 5                      practical 5: DataParallel, measured and explained\n"
    "  lockstep lab 5 --devices cpu:4      the same on four logical devices\n"
    "  lockstep lab 5 --quick --out today  a short version, its report in ./today\n"
    "  lockstep explain LS0002             what an error code means\n";

constexpr const char* kLabExamples =
    "Examples:\n"
    "  lockstep lab 5                                     on every GPU, or on cpu:2\n"
    "  lockstep lab 5 --quick --devices cuda:0*2          two logical devices share GPU 0\n"
    "  lockstep lab 5 --split-rows 9 --split-devices 4,7  two more rows in the split table\n";

// Without a text of its own a validator would put its range into the name of every flag.
CLI::Validator range(int64_t first, int64_t last) {
  return CLI::Range(first, last).description("");
}

void add_lab_options(CLI::App& lab, std::string& name, Lab5Options& options) {
  lab.add_option("NUMBER", name, "which practical: 5")->required()->type_name("");
  lab.add_option("--devices", options.devices,
                 "logical devices: cpu:4, cuda, cuda:0,1, cuda:0*4 (default: every GPU, or cpu:2)")
      ->type_name("SPEC");
  lab.add_option("--out", options.out, "folder for the report, the tables and the records")
      ->capture_default_str()
      ->type_name("DIR");
  lab.add_flag("--quick", options.quick, "smaller sizes and fewer repetitions");
  const auto add_size = [&lab](const char* flag, std::optional<int64_t>& value, const char* what) {
    lab.add_option(flag, value, what)->check(range(1, 1'000'000))->type_name("N");
  };
  add_size("--steps", options.steps, "optimizer updates per run");
  add_size("--batch", options.batch, "rows per step, over all devices");
  add_size("--dim", options.dim, "width of the model's input and output");
  add_size("--hidden", options.hidden, "width of its hidden layers");
  add_size("--depth", options.depth, "hidden-to-hidden layers");
  add_size("--split-rows", options.split_rows, "show one more split: that many rows (default: 64)");
  lab.add_option("--split-devices", options.split_devices, "... over these numbers of devices")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->check(range(1, 256))
      ->type_name("LIST");
}

int run_lab(const std::string& name, const Lab5Options& options, const std::string& command) {
  if (name != "5") {
    throw Error(Code::kUsage,
                fmt::format("there is no lab \"{}\": this version has lab 5 only", name),
                "run `lockstep lab 5`");
  }
  return run_lab5(options, command);
}

// A child's exit code 2 is the user's own mistake, found one level down: it stays 2.
int run_keeping_usage_errors(int argc, char** argv) {
  try {
    return run_command(argc, argv);
  } catch (const ChildFailed& failed) {
    if (failed.child_exit() != 2) throw;
    std::fflush(stdout);
    fmt::print(stderr, "{}\n", failed.block());
    return failed.child_exit();
  }
}

}  // namespace

int run_command(int argc, char** argv) {
  CLI::App app("lockstep trains libtorch models in parallel, in C++.", "lockstep");
  app.set_version_flag("--version", std::string("lockstep ") + kVersion);
  app.require_subcommand(0, 1);

  auto* doctor =
      app.add_subcommand("doctor", "check this machine; every problem comes with a remedy");
  bool as_json = false;
  doctor->add_flag("--json", as_json, "print facts and findings as one JSON object");

  auto* explain_command = app.add_subcommand("explain", "tell what an error code means");
  std::string code;
  explain_command->add_option("code", code, "such as LS0002; without it, all codes are listed")
      ->type_name("");

  auto* lab = app.add_subcommand("lab", "run a practical of the course and answer its questions");
  lab->footer(kLabExamples);
  std::string lab_name;
  Lab5Options lab_options;
  add_lab_options(*lab, lab_name, lab_options);

  for (auto* command : {doctor, explain_command, lab}) command->group("Commands");
  app.footer(kExamples);  // not before: a subcommand would inherit it
  parse_or_throw(app, argc, argv);

  if (doctor->parsed()) return run_doctor(as_json);
  if (explain_command->parsed()) {
    fmt::print("{}", explain(code));
    return 0;
  }
  if (lab->parsed()) return run_lab(lab_name, lab_options, shell_line(argc, argv));
  fmt::print("{}", app.help());
  return 0;
}

int run_cli(int argc, char** argv) {
  try {
    return run_program(run_keeping_usage_errors, argc, argv);
  } catch (const Interrupted& interrupted) {
    fmt::print(stderr, "lockstep: stopped by signal {}; nothing is left running\n",
               interrupted.signal);
    return 128 + interrupted.signal;
  }
}

}  // namespace lockstep::cli
