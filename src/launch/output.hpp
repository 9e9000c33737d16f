#pragma once

#include <poll.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "launch/plan.hpp"

// The way of the ranks' output: from their pipes, in lines, to log files and to the console.

namespace lockstep {

/// The launcher's own standard output and error. A rank's lines go to the stream that the rank
/// wrote to, whole and prefixed with the rank. Nothing here blocks: what the reader of a pipe or a
/// stopped terminal does not take is kept, and flush() resumes.
class Console {
 public:
  Console();
  Console(const Console&) = delete;
  Console& operator=(const Console&) = delete;

  /// A line whose `end` is '\r' is shown on a terminal, where the next line overwrites it, and
  /// dropped elsewhere.
  void rank_line(int rank, Stream stream, std::string_view line, char end);

  /// Writes a line or block of the launcher itself to standard error.
  void message(std::string_view text);

  void flush();  ///< writes what can be written now
  void flush_until(int64_t deadline_ns);

  /// True if so much is pending that no more should be read from ranks.
  bool full() const;
  bool pending() const { return !out_.waiting.empty() || !err_.waiting.empty(); }
  bool pending(Stream stream) const;

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

/// Cuts the output of a process into lines. A line longer than kLongestLine comes in several
/// pieces, so that a program that never ends a line costs no memory.
class LineSplitter {
 public:
  /// `end` is '\n', or '\r' for a line that the program is going to overwrite.
  using Sink = std::function<void(std::string_view line, char end)>;

  static constexpr size_t kLongestLine = 16384;

  void add(std::string_view bytes, const Sink& sink);

  /// Gives out the text after the last line end.
  void finish(const Sink& sink);

 private:
  std::string line_;
  bool returned_ = false;  // line_ ended with '\r'; if '\n' follows, both are one line end
};

/// The log folder of one run, with a subfolder per attempt and two files per rank. It is removed
/// with its contents at the end, unless keep() was called.
class LogFolder {
 public:
  /// Creates the folder, and its parents if a user named them. Throws an Error (kFileWrite).
  LogFolder(std::string path, bool keep);
  ~LogFolder();
  LogFolder(const LogFolder&) = delete;
  LogFolder& operator=(const LogFolder&) = delete;

  const std::string& path() const { return path_; }
  bool kept() const { return keep_; }
  void keep() { keep_ = true; }

  /// <path>/<attempt>, created on the first call.
  std::string attempt_folder(int attempt) const;

 private:
  std::string path_;
  bool keep_;
};

/// How many files the launcher of so many local ranks keeps open: six per rank while they start,
/// and its own.
int files_for_ranks(int ranks);

/// <folder>/rank2.out or .err.
std::string log_file(const std::string& attempt_folder, int rank, Stream stream);

/// The write ends of one rank's two pipes; the router keeps the read ends.
struct OutputEnds {
  int output = -1;
  int errors = -1;
};

/// Reads what the ranks write: every byte goes to a file, lines go to the console as planned, and
/// the last lines of standard error are kept for the failure report.
class OutputRouter {
 public:
  /// `ranks` is the number of ranks on this host.
  OutputRouter(Console& console, const ConsolePlan& plan, std::string folder, int ranks);
  ~OutputRouter();
  OutputRouter(const OutputRouter&) = delete;
  OutputRouter& operator=(const OutputRouter&) = delete;

  /// Creates the pipes and files of one more rank.
  OutputEnds open(int rank, int local_rank);

  void add_to(std::vector<pollfd>& events) const;  ///< the pipes that are worth polling
  void read_available();                           ///< never blocks

  /// Shows held lines that are due; a `now_ns` far in the future shows all.
  void release_held(int64_t now_ns);
  /// When the next held line is due; 0 if there is none.
  int64_t next_due_ns() const { return held_.empty() ? 0 : held_.front().due_ns; }

  /// Drops held lines and shows only live ranks from now on: the run fails or stops.
  void silence_others();

  /// Reads the rest and gives out unfinished lines once the ranks are gone. Reports how much output
  /// the log files lack if a disk was full.
  void finish();

  /// The last lines that a rank wrote to standard error and the console has not shown.
  std::vector<std::string> last_errors(int local_rank) const;

 private:
  struct Pipe {
    int rank;
    int local_rank;
    Stream stream;
    Shown shown;
    int fd;
    int file;
    std::string path;  // of file
    LineSplitter lines = {};
    std::deque<std::string> last = {};  // of standard error
    size_t unshown = 0;                 // lines at the end that the console has not shown
    int64_t lost_bytes = 0;             // not written to the file
    int64_t lost_lines = 0;
  };
  struct HeldLine {
    int64_t due_ns;
    size_t pipe;  // in pipes_
    std::string text;
  };

  int open_pipe(int rank, int local_rank, Stream stream);
  bool read_some(Pipe& pipe);
  void write_log(Pipe& pipe, std::string_view bytes);
  void report_lost() const;
  void take_line(Pipe& pipe, std::string_view line, char end);

  Console& console_;
  const ConsolePlan& plan_;
  const std::string folder_;
  const int ranks_;
  std::vector<Pipe> pipes_;
  std::deque<HeldLine> held_;
  std::vector<char> buffer_;  // of read_some: ulimit -s may leave the launcher a small stack
  bool silenced_ = false;
  bool loss_reported_ = false;
};

}  // namespace lockstep
