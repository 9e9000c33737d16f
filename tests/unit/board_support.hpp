#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <exception>
#include <string>

#include "support.hpp"

namespace lockstep::test {

class BoardTest : public testing::Test {
 protected:
  ScratchFolder scratch_;
  std::string path_ = scratch_.file("board");
  // A name that only this process uses, for boards in /dev/shm itself.
  std::string run_ = "test-" + std::to_string(::getpid());
};

/// Runs the body in a child process and returns its exit status.
template <class Body>
int in_child(Body&& body) {
  const pid_t child = ::fork();
  if (child == 0) {
    int result = 1;
    try {
      result = body();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "child: %s\n", error.what());
    }
    ::_exit(result);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

}  // namespace lockstep::test
