#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "lockstep/error.hpp"

namespace lockstep::cli {

/// Thrown when the user or the system asked lockstep to stop; its children have ended by then.
struct Interrupted {
  int signal = 0;
};

/// Turns SIGINT, SIGTERM and SIGHUP into events that run_child waits for, as long as it lives.
class Interrupts {
 public:
  Interrupts();
  ~Interrupts();
  Interrupts(const Interrupts&) = delete;
  Interrupts& operator=(const Interrupts&) = delete;

  int descriptor() const { return descriptor_; }  ///< readable when a signal waits
  int take() const;                               ///< the waiting signal, or 0

 private:
  int descriptor_;
};

/// A program to run to its end.
struct ChildCommand {
  std::string program;  ///< path
  std::vector<std::string> arguments;
  std::vector<int> cores = {};  ///< cores it may use; empty: those of lockstep
  std::map<std::string, std::string> variables = {};  ///< set in addition to those of lockstep
  std::chrono::seconds deadline{600};  ///< after that it is killed, which is an Error
  std::function<void()> tick = [] {};  ///< called a few times a second while it runs
};

/// How a child ended, and the last megabyte of each stream that it wrote.
struct ChildResult {
  int exit_code = 0;  ///< 128 + signal if a signal ended it
  std::string output;
  std::string errors;
  double seconds = 0;
};

/// A child that did not succeed. A child's exit code 2 means that the request was at fault.
class ChildFailed : public Error {
 public:
  ChildFailed(std::string message, std::string help, std::vector<std::string> notes, int child_exit)
      : Error(Code::kProgramFailed, std::move(message), std::move(help), std::move(notes)),
        child_exit_(child_exit) {}
  int child_exit() const { return child_exit_; }

 private:
  int child_exit_;
};

/// Runs a program in its own process group with no input. The group is killed when the deadline
/// passes, when a signal comes, and by the kernel when lockstep itself dies.
ChildResult run_child(const ChildCommand& command, const Interrupts& interrupts);

/// The same, but an exit code other than 0 is a ChildFailed that quotes the end of its errors, or
/// of its output if it wrote no errors.
ChildResult run_child_or_throw(const ChildCommand& command, const Interrupts& interrupts);

/// Where lockstep's other programs are: beside the command in a build folder, in libexec/lockstep
/// once installed.
std::vector<std::string> program_folders();

/// The path of one of lockstep's other programs; an Error if it is missing.
std::string sibling_path(const std::string& name);

}  // namespace lockstep::cli
