#include "launch/oom_watch.hpp"

#include <algorithm>
#include <charconv>

#include "base/file.hpp"

namespace lockstep {
namespace {

std::string_view next_line(std::string_view& text) {
  const size_t end = std::min(text.find('\n'), text.size());
  const std::string_view line = text.substr(0, end);
  text.remove_prefix(std::min(end + 1, text.size()));
  return line;
}

}  // namespace

std::optional<int64_t> parse_oom_kills(std::string_view text) {
  constexpr std::string_view kName = "oom_kill ";
  while (!text.empty()) {
    const std::string_view line = next_line(text);
    if (!line.starts_with(kName)) continue;
    int64_t count = 0;
    const auto parsed =
        std::from_chars(line.data() + kName.size(), line.data() + line.size(), count);
    if (parsed.ec == std::errc()) return count;
  }
  return std::nullopt;
}

std::string oom_counter_file(std::string_view cgroup_text, const std::string& mount) {
  std::string unified;
  while (!cgroup_text.empty()) {
    const std::string_view line = next_line(cgroup_text);  // "4:memory:/path", "0::/path"
    const size_t second = line.find(':', line.find(':') + 1);
    if (second == std::string_view::npos) continue;
    const std::string path(line.substr(second + 1));
    if (line.find(":memory:") != std::string_view::npos) {
      return mount + "/memory" + path + "/memory.oom_control";
    }
    if (line.starts_with("0::")) unified = mount + path + "/memory.events";
  }
  return unified;
}

OomWatch::OomWatch()
    : file_(oom_counter_file(read_text_or_empty("/proc/self/cgroup"), "/sys/fs/cgroup")) {
  if (file_.empty() || !parse_oom_kills(read_text_or_empty(file_))) file_ = "/proc/vmstat";
  before_ = parse_oom_kills(read_text_or_empty(file_)).value_or(0);
}

bool OomWatch::happened() const {
  return parse_oom_kills(read_text_or_empty(file_)).value_or(0) > before_;
}

}  // namespace lockstep
