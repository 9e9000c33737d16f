#include "cli/app.hpp"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cctype>
#include <cstdio>
#include <new>
#include <vector>

#include "base/process.hpp"
#include "cli/child.hpp"
#include "cli/ckpt.hpp"
#include "cli/doctor/doctor.hpp"
#include "cli/lab/lab_command.hpp"
#include "cli/run.hpp"
#include "cli/top/top.hpp"
#include "lockstep/cli_parse.hpp"
#include "lockstep/error.hpp"
#include "lockstep/table.hpp"
#include "lockstep/version.hpp"

namespace lockstep::cli {
namespace {

std::string upper(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(),
                 [](unsigned char c) { return static_cast<char>(std::toupper(c)); });
  return text;
}

// "2" and "LS2" are short for "LS0002".
std::string full_name(const std::string& given) {
  const std::string name = upper(given);
  const std::string digits = name.starts_with("LS") ? name.substr(2) : name;
  const bool number = !digits.empty() && digits.size() <= 4 &&
                      digits.find_first_not_of("0123456789") == std::string::npos;
  return number ? fmt::format("LS{:0>4}", digits) : name;
}

std::string list_codes() {
  std::string text;
  for (const auto& info : all_codes()) {
    text += fmt::format("{}  {}\n", code_name(info.code), info.title);
  }
  return text + "\n`lockstep explain LS0002` tells more about one of them.\n";
}

constexpr const char* kAppExamples =
    "Examples:\n"
    "  lockstep doctor                     is this machine ready? what is slow or missing?\n"
    "  lockstep lab 5                      practical 5: DataParallel, measured and explained\n"
    "  lockstep lab 5 --devices cpu:4      the same on four logical devices\n"
    "  lockstep lab 5 --quick --out today  a short version, its report in ./today\n"
    "  lockstep lab 6                      practical 6: DDP against DataParallel\n"
    "  lockstep top                        who is busy, who waits, whose memory is full\n"
    "  lockstep run -n 4 ./train           four ranks of a program on this host\n"
    "  lockstep ckpt verify runs/a         are the checkpoints of a run good?\n"
    "  lockstep explain LS0002             what an error code means\n";

// A child's exit code 2 means that the request was at fault, so it stays 2. Only lockstep's own
// code runs in this process: an exception that is not an Error is a bug of lockstep, unless memory
// ran out or standard output cannot be written.
int run_naming_failures(int argc, char** argv) {
  try {
    return run_command(argc, argv);
  } catch (const ChildFailed& failed) {
    if (failed.child_exit() != 2) throw;
    std::fflush(stdout);
    print_error(failed.block() + "\n");
    return failed.child_exit();
  } catch (const Error&) {
    throw;
  } catch (const std::bad_alloc&) {
    throw;
  } catch (const std::exception& error) {
    if (std::ferror(stdout) != 0) throw;
    throw Error(Code::kInternal, describe(error), "please report it with the command you ran");
  }
}

}  // namespace

std::string explain(const std::string& code) {
  if (code.empty()) return list_codes();
  const std::string wanted = full_name(code);
  std::vector<std::string> names;
  for (const auto& info : all_codes()) {
    names.push_back(code_name(info.code));
    if (names.back() != wanted) continue;
    return fmt::format("{}: {}\n\n{}\n", wanted, info.title, wrap_text(info.explanation, 80));
  }
  const std::string meant = did_you_mean(wanted, names);
  throw Error(Code::kUsage, fmt::format("there is no error code \"{}\"", code),
              meant.empty()
                  ? "`lockstep explain` lists them all"
                  : fmt::format("did you mean {}? `lockstep explain` lists them all", meant));
}

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

  LabRequest lab_request;
  auto* lab = add_lab_command(app, lab_request);
  TopOptions top_options;
  auto* top = add_top_command(app, top_options);
  const RunFlags run(app);
  const CkptCommand ckpt(app);
  SlurmScriptOptions script_options;
  auto* script = add_slurm_script_command(app, script_options);

  for (auto* command : {doctor, explain_command, lab, top, run.command(), ckpt.command(), script}) {
    command->group("Commands");
  }
  app.footer(kAppExamples);  // not before: a subcommand would inherit it
  const ProgramLine line = cut_at_program(argc, argv, {run.command(), script});
  parse_or_throw(app, static_cast<int>(line.flags.size()), line.flag_pointers().data());

  if (doctor->parsed()) return run_doctor(as_json);
  if (explain_command->parsed()) {
    fmt::print("{}", explain(code));
    return 0;
  }
  if (lab->parsed()) return run_lab_command(lab_request, shell_line(argc, argv));
  if (top->parsed()) return run_top(top_options);
  if (run.command()->parsed()) return run_launch(run, line.program, {argv, argv + argc});
  if (ckpt.command()->parsed()) return ckpt.run();
  if (script->parsed()) {
    fmt::print("{}", slurm_script(script_options, line.program));
    return 0;
  }
  fmt::print("{}", app.help());
  return 0;
}

int run_cli(int argc, char** argv) {
  try {
    return run_program(run_naming_failures, argc, argv);
  } catch (const Interrupted& interrupted) {
    print_error(fmt::format("lockstep: stopped by signal {}; nothing is left running\n",
                            interrupted.signal));
    return 128 + interrupted.signal;
  }
}

}  // namespace lockstep::cli
