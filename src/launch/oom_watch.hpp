#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace lockstep {

/// Tells whether the system has killed a process for lack of memory since the watch was created.
/// Best effort: it reads the counter of this process's control group, or of the whole machine.
class OomWatch {
 public:
  OomWatch();
  bool happened() const;

 private:
  std::string file_;
  int64_t before_ = 0;
};

/// The number after "oom_kill " at the start of a line of a kernel's file.
std::optional<int64_t> parse_oom_kills(std::string_view text);

/// The file that counts the kills of this process's control group, found from the text of
/// /proc/self/cgroup; "" if no group counts memory.
std::string oom_counter_file(std::string_view cgroup_text, const std::string& mount);

}  // namespace lockstep
