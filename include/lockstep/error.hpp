#pragma once

#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

/// Every error that lockstep reports has one of these codes. `lockstep explain LS0002` explains
/// one.
enum class Code : int {
  kInternal = 0,          ///< a bug in lockstep
  kUsage = 1,             ///< an unknown flag, or a value out of range
  kDeviceSpec = 2,        ///< a --devices text that does not follow the grammar
  kDeviceMissing = 3,     ///< a device this machine does not have
  kFileRead = 4,          ///< a file that cannot be opened or read
  kFileFormat = 5,        ///< a file that is damaged or of another format
  kTensorMismatch = 6,    ///< tensors whose name, shape or dtype is not the one needed
  kFileWrite = 7,         ///< a file that cannot be written
  kSplit = 8,             ///< inputs that cannot be divided over devices
  kPlacement = 9,         ///< a module or tensor on another device than the one needed
  kReplicate = 10,        ///< a module that cannot be replicated
  kReplicaFailed = 11,    ///< an exception inside a replica
  kEngine = 12,           ///< a libtorch that is mixed, too old, or lacks what is asked of it
  kBoard = 13,            ///< a board that cannot be made, opened or trusted
  kRecord = 14,           ///< a result record that is damaged or of another schema
  kProgramFailed = 15,    ///< a program that did not succeed, or threw an exception of its own
  kOutOfMemory = 16,      ///< memory that the system did not give
  kWorld = 17,            ///< variables of a launcher that contradict each other
  kBackend = 18,          ///< a communication backend that is missing or cannot reach all ranks
  kRendezvous = 19,       ///< ranks or hosts that did not find or authenticate each other
  kCallMismatch = 20,     ///< ranks that made different calls
  kRankAbsent = 21,       ///< a rank that did not arrive before the deadline
  kRankFailed = 22,       ///< a rank that ended while others needed it
  kUnusedParameter = 23,  ///< a parameter without a gradient in a synchronised step
  kSyncMisuse = 24,       ///< forward, backward and no_sync in an order that loses gradients
  kReplicasDiffer = 25,   ///< models that are not the same on all ranks
  kLaunch = 26,           ///< a program that cannot be started
  kScalerMisuse = 27,     ///< calls of a GradScaler in an order that would lose or spoil a step
  kSchedule = 28,         ///< a pipeline schedule that does not exist, fit or end
  kStageFailed = 29,      ///< an exception inside a stage of a pipeline
  kStageMismatch = 30,    ///< stages, micro-batches or ranks of a pipeline that do not fit together
  kCapture = 31,          ///< a training step that cannot be captured into a CUDA graph
  kNonfinite = 32,        ///< gradients or losses that are infinite or not a number
  kCheckpoint = 33,       ///< a checkpoint that could not be saved while a run trained
};

/// What one code means, for `lockstep explain`.
struct CodeInfo {
  Code code;
  std::string_view title;        ///< a few words
  std::string_view explanation;  ///< why it happens and what to do
};

/// All codes, ascending.
const std::vector<CodeInfo>& all_codes();

/// "LS0002".
std::string code_name(Code code);

/// 2 if the caller asked for something impossible and nothing was started, else 1.
int exit_code(Code code);

/// An error that says what happened, what else is known, and what to do about it.
class Error : public std::runtime_error {
 public:
  Error(Code code, std::string message, std::string help = "", std::vector<std::string> notes = {});

  Code code() const { return code_; }
  const std::string& message() const { return message_; }
  const std::string& help() const { return help_; }
  const std::vector<std::string>& notes() const { return notes_; }

  /// The whole text, one fact per line: "error[LS0002]: …", "note: …", "help: …".
  std::string block() const { return what(); }

 private:
  Code code_;
  std::string message_;
  std::string help_;
  std::vector<std::string> notes_;
};

/// An error whose cause is another rank; this rank is a victim.
class RankError : public Error {
 public:
  RankError(Code code, int blamed_rank, std::string message, std::string help = "",
            std::vector<std::string> notes = {})
      : Error(code, std::move(message), std::move(help), std::move(notes)),
        blamed_rank_(blamed_rank) {}

  /// The world rank at fault; -1 if it is not known.
  int blamed_rank() const { return blamed_rank_; }

 private:
  int blamed_rank_;
};

/// The text of an exception, without the stack trace that libtorch appends to its own.
std::string describe(const std::exception& error);

/// Runs a program's body. An exception that escapes is printed to standard error and becomes the
/// exit code. First opens standard streams that are closed, makes standard output line-buffered if
/// it is a pipe, and ignores SIGXFSZ.
int run_program(int (*body)(int argc, char** argv), int argc, char** argv);

/// The candidate closest to `word`, or "" if none is close enough.
std::string did_you_mean(std::string_view word, const std::vector<std::string>& candidates);

}  // namespace lockstep
