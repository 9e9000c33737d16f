#include "comm/gloo/gloo_loader.hpp"

#include <dlfcn.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cstdlib>
#include <filesystem>
#include <vector>

#include "lockstep/error.hpp"

namespace lockstep {
namespace {

constexpr std::string_view kGlooModule = "lockstep-gloo.so";

// Sanitizers replace functions of every library, which RTLD_DEEPBIND would undo: they refuse it.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr int kLoadFlags = RTLD_NOW | RTLD_LOCAL;
#else
constexpr int kLoadFlags = RTLD_NOW | RTLD_LOCAL | RTLD_DEEPBIND;
#endif

std::vector<std::filesystem::path> module_folders() {
  std::vector<std::filesystem::path> folders;
  if (const char* listed = std::getenv("LOCKSTEP_MODULE_PATH"); listed != nullptr) {
    std::string_view rest = listed;
    while (!rest.empty()) {
      const size_t colon = rest.find(':');
      if (colon != 0) folders.emplace_back(rest.substr(0, colon));
      rest = colon == std::string_view::npos ? "" : rest.substr(colon + 1);
    }
  }
  std::error_code ignored;
  const auto program = std::filesystem::read_symlink("/proc/self/exe", ignored);
  if (!program.empty()) {
    folders.push_back(program.parent_path());
    folders.push_back(program.parent_path().parent_path() / "lib" / "lockstep");
  }
#ifdef LOCKSTEP_MODULE_FOLDER
  folders.emplace_back(LOCKSTEP_MODULE_FOLDER);
#endif
  return folders;
}

const LockstepGlooApi& load_gloo_now() {
  const std::string path = find_module(kGlooModule);
  if (path.empty()) {
    std::vector<std::string> looked;
    for (const auto& folder : module_folders()) looked.push_back(folder.string());
    throw Error(Code::kBackend, fmt::format("backend gloo needs {}, which is nowhere", kGlooModule),
                "build lockstep where libgloo-dev is installed, or name the module's folder in "
                "LOCKSTEP_MODULE_PATH; ranks of one host need no Gloo: use backend shm",
                {fmt::format("looked in {}", fmt::join(looked, ", "))});
  }
  // Never unloaded: Gloo's types and threads may outlive any one communicator.
  void* module = ::dlopen(path.c_str(), kLoadFlags);
  if (module == nullptr) {
    throw Error(Code::kBackend, fmt::format("{} cannot be loaded: {}", path, ::dlerror()),
                "install libgloo0, the library that this module was built with");
  }
  const auto entry = reinterpret_cast<LockstepGlooEntry>(::dlsym(module, LOCKSTEP_GLOO_ENTRY));
  const LockstepGlooApi* api = entry == nullptr ? nullptr : entry();
  if (api == nullptr || api->abi != LOCKSTEP_GLOO_ABI) {
    throw Error(Code::kBackend,
                fmt::format("{} is of another version: it has interface {}, this program needs {}",
                            path, api == nullptr ? 0 : api->abi, int{LOCKSTEP_GLOO_ABI}),
                "take the module and the library from one build of lockstep");
  }
  return *api;
}

}  // namespace

std::string find_module(std::string_view file_name) {
  for (const auto& folder : module_folders()) {
    std::error_code ignored;
    const auto path = folder / file_name;
    if (std::filesystem::is_regular_file(path, ignored)) return path.string();
  }
  return "";
}

const LockstepGlooApi& load_gloo() {
  static const LockstepGlooApi& api = load_gloo_now();
  return api;
}

}  // namespace lockstep
