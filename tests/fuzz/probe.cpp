// What lockstep-probe prints, and what `lockstep doctor` makes of it on a machine with a GPU; or a
// pair of architectures and a compute capability.

#include <nlohmann/json.hpp>

#include "base/json_text.hpp"
#include "cli/doctor/doctor.hpp"
#include "fuzz.hpp"

namespace lockstep::fuzz {
namespace {

nlohmann::json machine() {
  return nlohmann::json::parse(R"({
    "cores_allowed": 4, "cores_online": 8, "cpu_quota_cores": null, "memory_total_bytes": 17179869184,
    "memory_available_bytes": 8589934592, "memory_limit_bytes": null,
    "shared_memory": {"size_bytes": 8589934592, "free_bytes": 8589934592, "writable": true},
    "open_files": 20000, "processes": null, "host": {"name": "box", "problem": ""},
    "environment": {}, "leftover_boards": [], "unknown_boards": [],
    "driver": {"version": "550", "cuda_version": "12.4",
               "gpus": [{"name": "H200", "memory_bytes": 1000, "compute_capability": "9.0"}]}})");
}

}  // namespace
}  // namespace lockstep::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace lockstep;
  using namespace lockstep::fuzz;
  static const nlohmann::json here = machine();
  const auto probe = parse_json({reinterpret_cast<const char*>(data), size});
  if (!probe) return 0;
  accepts([&] {
    for (const auto& finding :
         cli::diagnose({{"lockstep", "0.1.0"}, {"machine", here}, {"probe", *probe}})) {
      require(!finding.check.empty() && !finding.value.empty(), "a finding says what was found");
      require(finding.level == cli::Level::kPass || !finding.remedy.empty(),
              "what is not well has a remedy");
    }
  });
  if (!probe->is_array() || probe->size() != 2 || !probe->at(0).is_string() ||
      !probe->at(1).is_string()) {
    return 0;
  }
  cli::gpu_code_serves(probe->at(0).get<std::string>(), probe->at(1).get<std::string>());
  return 0;
}
