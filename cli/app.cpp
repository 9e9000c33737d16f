#include "cli/app.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cctype>
#include <cstdio>
#include <new>
#include <vector>

#include "base/process.hpp"
#include "cli/child.hpp"
#include "cli/ckpt.hpp"
#include "cli/command_info.hpp"
#include "cli/doctor/doctor.hpp"
#include "cli/lab/lab_command.hpp"
#include "cli/own/compare.hpp"
#include "cli/own/new_program.hpp"
#include "cli/own/report_command.hpp"
#include "cli/run.hpp"
#include "cli/top/top.hpp"
#include "cli/verify/verify.hpp"
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

const std::vector<Example> kAppExamples = {
    {"lockstep doctor", "is this machine ready? what is slow or missing?"},
    {"lockstep lab 5", "practical 5: DataParallel, measured and explained"},
    {"lockstep lab 6 --quick --out today", "a short practical 6, its report in ./today"},
    {"lockstep run -n 4 ./train", "four ranks of a program on this host"},
    {"lockstep top", "who is busy, who waits, whose memory is full"},
    {"lockstep new mine", "a program of your own, ready to build"},
    {"lockstep compare ./a vs ./b", "which is faster, with a report"},
    {"lockstep verify ./train", "is the parallel run the serial run?"},
    {"lockstep ckpt verify runs/a", "are the checkpoints of a run good?"},
    {"lockstep help run", "everything about one command"}};

const std::vector<Example> kDoctorExamples = {
    {"lockstep doctor", "every check, with a remedy for what is wrong"},
    {"lockstep doctor --json", "the same for a program to read"}};

const std::vector<Example> kExplainExamples = {{"lockstep explain LS0002", "one code"},
                                               {"lockstep explain 2", "the same"},
                                               {"lockstep explain", "all codes"}};

const std::vector<Example> kHelpExamples = {{"lockstep help", "all commands"},
                                            {"lockstep help run", "the flags of one"},
                                            {"lockstep help lab 5", "the flags of one lab"}};

const std::vector<Example> kCompletionExamples = {
    {"source <(lockstep completion bash)", "in ~/.bashrc"},
    {"source <(lockstep completion zsh)", "in ~/.zshrc, after compinit"},
    {"lockstep completion fish | source", "in ~/.config/fish/config.fish"}};

std::string join_codes() {
  std::string text;
  for (const auto& info : all_codes()) text += (text.empty() ? "" : "|") + code_name(info.code);
  return text;
}

// `lockstep help lab 5` is `lockstep lab --help 5`. An unknown command stays the parser's business.
std::vector<std::string> expand_help(const CLI::App& app, std::vector<std::string> words) {
  if (words.size() < 2 || words[1] != "help") return words;
  words.erase(words.begin() + 1);
  const bool named = words.size() > 1 && !words[1].starts_with("-");
  if (!named) return {words[0], "--help"};
  const auto is_named = [&words](const CLI::App* command) { return command->check_name(words[1]); };
  if (!app.get_subcommands(is_named).empty()) words.insert(words.begin() + 2, "--help");
  return words;
}

// Every command that is not hidden, and every lab.
CommandInfo describe_all(const CLI::App& app, CLI::App& lab) {
  CommandInfo info = describe_command(app);
  for (auto& command : info.commands) {
    if (command.name == lab.get_name()) command = describe_lab_command(lab);
  }
  return info;
}

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
    return fmt::format(
        "{}: {}\n\n{}\n", wanted, info.title,
        wrap_text(info.explanation, std::min<size_t>(80, terminal_width(STDOUT_FILENO))));
  }
  const std::string meant = did_you_mean(wanted, names);
  throw Error(Code::kUsage, fmt::format("there is no error code \"{}\"", code),
              meant.empty()
                  ? "`lockstep explain` lists them all"
                  : fmt::format("did you mean {}? `lockstep explain` lists them all", meant));
}

