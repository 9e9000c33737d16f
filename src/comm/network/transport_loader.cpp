#include "comm/network/transport_loader.hpp"

#include <dlfcn.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <link.h>

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "lockstep/error.hpp"

namespace lockstep {
namespace {

// Sanitizers replace functions of every library, which RTLD_DEEPBIND would undo: they refuse it.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr int kLoadFlags = RTLD_NOW | RTLD_LOCAL;
#else
constexpr int kLoadFlags = RTLD_NOW | RTLD_LOCAL | RTLD_DEEPBIND;
#endif

// The file that this code was linked into: the program or a shared library. "" if that is
// unknown.
std::filesystem::path this_binary() {
  Dl_info about{};
  if (::dladdr(&kLoadFlags, &about) == 0 || about.dli_fname == nullptr) return {};
  return about.dli_fname;
}

// Where the dynamic loader looks for libraries of the program, or of the shared library, that this
// code was linked into. The run path of a program built with an installed static library names the
// module's folder.
std::vector<std::filesystem::path> loader_folders() {
  void* self = nullptr;
  if (const auto binary = this_binary(); !binary.empty()) {
    self = ::dlopen(binary.c_str(), RTLD_LAZY | RTLD_NOLOAD);
  }
  if (self == nullptr) self = ::dlopen(nullptr, RTLD_LAZY);  // in the program itself
  std::vector<std::filesystem::path> folders;
  Dl_serinfo size{};
  if (self == nullptr || ::dlinfo(self, RTLD_DI_SERINFOSIZE, &size) != 0) return folders;
  const auto memory = std::make_unique<std::byte[]>(std::max(size.dls_size, sizeof size));
  auto* const list = reinterpret_cast<Dl_serinfo*>(memory.get());
  if (::dlinfo(self, RTLD_DI_SERINFOSIZE, list) == 0 &&
      ::dlinfo(self, RTLD_DI_SERINFO, list) == 0) {
    for (unsigned i = 0; i < list->dls_cnt; ++i) {
      folders.emplace_back(list->dls_serpath[i].dls_name);
    }
  }
  ::dlclose(self);
  return folders;
}

std::vector<std::filesystem::path> module_folders() {
  std::vector<std::filesystem::path> folders;
  const auto add = [&](const std::filesystem::path& folder) {
    if (std::find(folders.begin(), folders.end(), folder) == folders.end())
      folders.push_back(folder);
  };
  if (const char* listed = std::getenv("LOCKSTEP_MODULE_PATH"); listed != nullptr) {
    std::string_view rest = listed;
    while (!rest.empty()) {
      const size_t colon = rest.find(':');
      if (colon != 0) add(rest.substr(0, colon));
      rest = colon == std::string_view::npos ? "" : rest.substr(colon + 1);
    }
  }
  std::error_code ignored;
  const auto program = std::filesystem::read_symlink("/proc/self/exe", ignored);
  if (!program.empty()) {
    add(program.parent_path());
    // The prefix of PREFIX/bin/lockstep, then that of PREFIX/libexec/lockstep/practical6_ddp.
    auto prefix = program.parent_path().parent_path();
    for (int up = 0; up < 2; ++up, prefix = prefix.parent_path()) {
      add(prefix / "lib" / "lockstep");
      add(prefix / LOCKSTEP_INSTALL_LIBDIR / "lockstep");
    }
  }
  if (const auto binary = this_binary(); binary.has_parent_path()) {
    add(binary.parent_path() / "lockstep");  // beside a shared library
  }
  for (const auto& folder : loader_folders()) add(folder);
  add(std::filesystem::path(LOCKSTEP_INSTALL_PREFIX) / LOCKSTEP_INSTALL_LIBDIR / "lockstep");
  return folders;
}

const LockstepTransportApi& load_now(const ModuleInfo& info) {
  const std::string path = find_module(info.file);
  if (path.empty()) {
    std::vector<std::string> looked;
    for (const auto& folder : module_folders()) looked.push_back(folder.string());
    throw Error(Code::kBackend,
                fmt::format("backend {} needs {}, which is nowhere", info.name, info.file),
                fmt::format("build lockstep where {} is installed, or name the module's folder in "
                            "LOCKSTEP_MODULE_PATH; {}",
                            info.built_with, info.instead),
                {fmt::format("looked in {}", fmt::join(looked, ", "))});
  }
  // Never unloaded: types and threads of Gloo and MPI may outlive any one communicator.
  void* module = ::dlopen(path.c_str(), kLoadFlags);
  if (module == nullptr) {
    throw Error(Code::kBackend, fmt::format("{} cannot be loaded: {}", path, ::dlerror()),
                fmt::format("install {}, which this module was built with", info.runs_with));
  }
  const auto entry =
      reinterpret_cast<LockstepTransportEntry>(::dlsym(module, LOCKSTEP_TRANSPORT_ENTRY));
  const LockstepTransportApi* api = entry == nullptr ? nullptr : entry();
  if (api == nullptr || api->abi != LOCKSTEP_TRANSPORT_ABI) {
    throw Error(Code::kBackend,
                fmt::format("{} is of another version: it has interface {}, this program needs {}",
                            path, api == nullptr ? 0 : api->abi, int{LOCKSTEP_TRANSPORT_ABI}),
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

const LockstepTransportApi& load_transport(const ModuleInfo& module) {
  static std::mutex mutex;
  static std::map<std::string_view, const LockstepTransportApi*> loaded;  // [name]
  const std::lock_guard lock(mutex);
  const LockstepTransportApi*& api = loaded[module.name];
  if (api == nullptr) api = &load_now(module);
  return *api;
}

}  // namespace lockstep
