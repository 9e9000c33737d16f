#pragma once

#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/clock.hpp"
#include "lockstep/detail/board.hpp"
#include "support.hpp"

namespace lockstep::test {

using Texts = std::vector<std::string>;

/// Waits until `condition` holds; false after a minute.
template <class Condition>
bool eventually(Condition&& condition) {
  for (int tries = 0; tries < 12000; ++tries) {
    if (condition()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return false;
}

inline Texts split_lines(const std::string& text) {
  Texts lines;
  std::string line;
  for (const char c : text) {
    if (c != '\n') {
      line += c;
      continue;
    }
    lines.push_back(line);
    line.clear();
  }
  if (!line.empty()) lines.push_back(line);
  return lines;
}

/// How a job ended.
struct JobResult {
  int exit_code = 0;  ///< 128 + signal where a signal ended the launcher
  std::string output;
  std::string errors;
  double seconds = 0;
};

/// A program of the tests, which stands in the folder of this one.
inline std::string beside_this_test(const std::string& program) {
  return (std::filesystem::read_symlink("/proc/self/exe").parent_path() / program).string();
}

/// A place where jobs of `lockstep run` are started, with a worker program and a TMPDIR of its own,
/// so that whatever a job leaves behind is found, also when tests run side by side.
class LaunchTest : public ::testing::Test {
 protected:
  LaunchTest() : worker_(folder_.file("w" + std::to_string(::getpid()))) {
    std::filesystem::create_symlink(beside_this_test("launch_worker"), worker_);
    std::filesystem::create_directory(folder_.file("tmp"));
  }

  const std::string& worker() const { return worker_; }
  std::string file(const std::string& name) const { return folder_.file(name); }

  /// `lockstep run` with these words; more variables may be set.
  pid_t start(const Texts& words, const std::map<std::string, std::string>& variables = {},
              const std::string& input = "/dev/null", const std::string& name = "job") const {
    const std::string output = file(name + ".out");
    const std::string errors = file(name + ".err");
    const std::string program = std::string(LOCKSTEP_BIN) + "/lockstep";
    const std::string temporary = file("tmp");
    std::vector<char*> argv = {const_cast<char*>(program.c_str()), const_cast<char*>("run")};
    for (const auto& word : words) argv.push_back(const_cast<char*>(word.c_str()));
    argv.push_back(nullptr);
    const pid_t pid = ::fork();
    if (pid == 0) {
      ::setenv("TMPDIR", temporary.c_str(), 1);
      ::unsetenv("OMP_NUM_THREADS");
      for (const auto& [variable, value] : variables) ::setenv(variable.c_str(), value.c_str(), 1);
      ::dup2(::open(input.c_str(), O_RDONLY), STDIN_FILENO);
      ::dup2(::open(output.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600), STDOUT_FILENO);
      ::dup2(::open(errors.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600), STDERR_FILENO);
      ::execv(argv[0], argv.data());
      ::_exit(127);
    }
    return pid;
  }

  /// Waits for the end of a job, at most a minute.
  JobResult finish(pid_t pid, const std::string& name = "job") const {
    const int64_t begun = monotonic_ns();
    int status = 0;
    while (::waitpid(pid, &status, WNOHANG) == 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      if (monotonic_ns() - begun < 60'000'000'000) continue;
      ADD_FAILURE() << "the job hangs\n" << read_bytes(file(name + ".err"));
      ::kill(pid, SIGKILL);
    }
    return {WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status),
            read_bytes(file(name + ".out")), read_bytes(file(name + ".err")),
            static_cast<double>(monotonic_ns() - begun) * 1e-9};
  }

  JobResult run(const Texts& words,
                const std::map<std::string, std::string>& variables = {}) const {
    return finish(start(words, variables));
  }

  /// Processes whose command line names this test's folder: launcher, supervisor, ranks,
  /// descendants.
  std::vector<pid_t> processes() const {
    std::vector<pid_t> found;
    for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
      const std::string name = entry.path().filename().string();
      if (name.find_first_not_of("0123456789") != std::string::npos) continue;
      if (read_bytes(entry.path() / "cmdline").find(worker_) != std::string::npos) {
        found.push_back(static_cast<pid_t>(std::stol(name)));
      }
    }
    return found;
  }

  static pid_t parent_of(pid_t pid) {
    std::ifstream status("/proc/" + std::to_string(pid) + "/stat");
    std::string skipped;
    pid_t parent = 0;
    status >> skipped >> skipped >> skipped >> parent;
    return parent;
  }

  static std::vector<pid_t> descendants_of(pid_t pid) {
    std::vector<pid_t> found;
    std::ifstream children("/proc/" + std::to_string(pid) + "/task/" + std::to_string(pid) +
                           "/children");
    for (pid_t child = 0; children >> child;) {
      found.push_back(child);
      for (const pid_t below : descendants_of(child)) found.push_back(below);
    }
    return found;
  }

  /// Boards of this test's worker.
  size_t boards() const {
    const std::string name = std::filesystem::path(worker_).filename().string();
    size_t count = 0;
    for (const auto& entry : list_boards()) count += entry.path.find(name) != std::string::npos;
    return count;
  }

  size_t log_folders() const {
    return static_cast<size_t>(std::distance(std::filesystem::directory_iterator(file("tmp")), {}));
  }

  void expect_nothing_left() const {
    EXPECT_TRUE(processes().empty());
    EXPECT_EQ(boards(), 0U);
    EXPECT_EQ(log_folders(), 0U);
  }

  /// The numbers in a file that workers add to, once there are `count`.
  std::vector<pid_t> pids_in(const std::string& path, size_t count) const {
    std::vector<pid_t> pids;
    EXPECT_TRUE(eventually([&] {
      pids.clear();
      std::ifstream list(path);
      for (pid_t pid = 0; list >> pid;) pids.push_back(pid);
      return pids.size() >= count;
    })) << "fewer than "
        << count << " numbers in " << path << "\n"
        << read_bytes(file("job.err"));
    return pids;
  }

 private:
  const ScratchFolder folder_;
  const std::string worker_;
};

}  // namespace lockstep::test
