#include "launch/program.hpp"

#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string_view>

#include "lockstep/error.hpp"

namespace lockstep {
namespace {

enum class Found { kNothing, kFolder, kNotExecutable, kProgram };

Found look_at(const std::string& path) {
  struct stat info {};
  if (::stat(path.c_str(), &info) != 0) return Found::kNothing;
  if (S_ISDIR(info.st_mode)) return Found::kFolder;
  return ::access(path.c_str(), X_OK) == 0 ? Found::kProgram : Found::kNotExecutable;
}

[[noreturn]] void fail(const std::string& message, const std::string& help) {
  throw Error(Code::kLaunch, message, help);
}

std::string check_path(const std::string& path) {
  switch (look_at(path)) {
    case Found::kNothing:
      fail(fmt::format("there is no program {}", path), "check the path, or build it first");
    case Found::kFolder:
      fail(fmt::format("{} is a folder, not a program", path), "name the program inside it");
    case Found::kNotExecutable:
      fail(fmt::format("{} may not be executed", path),
           fmt::format("chmod +x {}, or name the program that reads it", path));
    case Found::kProgram:
      break;
  }
  return path;
}

std::string search(const std::string& name, std::string_view path_variable) {
  for (size_t begin = 0; begin <= path_variable.size();) {
    const size_t end = std::min(path_variable.find(':', begin), path_variable.size());
    const std::string folder(path_variable.substr(begin, end - begin));
    const std::string path = (folder.empty() ? "." : folder) + "/" + name;
    if (look_at(path) == Found::kProgram) return path;
    begin = end + 1;
  }
  if (look_at("./" + name) == Found::kProgram) {
    fail(fmt::format("there is no program {} in PATH", name),
         fmt::format("to start the one in this folder write ./{}", name));
  }
  fail(fmt::format("there is no program {} in PATH", name),
       "write its path, such as ./train or build/train");
}

}  // namespace

std::string find_program(const LaunchPlan& plan, const VariableLookup& lookup) {
  if (!plan.script.empty() && ::access(plan.script.c_str(), R_OK) != 0) {
    fail(fmt::format("cannot read {}: {}", plan.script, std::strerror(errno)), "check the path");
  }
  const std::string& name = plan.command[0];
  if (name.find('/') != std::string::npos) return check_path(name);
  const char* path_variable = lookup("PATH");
  return search(name, path_variable == nullptr ? "/usr/local/bin:/usr/bin:/bin" : path_variable);
}

}  // namespace lockstep
