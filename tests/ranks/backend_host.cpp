#include "backend_world.hpp"

#include <fmt/format.h>

#include "base/backends.hpp"
#include "comm/network/transport_loader.hpp"

// The suite of the host's backends.

namespace lockstep::test {
namespace {

std::vector<std::string> host_backends() {
  std::vector<std::string> names;
  for (const BackendInfo& each : kBackends) {
    if (!each.on_gpus && !each.has_own_launcher()) names.emplace_back(each.name);
  }
  return names;
}

}  // namespace

const Suite& suite_under_test() {
  static const Suite suite = {
      .backends = host_backends(),
      .missing = [](const std::string& backend) -> std::string {
        const ModuleInfo* const module = find_backend(backend)->module;
        if (module == nullptr || !find_module(module->file).empty()) return "";
        return fmt::format("{} is missing: {} was not there to build it", module->file,
                           module->built_with);
      },
      .host = [](const std::string& backend) { return backend; },
      .build = [](const WorldCase&, std::unique_ptr<Backend> host) { return host; },
  };
  return suite;
}

}  // namespace lockstep::test
