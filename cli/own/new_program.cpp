#include "cli/own/new_program.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <system_error>

#include "base/file.hpp"
#include "base/process.hpp"
#include "lockstep/cli_parse.hpp"
#include "lockstep/error.hpp"

namespace lockstep::cli {
namespace {

namespace fs = std::filesystem;

// A template is one of lockstep's own examples, whose name becomes that of the new program.
struct ProgramTemplate {
  const char* name;
  const char* example;
  const char* about;
  const char* library;  // to link
  const char* run;      // "{0}" is the command lockstep, "{1}" the program
};

constexpr const char* kCourse = "lockstep::course";
constexpr const char* kOnTwoRanks = "{0} run -n 2 {1} --json run.json";

constexpr ProgramTemplate kTemplates[] = {
    {"ddp", "practical6_ddp", "DistributedDataParallel, one process per device (practical 6)",
     kCourse, kOnTwoRanks},
    {"dp", "practical5_dp", "DataParallel on the devices of one process (practical 5)", kCourse,
     "{1} --devices cpu:2 --json run.json"},
    {"accumulation", "practical7_accumulation", "DDP with gradient accumulation (practical 7)",
     kCourse, kOnTwoRanks},
    {"amp", "practical7_amp", "DDP in mixed precision (practical 7)", kCourse, kOnTwoRanks},
    {"pipeline", "practical10_hybrid", "stages and micro-batches (practical 10)", kCourse,
     kOnTwoRanks},
    {"plain", "tutorial_measured", "a loop of your own, without the course's helpers",
     "lockstep::lockstep", "LOCKSTEP_RECORD=run.json {0} run -n 2 {1}"},
};

const ProgramTemplate& template_named(const std::string& name) {
  for (const auto& each : kTemplates) {
    if (name == each.name) return each;
  }
  const auto known = template_names();
  const std::string meant = did_you_mean(name, known);
  throw Error(Code::kUsage, fmt::format("there is no template \"{}\"", name),
              fmt::format("use {}{}", fmt::join(known, ", "),
                          meant.empty() ? "" : fmt::format("; did you mean {}?", meant)));
}

// The lockstep that this command belongs to.
struct Home {
  fs::path command;   // this program
  fs::path package;   // folder of lockstepConfig.cmake
  fs::path examples;  // folder of the templates
};

// The package of a build folder, or of a prefix, which has it in lib, lib64 or lib/<architecture>.
fs::path find_package(const fs::path& root) {
  if (fs::exists(root / "lockstepConfig.cmake")) return root;
  std::vector<fs::path> folders = {root / "lib", root / "lib64"};
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(root / "lib", ignored)) {
    folders.push_back(entry.path());
  }
  for (const auto& folder : folders) {
    if (fs::exists(folder / "cmake/lockstep/lockstepConfig.cmake", ignored)) {
      return folder / "cmake/lockstep";
    }
  }
  return {};
}

Home find_home() {
  const fs::path command = fs::read_symlink("/proc/self/exe");
  const fs::path root = command.parent_path().parent_path();
  Home home{command, find_package(root), root / "share/lockstep/examples"};
  if (home.package.empty() || !fs::is_directory(home.examples)) {
    throw Error(
        Code::kFileRead,
        fmt::format("the lockstep in {} has no {}", root.string(),
                    home.package.empty() ? "CMake package" : "examples"),
        "with Debian's packages: apt-get install liblockstep-dev; otherwise use the command "
        "of a build folder, or install lockstep with `cmake --install`: both need "
        "LOCKSTEP_INSTALL and LOCKSTEP_BUILD_EXAMPLES, which are on by default");
  }
  return home;
}

std::string replace_all(std::string text, const std::string& old, const std::string& by) {
  for (size_t at = text.find(old); at != std::string::npos; at = text.find(old, at + by.size())) {
    text.replace(at, old.size(), by);
  }
  return text;
}

// How a shell finds this command: by its name, if PATH leads to this very file.
std::string command_word(const Home& home) {
  const std::string found = find_in_path("lockstep", std::getenv("PATH"));
  std::error_code error;
  return fs::equivalent(found, home.command, error) ? "lockstep" : home.command.string();
}

std::string cmake_lists(const std::string& name, const ProgramTemplate& from) {
  return fmt::format(
      R"(cmake_minimum_required(VERSION 3.25)
project({0} LANGUAGES CXX)

if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release)
endif()

find_package(lockstep REQUIRED)  # CMakePresets.json says where it is

add_executable({0} main.cpp)
target_link_libraries({0} PRIVATE {1})

# These headers take most of the time of a build. They are compiled once, and then only main.cpp.
target_precompile_headers({0} PRIVATE <torch/torch.h> <lockstep/lockstep.hpp>)
)",
      name, from.library);
}

// CMake's own choice is make, which a machine with Ninja may not have.
std::string presets(const Home& home) {
  nlohmann::ordered_json configure = {{"name", "default"}, {"binaryDir", "${sourceDir}/build"}};
  if (!find_in_path("ninja", std::getenv("PATH")).empty()) configure["generator"] = "Ninja";
  configure["cacheVariables"] = {{"CMAKE_BUILD_TYPE", "Release"},
                                 {"lockstep_DIR", home.package.string()}};
  const nlohmann::ordered_json preset = {
      {"version", 4},
      {"cmakeMinimumRequired", {{"major", 3}, {"minor", 25}, {"patch", 0}}},
      {"configurePresets", nlohmann::ordered_json::array({configure})},
      {"buildPresets", {{{"name", "default"}, {"configurePreset", "default"}}}}};
  return preset.dump(2) + "\n";
}

