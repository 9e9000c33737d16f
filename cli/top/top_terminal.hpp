#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "cli/child.hpp"

namespace lockstep::cli {

/// Why a wait ended.
enum class Wake { kTime, kKeys, kRedraw, kQuit };

/// The terminal while `lockstep top` draws on it: alternate screen, no cursor, keys unechoed. The
/// destructor undoes all of it; so do Ctrl-Z, until the program continues, and a signal that ends
/// it. There may be one Screen at a time.
class Screen {
 public:
  explicit Screen(const Interrupts& interrupts);
  ~Screen();
  Screen(const Screen&) = delete;
  Screen& operator=(const Screen&) = delete;

  struct Size {
    size_t width;
    size_t height;
  };
  Size size() const;

  /// Replaces what is shown, in one write.
  void show(const std::vector<std::string>& lines);

  /// Waits for a key, a signal or the deadline (of monotonic_ns). A signal to stop throws
  /// Interrupted, except SIGINT: that is one way to quit.
  Wake wait_until(int64_t deadline_ns);

  /// What was typed since the last call, as the terminal sent it.
  std::string take_typed() { return std::exchange(typed_, {}); }

 private:
  void enter();
  void suspend();
  void read_keys();

  const Interrupts& interrupts_;
  bool keys_;         // standard input is a terminal
  int signals_ = -1;  // readable when the window changes or the job is stopped or continued
  std::string typed_;
  bool gone_ = false;  // the terminal takes no more output
};

}  // namespace lockstep::cli
