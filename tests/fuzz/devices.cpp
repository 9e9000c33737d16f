// The --devices grammar, lists of cores, and lists of ranks. The first byte is the machine: GPUs
// and cores; the rest is the text.

#include <algorithm>
#include <numeric>

#include "base/lists.hpp"
#include "fuzz.hpp"
#include "lockstep/device_plan.hpp"

namespace lockstep::fuzz {
namespace {

void plan(std::string_view text, const Hardware& hardware) {
  accepts([&] {
    const auto slots = plan_devices(text, hardware);
    require(!slots.empty() && slots.size() <= 256, "there are 1 to 256 devices");
    for (size_t i = 0; i < slots.size(); ++i) {
      const SlotPlan& slot = slots[i];
      require(slot.index == static_cast<int>(i), "devices are numbered in order");
      require(slot.threads >= 1, "every device has a thread");
      require(slot.kind == DeviceKind::kCpu ? slot.gpu == -1 : slot.gpu < hardware.gpus,
              "a device is on hardware that exists");
      for (const int core : slot.cores) {
        require(std::count(hardware.cores.begin(), hardware.cores.end(), core) == 1,
                "a core is one of this machine");
      }
      slot.name();
      slot.physical();
    }
  });
}

void lists(std::string_view text) {
  accepts([&] {
    const auto cores = parse_cores(text);
    require(parse_cores(format_cores(cores)) == cores, "a list of cores survives writing");
  });
  if (const auto numbers = parse_number_list(text)) {
    require(!numbers->empty(), "a list of ranks has one");
    require(parse_number_list(format_number_list(*numbers)) == numbers,
            "a list of ranks survives writing");
  }
}

}  // namespace
}  // namespace lockstep::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace lockstep::fuzz;
  Input input(data, size);
  const uint8_t machine = input.byte();
  lockstep::Hardware hardware{.cores = std::vector<int>(1 + machine % 8), .gpus = machine / 64};
  std::iota(hardware.cores.begin(), hardware.cores.end(), machine % 5);
  plan(input.rest(), hardware);
  lists(input.rest());
  return 0;
}
