// All targets in one libFuzzer program: the variable LOCKSTEP_FUZZ_TARGET names the one to run.

#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "driver.hpp"

namespace {

const lockstep::fuzz::Target* chosen = nullptr;

}  // namespace

extern "C" int LLVMFuzzerInitialize(int* /*argc*/, char*** /*argv*/) {
  const char* name = std::getenv("LOCKSTEP_FUZZ_TARGET");
  for (const auto& target : lockstep::fuzz::targets()) {
    if (name != nullptr && std::string_view(name) == target.name) chosen = &target;
  }
  if (chosen != nullptr) return 0;
  std::fprintf(stderr, "fuzz_targets: set LOCKSTEP_FUZZ_TARGET to one of:");
  for (const auto& target : lockstep::fuzz::targets()) std::fprintf(stderr, " %s", target.name);
  std::fprintf(stderr, "\n");
  std::exit(2);
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  return chosen->run(data, size);
}