// The three commands from sources to a report.
struct Commands {
  std::string build;
  std::string run;
  std::string report;
};

Commands commands_for(const std::string& name, const ProgramTemplate& from, const Home& home) {
  const std::string lockstep = command_word(home);
  return {"cmake --preset default && cmake --build build",
          fmt::format(fmt::runtime(from.run), lockstep, "build/" + name),
          lockstep + " report run.json --out report"};
}

std::string readme(const std::string& name, const ProgramTemplate& from, const Commands& commands) {
  return fmt::format(
      R"(# {0}

{1}.

```
{2}
{3}
{4}
```

The first command builds, the second trains and leaves a record in `run.json`, the third turns it into
`report/report.html`, `report.pdf` and tables.{5}

`CMakePresets.json` holds the path of lockstep on this machine. On another one change `lockstep_DIR` there, or configure
with `-DCMAKE_PREFIX_PATH=DIR`, where `DIR` is the folder that lockstep was installed to.
)",
      name, from.about, commands.build, commands.run, commands.report,
      std::string_view(from.library) == kCourse
          ? fmt::format(" `build/{} --help` lists the flags.", name)
          : "");
}

// Writes all files, or leaves nothing behind.
void write_folder(const fs::path& folder,
                  const std::vector<std::pair<std::string, std::string>>& files) {
  std::error_code error;
  if (!fs::create_directory(folder, error)) {
    throw Error(Code::kFileWrite,
                fmt::format("cannot make the folder {}: {}", folder.string(), error.message()),
                "name a folder inside one that exists and that you may write to");
  }
  try {
    for (const auto& [name, text] : files) write_file_atomically((folder / name).string(), text);
  } catch (const Error&) {
    fs::remove_all(folder, error);
    throw;
  }
}

const std::vector<Example> kNewExamples = {
    {"lockstep new mine", "a DDP program in ./mine"},
    {"lockstep new mine --template amp", "the same in mixed precision"},
    {"lockstep new ~/course/mine --template plain", "without the course's helpers"}};

}  // namespace

std::vector<std::string> template_names() {
  std::vector<std::string> names;
  for (const auto& each : kTemplates) names.emplace_back(each.name);
  return names;
}

void check_program_name(const std::string& name) {
  constexpr size_t kLongest = 64;
  const auto refuse = [&name](const std::string& why) {
    throw Error(Code::kUsage, fmt::format("\"{}\" cannot be the name of a program: {}", name, why),
                "begin with a letter, and use only letters, digits, - and _: lockstep new mine");
  };
  const auto letter = [](char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); };
  if (name.empty() || !letter(name.front())) refuse("it does not begin with a letter");
  if (name.size() > kLongest) refuse(fmt::format("it is longer than {} letters", kLongest));
  for (const char c : name) {
    if (!letter(c) && !(c >= '0' && c <= '9') && c != '-' && c != '_') {
      refuse("it contains another character than letters, digits, - and _");
    }
  }
  for (const char* taken : {"all", "clean", "help", "install", "package", "test", "CMakeFiles"}) {
    if (name == taken) refuse("CMake uses that name itself");
  }
}

CLI::App* add_new_command(CLI::App& app, NewOptions& options) {
  auto* command = app.add_subcommand("new", "make a folder with a program of your own");
  command->footer(format_examples(kNewExamples));
  command->add_option("NAME", options.path, "of the program and its folder")
      ->required()
      ->type_name("");
  std::vector<std::string> templates;
  for (const auto& each : kTemplates) {
    templates.push_back(fmt::format("{}: {}", each.name, each.about));
  }
  command
      ->add_option(
          "--template", options.program_template,
          fmt::format("what it starts from (default: ddp). {}", fmt::join(templates, "; ")))
      ->type_name(fmt::format("{}", fmt::join(template_names(), "|")));
  return command;
}

int run_new(const NewOptions& options) {
  const ProgramTemplate& from = template_named(options.program_template);
  fs::path folder = options.path;
  if (!folder.has_filename()) folder = folder.parent_path();  // a slash at the end
  const std::string name = folder.filename().string();
  check_program_name(name);
  std::error_code error;
  if (fs::exists(fs::symlink_status(folder, error))) {
    throw Error(Code::kUsage, fmt::format("{} exists already", folder.string()),
                "choose another name, or remove it first; nothing was changed");
  }
  const Home home = find_home();
  const std::string source =
      read_text_file((home.examples / fmt::format("{}.cpp", from.example)).string());
  const Commands commands = commands_for(name, from, home);
  write_folder(folder, {{"main.cpp", replace_all(source, from.example, name)},
                        {"CMakeLists.txt", cmake_lists(name, from)},
                        {"CMakePresets.json", presets(home)},
                        {"README.md", readme(name, from, commands)},
                        {".gitignore", "build/\nreport/\nrun.json\n"}});
  fmt::print("{}: main.cpp, CMakeLists.txt, CMakePresets.json, README.md\n\n", folder.string());
  fmt::print("  cd {}\n  {}\n  {}\n  {}\n", folder.string(), commands.build, commands.run,
             commands.report);
  return 0;
}

}  // namespace lockstep::cli
