// What a MetricsLog finds in its folder when a run goes on: lines and event files of an earlier
// process, or of anybody.

#include "lockstep/metrics_log.hpp"

#include <filesystem>
#include <sstream>

#include "base/event_file.hpp"
#include "fuzz.hpp"

namespace lockstep::fuzz {
namespace {

constexpr int64_t kResumedAfter = 5;

void cut_events(std::string_view file) {
  const size_t kept = keep_events(file, kResumedAfter);
  require(kept <= file.size(), "a file only becomes shorter");
  const std::string_view rest = file.substr(0, kept);
  require(keep_events(rest, kResumedAfter) == kept, "what is kept is kept again");
  const auto last = last_event_step(rest);
  require(!last || *last <= kResumedAfter, "no later step is kept");
}

void resume(std::string_view bytes, const Scratch& scratch) {
  const std::string folder = scratch.file("log");
  std::filesystem::remove_all(folder);
  std::filesystem::create_directories(folder);
  scratch.write("log/metrics.csv", bytes);
  scratch.write("log/events.out.tfevents.7.host.1", bytes);
  const bool opened = accepts([&] {
    MetricsLog log(folder, {.resumed_after = kResumedAfter});
    log.write(kResumedAfter + 1, "loss", 1);
  });
  const std::string text = read_bytes(folder + "/metrics.csv");
  if (!opened) return require_equal(text, bytes, "a file of somebody else stays as it is");
  require(text.ends_with(",loss,1\n"), "the new line is the last");
  std::istringstream lines(text);
  std::string line;
  require(static_cast<bool>(std::getline(lines, line)) && line == "step,time,name,value",
          "the header is there");
  while (std::getline(lines, line)) {
    require(std::stoll(line) <= kResumedAfter + 1, "later steps are removed");
  }
}

}  // namespace
}  // namespace lockstep::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace lockstep;
  static const fuzz::Scratch scratch;
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  fuzz::cut_events(bytes);
  fuzz::cut_events(tf_record(bytes) + tf_record(restart_event(1, 2)));  // with a right checksum
  fuzz::resume(bytes, scratch);
  fuzz::resume("step,time,name,value\n" + std::string(bytes), scratch);
  return 0;
}
