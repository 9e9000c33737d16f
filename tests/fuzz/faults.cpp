// `lockstep run --inject` and LOCKSTEP_INJECT.

#include "base/fault.hpp"
#include "fuzz.hpp"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace lockstep;
  using namespace lockstep::fuzz;
  accepts([&] {
    const auto faults = parse_faults({reinterpret_cast<const char*>(data), size});
    require(!faults.empty(), "there is a fault");
    require(parse_faults(format_faults(faults)) == faults, "faults survive writing");
    for (const Fault& fault : faults) {
      require(fault.rank >= 0 && fault.step >= 1 && fault.amount >= 0, "ranks and steps exist");
    }
  });
  return 0;
}
