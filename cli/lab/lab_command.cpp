#include "cli/lab/lab_command.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <filesystem>

#include "base/process.hpp"
#include "cli/lab/lab_runner.hpp"
#include "cli/lab/lab_text.hpp"
#include "cli/verify/verify.hpp"
#include "lockstep/cli_parse.hpp"
#include "lockstep/error.hpp"

namespace lockstep::cli {

// Every lab, each defined in a file of its own. The code below is the same for all of them.
namespace practical5 {
Lab lab();
}
namespace practical6 {
Lab lab();
}
namespace practical7 {
Lab lab();
}
namespace practical10 {
Lab lab();
}
namespace homework2 {
Lab lab();
}

namespace {

const std::vector<Lab>& all_labs() {
  static const std::vector<Lab> kLabs = {practical5::lab(), practical6::lab(), practical7::lab(),
                                         practical10::lab(), homework2::lab()};
  return kLabs;
}

std::vector<std::string> lab_names() {
  std::vector<std::string> names;
  for (const auto& lab : all_labs()) names.push_back(lab.name);
  return names;
}

// A flag with the labs that have it.
struct OwnedFlag {
  LabFlag flag;
  std::vector<std::string> owners;
};

std::vector<OwnedFlag> owned_flags() {
  std::vector<OwnedFlag> flags;
  for (const auto& lab : all_labs()) {
    for (const auto& flag : lab.flags) {
      auto known = std::find_if(flags.begin(), flags.end(), [&flag](const OwnedFlag& other) {
        return other.flag.name == flag.name;
      });
      if (known == flags.end()) known = flags.insert(flags.end(), {flag, {}});
      known->owners.push_back(lab.name);
    }
  }
  return flags;
}

// The examples of this lab, or of all labs if it is null.
std::string examples_text(const Lab* only) {
  std::vector<Example> examples;
  for (const auto& lab : all_labs()) {
    if (only != nullptr && lab.name != only->name) continue;
    for (const auto& [arguments, meaning] : lab.examples) {
      examples.push_back(
          {"lockstep lab " + lab.name + (arguments.empty() ? "" : " " + arguments), meaning});
    }
  }
  if (only == nullptr) {
    examples.push_back({"lockstep lab all --out reports", "every lab, one after the other"});
  }
  return format_examples(examples);
}

bool owns(const OwnedFlag& flag, const Lab& lab) {
  return std::find(flag.owners.begin(), flag.owners.end(), lab.name) != flag.owners.end();
}

// "homework2" for "homwork2", "5" for "practical5" and "lab5"; "" for what is like none.
std::string nearest_lab(const std::string& name) {
  std::map<std::string, std::string> labs = {{"all", "all"}};  // [way to write it]
  for (const auto& lab : all_labs()) {
    for (const char* prefix : {"", "lab", "lab-", "practical", "practical-"}) {
      labs[prefix + lab.name] = lab.name;
    }
  }
  std::vector<std::string> ways;
  for (const auto& [way, lab] : labs) {
    // A number is near every other number.
    if (way.size() > 2) ways.push_back(way);
  }
  const std::string near = did_you_mean(name, ways);
  return near.empty() ? "" : labs[near];
}

// Without a text of its own a validator would put its range into the name of every flag.
CLI::Validator within(int64_t first, int64_t last) {
  return CLI::Range(first, last).description("");
}

std::string help_of(const OwnedFlag& owned) {
  return fmt::format("lab {}: {}", fmt::join(owned.owners, ", "), owned.flag.help);
}

void add_owned_flag(CLI::App& command, const OwnedFlag& owned, LabOptions& options) {
  const LabFlag& flag = owned.flag;
  const std::string help = help_of(owned);
  if (flag.kind == LabFlag::Kind::kList) {
    const auto keep_list = [&options, name = flag.name](const std::vector<std::string>& values) {
      options.own[name] = fmt::format("{}", fmt::join(values, ","));
    };
    command.add_option_function<std::vector<std::string>>(flag.name, keep_list, help)
        ->delimiter(',')
        ->allow_extra_args(false)
        ->check(within(flag.first, flag.last))
        ->type_name("LIST");
    return;
  }
  const auto keep = [&options, name = flag.name](const std::string& value) {
    options.own[name] = value;
  };
  auto* option = command.add_option_function<std::string>(flag.name, keep, help);
  if (flag.kind == LabFlag::Kind::kCount) {
    option->check(within(flag.first, flag.last))->type_name("N");
  } else if (flag.kind == LabFlag::Kind::kNumber) {
    option->check(CLI::PositiveNumber.description(""))->type_name("X");
  } else {
    option->type_name(flag.values);
  }
}

void refuse_flags_of_others(const Lab& lab, const LabOptions& options) {
  for (const auto& owned : owned_flags()) {
    if (!options.own.contains(owned.flag.name) || owns(owned, lab)) continue;
    throw Error(Code::kUsage, fmt::format("lab {} has no {}", lab.name, owned.flag.name),
                fmt::format("that flag belongs to lab {}", fmt::join(owned.owners, " and lab ")));
  }
}

// Shows the flags and examples of one lab only; of all if the name is empty or "all".
void show_flags_of(CLI::App& command, const std::string& name) {
  const Lab* only = name.empty() || name == "all" ? nullptr : &lab_named(name);
  command.footer(examples_text(only));
  command.get_option("--out")->description(
      fmt::format("folder for the report, the tables and the records (default: {})",
                  only == nullptr ? "the lab's own below reports" : only->folder));
  for (const auto& owned : owned_flags()) {
    CLI::Option* option = command.get_option(owned.flag.name);
    option->group(only == nullptr || owns(owned, *only) ? "Options" : "");
    option->description(only == nullptr ? help_of(owned) : owned.flag.help);
  }
}

// Runs each lab into a folder of its own, and last of all compares the course's methods; the first
// that fails ends it. A flag of one lab reaches
// that one.
int run_all(const LabRequest& request, const std::string& command) {
  if (!request.hand_in.notes.empty()) {
    throw Error(Code::kUsage, "--notes belongs to one lab, not to all",
                "write the notes into notes.md of each lab's folder; the report reads them there");
  }
  for (const auto& lab : all_labs()) {
    LabOptions own = request.options;
    if (!own.out.empty()) {
      own.out = (std::filesystem::path(own.out) / std::filesystem::path(lab.folder).filename());
    }
    std::fflush(stdout);  // the last lab's text, before messages of this one
    print_error(fmt::format("lab {}\n", lab.name));
    if (const int code = run_lab(lab, own, request.hand_in, command); code != 0) return code;
  }
  std::fflush(stdout);
  print_error("do the methods train the same?\n");
  const std::string& out = request.options.out;
  return run_equivalence(std::filesystem::path(out.empty() ? "reports" : out) / "equivalence",
                         command);
}

}  // namespace

const Lab& lab_named(const std::string& name) {
  for (const auto& lab : all_labs()) {
    if (lab.name == name) return lab;
  }
  const std::string near = nearest_lab(name);
  throw Error(Code::kUsage,
              fmt::format("there is no lab \"{}\": this version has {}", name, listed(lab_names())),
              near.empty()
                  ? fmt::format("run `lockstep lab {}`, or `lockstep lab all` for every one",
                                all_labs().front().name)
                  : fmt::format("did you mean `lockstep lab {}`?", near));
}

void show_flags_of_named_lab(CLI::App& command) {
  const auto& named = command.get_option("NUMBER")->results();
  show_flags_of(command, named.empty() ? "" : named.front());
}

CommandInfo describe_lab_command(CLI::App& command) {
  CommandInfo all = describe_command(command);
  CommandInfo every = all;
  every.name = "all";
  for (const auto& lab : all_labs()) {
    show_flags_of(command, lab.name);
    CommandInfo& own = all.commands.emplace_back(describe_command(command));
    own.name = lab.name;
    own.positionals = {};
  }
  show_flags_of(command, "");
  every.positionals = {};
  std::erase_if(all.flags, [](const ArgumentInfo& flag) {
    const auto owned = owned_flags();
    return std::any_of(owned.begin(), owned.end(), [&flag](const OwnedFlag& other) {
      return other.flag.name == flag.names.front();
    });
  });
  all.commands.push_back(std::move(every));
  return all;
}

CLI::App* add_lab_command(CLI::App& app, LabRequest& request) {
  auto* lab = app.add_subcommand("lab", "run a practical of the course and answer its questions");
  LabOptions& options = request.options;
  lab->add_option("NUMBER", request.number,
                  fmt::format("which practical: {}, or all", fmt::join(lab_names(), ", ")))
      ->required()
      ->type_name(fmt::format("{}|all", fmt::join(lab_names(), "|")));
  lab->add_option("--devices", options.devices,
                  "logical devices: cpu:4, cuda, cuda:0,1, cuda:0*4 (default: every GPU, or "
                  "cpu:2)")
      ->type_name("SPEC");
  lab->add_option("--out", options.out)->type_name("DIR");  // described by show_flags_of()
  lab->add_flag("--quick", options.quick, "smaller sizes and fewer repetitions");
  HandIn& hand_in = request.hand_in;
  lab->add_option("--author", hand_in.author, "who hands the report in")->type_name("NAME");
  lab->add_option("--notes", hand_in.notes,
                  "your own words under the report's questions (default: notes.md of the folder, "
                  "which the first run makes)")
      ->type_name("FILE");
  lab->add_flag("--zip", hand_in.zip, "also write hand-in.zip: report, code, notes and records");
  const auto add_size = [lab](const char* flag, std::optional<int64_t>& value, const char* what) {
    lab->add_option(flag, value, what)->check(within(1, 1'000'000))->type_name("N");
  };
  add_size("--steps", options.steps,
           "optimizer updates per run; this and the sizes below default to the lab's own");
  add_size("--batch", options.batch, "rows per step or micro-step, over all devices");
  add_size("--dim", options.dim, "width of the model's input and output");
  add_size("--hidden", options.hidden, "width of its hidden layers");
  add_size("--depth", options.depth, "hidden-to-hidden layers");
  for (const auto& flag : owned_flags()) add_owned_flag(*lab, flag, options);
  show_flags_of(*lab, "");
  return lab;
}

int run_lab_command(const LabRequest& request, const std::string& command) {
  if (request.number == "all") return run_all(request, command);
  const Lab& lab = lab_named(request.number);
  refuse_flags_of_others(lab, request.options);
  return run_lab(lab, request.options, request.hand_in, command);
}

}  // namespace lockstep::cli
