#include "backend_world.hpp"
#include "comm/network/transport_loader.hpp"

// The suite of the host's backends.

namespace lockstep::test {

const Suite& suite_under_test() {
  static const Suite suite = {
      .backends = {"self", "shm", "gloo", "two_level"},
      .missing = [](const std::string& backend) -> std::string {
        if (backend == "self" || backend == "shm") return "";
        if (!find_module("lockstep-gloo.so").empty()) return "";
        return "lockstep-gloo.so is missing: libgloo-dev was not there to build it";
      },
      .host = [](const std::string& backend) { return backend; },
      .build = [](const WorldCase&, std::unique_ptr<Backend> host) { return host; },
  };
  return suite;
}

}  // namespace lockstep::test
