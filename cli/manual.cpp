#include "cli/command_info.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <map>

#include "base/file.hpp"
#include "lockstep/error.hpp"
#include "lockstep/version.hpp"

namespace lockstep::cli {
namespace {

// A term of a list with its explanation.
struct Item {
  std::string term;
  std::string text;
};

// What a page says beyond the command line's own definition.
struct Remarks {
  std::string description;
  std::vector<Item> exit_codes = {};
  std::vector<Item> variables = {};
  std::vector<Item> files = {};
};

// The date of the last change to this file's text: a build must not depend on the day.
constexpr const char* kDate = "2026-11-18";

const std::vector<Item> kExitCodes = {{"0", "success"},
                                      {"1", "something failed while it ran"},
                                      {"2", "the request was at fault; nothing was started"},
                                      {"130", "stopped by Ctrl-C; another signal N gives 128 + N"}};

const Item kNoColor = {"NO_COLOR", "if it is set, no colours and no bold text"};
const Item kTerm = {"TERM", "with dumb, no line is drawn over another"};
const Item kColumns = {"COLUMNS", "width of the terminal, instead of what the terminal says"};

const std::map<std::string, Remarks>& remarks() {
  static const std::map<std::string, Remarks> kRemarks = {
      {"",
       {.description = "lockstep trains libtorch models in parallel, in C++: over threads, "
                       "processes and hosts. The command starts programs as ranks, watches "
                       "them, checks the machine, and runs the practicals of a course with a "
                       "report. Every error has a code that lockstep explain explains.",
        .exit_codes = kExitCodes,
        .variables = {kNoColor, kTerm, kColumns}}},
      {"run",
       {.description = "Starts a program once for each rank, on this host or on several that run "
                       "the same command, and sets the variables that torchrun sets. If a rank "
                       "fails, the others are stopped and the first failure is reported. No "
                       "process is left behind. Every flag of torchrun is understood. The "
                       "program's own flags follow it.",
        .exit_codes = {{"0", "every rank ended with 0"},
                       {"2", "the request was at fault; no rank was started"},
                       {"N", "the exit code of the rank that failed first"},
                       {"128 + N", "signal N ended that rank, or the launcher got it"},
                       {"1", "a rank stopped or never came; the report names it"},
                       {"75", "ranks responded to a signal with 75: preempted"}},
        .variables = {{"PET_NNODES, PET_NPROC_PER_NODE, …",
                       "as with torchrun: used if the flag of that name is not given"},
                      {"LOCKSTEP_BACKEND, LOCKSTEP_TIMEOUT_S",
                       "defaults of --backend and --timeout"},
                      {"LOCKSTEP_TOKEN", "the secret by which the hosts of a job know each other"},
                      {"OMP_NUM_THREADS", "default of --threads"},
                      {"TMPDIR", "where logs of failed runs are kept; default /tmp"},
                      {"RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT",
                       "set for each rank"},
                      {"LOCKSTEP_COLUMNS",
                       "set for each rank if lockstep writes to a terminal: "
                       "columns for the rank's tables"},
                      kNoColor},
        .files = {{"/dev/shm/lockstep-*",
                   "what ranks share, and the boards that lockstep top "
                   "reads; removed at the end"}}}},
      {"lab",
       {.description = "Runs a practical of the course: several small trainings in turns, from "
                       "whose records it makes tables, charts and answers to the questions of "
                       "the course. Progress goes to standard error. Ctrl-C stops the training "
                       "and everything it started.",
        .exit_codes = kExitCodes,
        .variables = {kNoColor, kTerm, kColumns},
        .files = {{"reports/lab5, reports/lab6, …", "reports, where --out names no other folder"},
                  {"report.html, report.pdf, report.md", "the report three times"},
                  {"*.csv", "its tables"},
                  {"records/*.json", "one record for each run"}}}},
      {"top",
       {.description = "Shows this user's live runs: for each rank its state, steps per second, "
                       "loss and share of time busy, communicating and idle; for each device a "
                       "memory bar, a busy bar and a history. If the runs do not fit on the "
                       "screen, each is one line that Enter unfolds. The last line names the "
                       "keys. On a pipe it prints a line for each rank and sample.",
        .exit_codes = {{"0", "ended by q or Ctrl-C, or a sample was printed"},
                       {"2", "no run has that name"},
                       {"143", "ended by SIGTERM"}},
        .variables = {kNoColor,
                      kTerm,
                      kColumns,
                      {"LC_ALL, LC_CTYPE, LANG", "if the locale is not UTF-8, bars are ASCII"}},
        .files = {{"/dev/shm/lockstep-*", "the boards that runs write"}}}},
      {"doctor",
       {.description = "Checks libtorch and its C++ ABI, BLAS and its speed, thread budgets, "
                       "CUDA, cores, memory, shared memory, limits, host name, environment and "
                       "leftover boards. Each check passes, warns or fails, with a remedy.",
        .exit_codes = {{"0", "no check failed"}, {"1", "a check failed"}},
        .variables = {kNoColor, kColumns}}},
      {"explain",
       {.description = "Prints what an error code means and what to do. LS0002, ls2 and 2 are the "
                       "same code. Without a code, all are listed.",
        .exit_codes = {{"0", "the code was explained"}, {"2", "there is no such code"}}}},
      {"slurm-script",
       {.description = "Prints a batch file that runs the program on every host of a SLURM job; "
                       "sbatch takes it as it is.",
        .exit_codes = {{"0", "the file was printed"}, {"2", "the request was at fault"}}}},
  };
  return kRemarks;
}

// Text for troff: backslashes and dashes as themselves, and no line that looks like a request.
std::string escape_troff(const std::string& text) {
  std::string out;
  bool line_begins = true;
  for (const char c : text) {
    if (line_begins && (c == '.' || c == '\'')) out += "\\&";
    line_begins = c == '\n';
    if (c == '\\') {
      out += "\\e";
    } else if (c == '-') {
      out += "\\-";
    } else if (c == '\'') {
      out += "\\(aq";
    } else if (c == '`') {
      out += "\\(ga";
    } else {
      out += c;
    }
  }
  return out;
}

std::string upper_case(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(),
                 [](unsigned char c) { return static_cast<char>(std::toupper(c)); });
  return text;
}

std::string bold(const std::string& text) {
  return "\\fB" + escape_troff(text) + "\\fR";
}

std::string italic(const std::string& text) {
  return "\\fI" + escape_troff(text) + "\\fR";
}

void add_section(std::string& page, const std::string& title) {
  page += fmt::format(".SH {}\n", upper_case(title));
}

void add_items(std::string& page, const std::string& title, const std::vector<Item>& items) {
  if (items.empty()) return;
  add_section(page, title);
  for (const auto& [term, text] : items) {
    page += fmt::format(".TP\n{}\n{}\n", bold(term), escape_troff(text));
  }
}

void add_arguments(std::string& page, const std::vector<ArgumentInfo>& arguments) {
  for (const auto& argument : arguments) {
    std::string term;
    for (const auto& name : argument.names) {
      const bool flag = name.starts_with("-");
      term += (term.empty() ? "" : ", ") + (flag ? bold(name) : italic(name));
    }
    const bool is_flag = argument.names[0].starts_with("-");
    if (is_flag && !argument.value.empty()) term += " " + italic(argument.value);
    page += fmt::format(".TP\n{}\n{}\n", term, escape_troff(argument.help));
  }
}

// The flags under the headings of --help, in its order.
void add_flags(std::string& page, const std::vector<ArgumentInfo>& flags) {
  std::vector<std::string> groups;
  for (const auto& flag : flags) {
    if (std::find(groups.begin(), groups.end(), flag.group) == groups.end()) {
      groups.push_back(flag.group);
    }
  }
  for (const auto& group : groups) {
    if (groups.size() > 1) page += fmt::format(".SS {}\n", escape_troff(group));
    std::vector<ArgumentInfo> own;
    std::copy_if(flags.begin(), flags.end(), std::back_inserter(own),
                 [&group](const ArgumentInfo& flag) { return flag.group == group; });
    add_arguments(page, own);
  }
}

// Flags of `child` that its command does not have for all.
std::vector<ArgumentInfo> own_flags(const CommandInfo& command, const CommandInfo& child) {
  std::vector<ArgumentInfo> own;
  for (const auto& flag : child.flags) {
    const bool shared =
        std::any_of(command.flags.begin(), command.flags.end(),
                    [&flag](const ArgumentInfo& other) { return other.names == flag.names; });
    if (!shared) own.push_back(flag);
  }
  return own;
}

std::string synopsis(const CommandInfo& command, const std::string& call) {
  std::string text = ".B " + escape_troff(call) + "\n[\\fIOPTIONS\\fR]";
  for (const auto& positional : command.positionals) {
    const std::string name = italic(positional.names[0]);
    text += positional.required ? " " + name : fmt::format(" [{}]", name);
  }
  if (command.starts_program()) text += " [\\fIARGUMENT\\fR\\ ...]";
  return text + "\n";
}

// The examples as they stand in help, less their heading.
std::string example_block(const std::string& examples) {
  const size_t begin = examples.find('\n');
  return ".EX\n" + escape_troff(begin == std::string::npos ? "" : examples.substr(begin + 1)) +
         ".EE\n";
}

std::string begin_page(const std::string& name, const std::string& about) {
  return fmt::format(
      ".\\\" Made from the command line's definition by lockstep write\\-share.\n"
      ".TH {} 1 {} \"lockstep {}\" \"User Commands\"\n.SH NAME\n{} \\- {}\n",
      upper_case(escape_troff(name)), kDate, kVersion, escape_troff(name), escape_troff(about));
}

void end_page(std::string& page, const Remarks& remark, const std::vector<std::string>& others) {
  add_items(page, "Exit status", remark.exit_codes);
  add_items(page, "Environment", remark.variables);
  add_items(page, "Files", remark.files);
  add_section(page, "See also");
  for (size_t i = 0; i < others.size(); ++i) {
    page +=
        fmt::format(".BR {} (1){}\n", escape_troff(others[i]), i + 1 < others.size() ? "," : "");
  }
}

std::string command_page(const CommandInfo& command, const Remarks& remark,
                         const std::vector<std::string>& others) {
  std::string page = begin_page("lockstep-" + command.name, command.about);
  add_section(page, "Synopsis");
  page += synopsis(command, "lockstep " + command.name);
  add_section(page, "Description");
  page += escape_troff(remark.description.empty() ? command.about : remark.description) + "\n";
  if (!command.examples.empty()) {
    add_section(page, "Examples");
    page += example_block(command.examples);
  }
  add_section(page, "Options");
  add_arguments(page, command.positionals);
  add_flags(page, command.flags);
  for (const auto& child : command.commands) {
    const auto own = own_flags(command, child);
    if (own.empty() || child.name == "all") continue;
    page += fmt::format(".SS Only {} {}\n", command.name, escape_troff(child.name));
    add_arguments(page, own);
  }
  end_page(page, remark, others);
  return page;
}

void write_into(const std::filesystem::path& folder, const std::string& name,
                const std::string& text) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) {
    throw Error(Code::kFileWrite,
                fmt::format("cannot make the folder {}: {}", folder.string(), error.message()),
                "name a folder you may write to");
  }
  write_file_atomically((folder / name).string(), text);
}

}  // namespace

