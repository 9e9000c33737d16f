#pragma once

#include <poll.h>

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "launch/console.hpp"
#include "launch/line_splitter.hpp"

namespace lockstep {

/// The two pipes of one rank's output.
struct OutputEnds {
  int output = -1;  ///< write ends, for the rank; the router keeps the read ends
  int errors = -1;
};

/// How many files a launcher of so many ranks on its host keeps open: six for each rank while they
/// start, and its own.
int files_for_ranks(int ranks);

/// Takes what the ranks write: every byte to a file, lines to the console as planned, and the last
/// lines of errors kept for the failure block.
class OutputRouter {
 public:
  /// `ranks`: of this host.
  OutputRouter(Console& console, const ConsolePlan& plan, std::string folder, int ranks);
  ~OutputRouter();
  OutputRouter(const OutputRouter&) = delete;
  OutputRouter& operator=(const OutputRouter&) = delete;

  /// Makes the pipes and files of one more rank.
  OutputEnds open(int rank, int local_rank);

  void add_to(std::vector<pollfd>& events) const;  ///< the pipes that are worth waiting for
  void read_available();                           ///< whatever is there now; never waits

  /// Shows held lines that are due; `now_ns` far in the future shows all.
  void release_held(int64_t now_ns);
  /// When the next held line is due; 0: there is none.
  int64_t next_due_ns() const { return held_.empty() ? 0 : held_.front().due_ns; }

  /// From now on only live ranks are shown, held lines are dropped: the run fails or stops.
  void silence_others();

  /// Reads what is left and gives out unfinished lines. The ranks are gone. Tells how much of their
  /// output the log files lack, where a disk was full.
  void finish();

  /// The last lines rank `local_rank` wrote to its standard error, without those that the console
  /// has shown.
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
    size_t unshown = 0;                 // how many lines at the end the console has not shown
    int64_t lost_bytes = 0;             // which the file did not take
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
  std::vector<char> buffer_;  // of read_some: a launcher's stack may be as small as ulimit -s says
  bool silenced_ = false;
  bool loss_reported_ = false;
};

}  // namespace lockstep
