#include "launch/sweep.hpp"

#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <set>
#include <string>

#include "lockstep/clock.hpp"

namespace lockstep {
namespace {

// The parent in /proc/PID/stat; 0 where the process is gone.
pid_t parent_of(const std::string& pid) {
  std::ifstream file("/proc/" + pid + "/stat");
  std::string line;
  std::getline(file, line);
  const size_t name_end = line.rfind(") ");  // the name before it may hold anything
  if (name_end == std::string::npos || name_end + 4 > line.size()) return 0;
  return static_cast<pid_t>(std::strtol(line.c_str() + name_end + 4, nullptr, 10));
}

// Where the kernel does not list children, every process is asked for its parent.
std::vector<pid_t> list_by_parent() {
  std::vector<pid_t> children;
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator("/proc", ignored)) {
    const std::string name = entry.path().filename().string();
    if (name.find_first_not_of("0123456789") != std::string::npos) continue;
    if (parent_of(name) == ::getpid()) {
      children.push_back(static_cast<pid_t>(std::strtol(name.c_str(), nullptr, 10)));
    }
  }
  return children;
}

bool is_zombie(pid_t pid) {
  siginfo_t info{};
  return ::waitid(P_PID, static_cast<id_t>(pid), &info, WEXITED | WNOHANG | WNOWAIT) == 0 &&
         info.si_pid == pid;
}

}  // namespace

std::vector<pid_t> list_children() {
  std::error_code failed;
  std::vector<pid_t> children;
  const std::filesystem::directory_iterator tasks("/proc/self/task", failed);
  for (const auto& task : tasks) {
    std::ifstream file(task.path() / "children");
    if (!file) return list_by_parent();
    for (pid_t pid = 0; file >> pid;) children.push_back(pid);
  }
  return failed ? list_by_parent() : children;
}

int sweep_children(int64_t deadline_ns) {
  std::set<pid_t> killed;
  for (;;) {
    for (const pid_t child : list_children()) {
      if (killed.contains(child) || is_zombie(child)) continue;
      ::kill(child, SIGKILL);
      killed.insert(child);
    }
    pid_t reaped = 0;
    do {
      reaped = ::waitpid(-1, nullptr, WNOHANG);
    } while (reaped > 0 || (reaped < 0 && errno == EINTR));
    if (reaped < 0 || monotonic_ns() > deadline_ns) return static_cast<int>(killed.size());
    ::poll(nullptr, 0, 1);
  }
}

}  // namespace lockstep