std::vector<ManualPage> manual_pages(const CommandInfo& app) {
  std::vector<std::string> names = {"lockstep"};
  for (const auto& command : app.commands) names.push_back("lockstep-" + command.name);
  const auto others = [&names](const std::string& own) {
    std::vector<std::string> rest = names;
    std::erase(rest, own);
    return rest;
  };
  const auto remark_of = [](const std::string& name) {
    const auto found = remarks().find(name);
    return found == remarks().end() ? Remarks{.description = "", .exit_codes = kExitCodes}
                                    : found->second;
  };

  std::string page = begin_page("lockstep", "train libtorch models in parallel");
  add_section(page, "Synopsis");
  page += ".B lockstep\n\\fICOMMAND\\fR [\\fIOPTIONS\\fR]\n";
  add_section(page, "Description");
  page += escape_troff(remark_of("").description) + "\n";
  add_section(page, "Examples");
  page += example_block(app.examples);
  add_section(page, "Commands");
  for (const auto& command : app.commands) {
    page += fmt::format(".TP\n.BR lockstep\\-{} (1)\n{}\n", escape_troff(command.name),
                        escape_troff(command.about));
  }
  add_section(page, "Options");
  add_flags(page, app.flags);
  end_page(page, remark_of(""), others("lockstep"));

  std::vector<ManualPage> pages = {{"lockstep", page}};
  for (const auto& command : app.commands) {
    const std::string name = "lockstep-" + command.name;
    pages.push_back({name, command_page(command, remark_of(command.name), others(name))});
  }
  return pages;
}

void write_share(const CommandInfo& app, const std::string& folder) {
  const std::filesystem::path share(folder);
  for (const auto& [name, text] : manual_pages(app)) {
    write_into(share / "man" / "man1", name + ".1", text);
  }
  write_into(share / "bash-completion" / "completions", "lockstep", completion_script(app, "bash"));
  write_into(share / "zsh" / "site-functions", "_lockstep", completion_script(app, "zsh"));
  write_into(share / "fish" / "vendor_completions.d", "lockstep.fish",
             completion_script(app, "fish"));
}

}  // namespace lockstep::cli