int run_command(int argc, char** argv) {
  CLI::App app("lockstep trains libtorch models in parallel, in C++.", "lockstep");
  app.set_version_flag("--version", std::string("lockstep ") + kVersion, "print the version");
  app.require_subcommand(0, 1);

  auto* doctor =
      app.add_subcommand("doctor", "check this machine; every problem comes with a remedy");
  bool as_json = false;
  doctor->add_flag("--json", as_json, "print facts and findings as one JSON object");

  doctor->footer(format_examples(kDoctorExamples));

  auto* explain_command = app.add_subcommand("explain", "tell what an error code means");
  explain_command->footer(format_examples(kExplainExamples));
  std::string code;
  explain_command->add_option("CODE", code, "such as LS0002; without it, all codes are listed")
      ->type_name(join_codes());

  LabRequest lab_request;
  auto* lab = add_lab_command(app, lab_request);
  TopOptions top_options;
  auto* top = add_top_command(app, top_options);
  const RunFlags run(app);
  const CkptCommand ckpt(app);
  SlurmScriptOptions script_options;
  auto* script = add_slurm_script_command(app, script_options);
  NewOptions new_options;
  auto* new_command = add_new_command(app, new_options);
  CompareOptions compare_options;
  auto* compare_command = add_compare_command(app, compare_options);
  VerifyOptions verify_options;
  auto* verify_command = add_verify_command(app, verify_options);
  ReportOptions report_options;
  auto* report = add_report_command(app, report_options);

  auto* help = app.add_subcommand("help", "show what a command or a lab takes");
  help->footer(format_examples(kHelpExamples));
  std::vector<std::string> help_words;
  help->add_option("COMMAND", help_words, "a command; after lab also a lab");
  auto* completion = app.add_subcommand("completion", "print a script that completes lockstep");
  completion->footer(format_examples(kCompletionExamples));
  std::string shell;
  completion->add_option("SHELL", shell, "bash, zsh or fish")
      ->required()
      ->type_name("bash|zsh|fish");

  std::string commands;
  for (auto* command : app.get_subcommands([](const CLI::App*) { return true; })) {
    command->group("Commands");
    commands += (commands.empty() ? "" : "|") + command->get_name();
  }
  help->get_option("COMMAND")->type_name(commands);
  // For the build: what is installed below share.
  auto* share = app.add_subcommand("write-share")->group("");
  std::string share_folder;
  share->add_option("DIR", share_folder)->required()->type_name("DIR");

  app.footer(format_examples(kAppExamples));  // not before: a subcommand would inherit it
  const std::vector<std::string> words = expand_help(app, {argv, argv + argc});
  const ProgramLine line =
      cut_at_program(words, {run.command(), script, compare_command, verify_command});
  parse_or_throw(app, static_cast<int>(line.flags.size()), line.flag_pointers().data(), [lab] {
    if (lab->parsed()) show_flags_of_named_lab(*lab);
  });

  if (doctor->parsed()) return run_doctor(as_json);
  if (explain_command->parsed()) {
    fmt::print("{}", explain(code));
    return 0;
  }
  if (lab->parsed()) return run_lab_command(lab_request, shell_line(argc, argv));
  if (top->parsed()) return run_top(top_options);
  if (run.command()->parsed()) return run_launch(run, line.program, {argv, argv + argc});
  if (new_command->parsed()) return run_new(new_options);
  if (compare_command->parsed()) {
    return run_compare(compare_options, line.program, shell_line(argc, argv));
  }
  if (verify_command->parsed()) {
    return run_verify(verify_options, line.program, shell_line(argc, argv));
  }
  if (report->parsed()) return run_report(report_options, shell_line(argc, argv));
  if (ckpt.command()->parsed()) return ckpt.run();
  if (script->parsed()) {
    fmt::print("{}", slurm_script(script_options, line.program));
    return 0;
  }
  if (completion->parsed()) {
    fmt::print("{}", completion_script(describe_all(app, *lab), shell));
    return 0;
  }
  if (share->parsed()) {
    write_share(describe_all(app, *lab), share_folder);
    return 0;
  }
  fmt::print("{}\n{}\n`lockstep help` lists all commands.\n", app.get_footer(),
             app.get_description());
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
