#pragma once

#include <signal.h>
#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>

// This process and others: what /proc says of them, threads without signals, standard streams.

namespace lockstep {

/// What /proc/PID/stat says of a process.
struct ProcessStat {
  char state = ' ';  ///< 'R', 'S', 'D', 'T', 'Z', ...
  pid_t parent = 0;
  int64_t start_ticks = 0;  ///< clock ticks from boot to the start of the process

  bool has_ended() const { return state == 'Z' || state == 'X'; }
  bool is_stopped() const { return state == 'T' || state == 't'; }
};

/// Returns nothing if there is no such process.
std::optional<ProcessStat> read_process_stat(pid_t pid);

/// The path of the program of this name in the folders of PATH; "" if none of them has it. `path`
/// is the variable's value, null if it is not set. As a shell does, an empty folder counts as
/// the current one, and only files that may be executed count.
std::string find_in_path(const std::string& name, const char* path);

/// Identifies the namespace in which this process sees pids; 0 if the system does not tell.
/// Containers on one host number their processes independently.
uint64_t pid_namespace();

/// Steps that the run had made before this process resumed it. Messages add them to the steps that
/// the process counts itself.
void set_resumed_steps(int64_t steps);
int64_t resumed_steps();

/// Starts a thread that takes no signals; those are for the program's own threads.
template <class Body>
std::thread start_quiet_thread(Body&& body) {
  sigset_t all;
  sigset_t before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    std::thread thread(std::forward<Body>(body));
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return thread;
  } catch (...) {
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
}

/// Opens /dev/null on each of the descriptors 0, 1 and 2 that is closed. Otherwise the next socket
/// or file would take its number and receive text meant for the console.
void reserve_standard_descriptors();

/// Makes standard output line-buffered if it is a pipe or a socket. The C library would hold back
/// 4096 bytes there: a launcher would show them late, and a killed rank would lose them. A terminal
/// is line-buffered already; a regular file keeps its buffer.
void send_output_by_line();

/// Writes as much of the text to standard error as it takes. Never throws or raises a signal: a
/// full disk, a closed descriptor or a reader that is gone must not replace the program's exit
/// code.
void print_error(std::string_view text) noexcept;

}  // namespace lockstep
