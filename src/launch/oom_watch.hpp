#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace lockstep {

/// The number after "oom_kill " at the start of a line of a kernel's file.
std::optional<int64_t> parse_oom_kills(std::string_view text);

/// The file that counts the kills of this process's group, from the text of /proc/self/cgroup;
/// "" where no group counts memory.
std::string oom_counter_file(std::string_view cgroup_text, const std::string& mount);

/// Tells whether the system killed a process for lack of memory since this was made. Best effort:
/// it sees the group's counter, or the machine's where groups do not count.
class OomWatch {
 public:
  OomWatch();
  bool happened() const;

 private:
  std::string file_;
  int64_t before_ = 0;
};

}  // namespace lockstep
