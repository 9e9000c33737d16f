#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "launch/console_plan.hpp"

namespace lockstep {

/// The launcher's own standard output and error. Lines of ranks go where the rank wrote them, whole
/// and with the rank in front. Nothing here waits: what the reader of a pipe or a stopped terminal
/// does not take is kept, and flush() goes on where it stopped.
class Console {
 public:
  Console();
  Console(const Console&) = delete;
  Console& operator=(const Console&) = delete;

  /// `end` '\r': shown on a terminal, overwritten by what follows; dropped elsewhere.
  void rank_line(int rank, Stream stream, std::string_view line, char end);

  /// A line or block of the launcher itself, to standard error.
  void message(std::string_view text);

  void flush();  ///< writes what can be written now
  void flush_until(int64_t deadline_ns);

  /// Whether so much waits that no more should be read from ranks.
  bool full() const;
  bool pending() const { return !out_.waiting.empty() || !err_.waiting.empty(); }
  bool pending(Stream stream) const;  ///< something waits for this descriptor

 private:
  struct Sink {
    int fd;
    bool terminal;
    bool styled;
    bool broken = false;  // its reader is gone, or its disk is full
    std::string waiting = {};
  };

  Sink& sink(Stream stream) { return stream == Stream::kOut ? out_ : err_; }
  void write(Sink& sink, std::string_view text);
  void flush(Sink& sink);
  void close_overwritten_line(const Sink& next);

  Sink out_;
  Sink err_;
  bool overwriting_ = false;  // a terminal shows a line that ended with '\r'
};

}  // namespace lockstep
