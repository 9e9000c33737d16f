#include "base/process.hpp"

#include <cxxabi.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <stdio_ext.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <fstream>
#include <memory>
#include <new>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <system_error>
#include <typeinfo>

#include "base/file.hpp"
#include "base/lists.hpp"
#include "lockstep/detail/board.hpp"
#include "lockstep/error.hpp"

namespace lockstep {
namespace {

std::atomic<int64_t> steps_before = 0;  // of the run, when this process resumed it

// Guard: a write to a pipe without a reader does not raise SIGPIPE in this thread.
class PipeSignalBlock {
 public:
  PipeSignalBlock() {
    sigemptyset(&pipe_);
    sigaddset(&pipe_, SIGPIPE);
    sigset_t pending;
    ::sigpending(&pending);
    was_pending_ = sigismember(&pending, SIGPIPE) == 1;
    ::pthread_sigmask(SIG_BLOCK, &pipe_, &before_);
  }
  ~PipeSignalBlock() {
    const timespec at_once{};
    if (!was_pending_) ::sigtimedwait(&pipe_, nullptr, &at_once);
    ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  PipeSignalBlock(const PipeSignalBlock&) = delete;
  PipeSignalBlock& operator=(const PipeSignalBlock&) = delete;

 private:
  sigset_t pipe_;
  sigset_t before_;
  bool was_pending_;
};

void note_on_board(Code code, const std::string& message, int blamed_rank) {
  const char* board = std::getenv("LOCKSTEP_BOARD");
  const char* local_rank = std::getenv("LOCAL_RANK");
  if (board == nullptr || local_rank == nullptr) return;
  int page = 0;
  const char* end = local_rank + std::strlen(local_rank);
  const auto parsed = std::from_chars(local_rank, end, page);
  if (parsed.ec != std::errc() || parsed.ptr != end) return;
  BoardPage::attach(board, page).record_first_error(code, message, blamed_rank);
}

// Writes the form that torch.distributed.elastic reads. No other process writes this file, and it
// is read only after this process has ended.
void note_in_error_file(const std::string& message, const std::string& block) {
  const char* path = std::getenv("TORCHELASTIC_ERROR_FILE");
  if (path == nullptr || *path == '\0') return;
  const nlohmann::json note = {
      {"message",
       {{"message", message},
        {"extraInfo",
         {{"py_callstack", block}, {"timestamp", std::to_string(std::time(nullptr))}}}}}};
  std::ofstream(path) << note.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

// Tells whoever started this program why it fails, through the launcher's board (LOCKSTEP_BOARD)
// and torchrun's error file (TORCHELASTIC_ERROR_FILE) if they are set.
void note_failure(const Error& error) noexcept {
  try {
    const auto* by_rank = dynamic_cast<const RankError*>(&error);
    note_in_error_file(error.message(), error.block());
    note_on_board(error.code(), error.message(), by_rank != nullptr ? by_rank->blamed_rank() : -1);
  } catch (const std::exception&) {
    // The board is gone or the disk is full; the error is still printed.
  }
}

// "std::runtime_error", "c10::Error".
std::string type_of(const std::exception& error) {
  const char* mangled = typeid(error).name();
  int status = 0;
  const std::unique_ptr<char, decltype(&std::free)> name(
      abi::__cxa_demangle(mangled, nullptr, nullptr, &status), &std::free);
  return name == nullptr ? mangled : name.get();
}

// `reason` is 0 if an earlier write failed and its errno was not kept.
Error output_error(int reason) {
  return {Code::kCheckpoint,
          reason == 0 ? "standard output did not take all that was printed"
                      : fmt::format("cannot write standard output: {}", std::strerror(reason)),
          limit_help(reason, "free some space on that disk, or send the output elsewhere")};
}

// Describes an exception that does not come from lockstep but from the program or a library it
// calls.
Error report_of(const std::exception& error) {
  const std::string type = type_of(error);
  const auto* system = dynamic_cast<const std::system_error*>(&error);
  if (system != nullptr && std::ferror(stdout) != 0) return output_error(system->code().value());
  if (dynamic_cast<const std::bad_alloc*>(&error) != nullptr) {
    return {Code::kOutOfMemory, fmt::format("the system gave no memory ({})", type),
            "use smaller batches or a smaller model, or raise the limit (ulimit -v)"};
  }
  return {Code::kProgramFailed, fmt::format("the program threw {}: {}", type, describe(error)),
          "the exception comes from the program or from a library it calls: remove its cause, or "
          "catch it in the program"};
}

int report_failure(const Error& error) {
  std::fflush(stdout);
  note_failure(error);
  print_error(error.block() + "\n");
  return exit_code(error.code());
}

}  // namespace

std::optional<ProcessStat> read_process_stat(pid_t pid) {
  std::ifstream file(fmt::format("/proc/{}/stat", pid));
  std::string line;
  if (!std::getline(file, line)) return std::nullopt;
  // The second field is the program's name in parentheses, which may itself contain ')'.
  const size_t name_end = line.rfind(')');
  if (name_end == std::string::npos) return std::nullopt;
  std::istringstream fields(line.substr(name_end + 1));
  ProcessStat stat;
  fields >> stat.state >> stat.parent;
  std::string skipped;
  for (int number = 5; number < 22; ++number) fields >> skipped;
  if (!(fields >> stat.start_ticks)) return std::nullopt;
  return stat;
}

std::string find_in_path(const std::string& name, const char* path) {
  const std::string_view folders = path == nullptr ? "/usr/local/bin:/usr/bin:/bin" : path;
  for (const std::string_view folder : split_list(folders, ':')) {
    const std::string file = std::string(folder.empty() ? "." : folder) + "/" + name;
    struct stat info {};
    if (::stat(file.c_str(), &info) == 0 && !S_ISDIR(info.st_mode) &&
        ::access(file.c_str(), X_OK) == 0) {
      return file;
    }
  }
  return "";
}

uint64_t pid_namespace() {
  struct stat status {};
  return ::stat("/proc/self/ns/pid", &status) == 0 ? status.st_ino : 0;
}

void set_resumed_steps(int64_t steps) {
  steps_before = steps;
}

int64_t resumed_steps() {
  return steps_before;
}

void reserve_standard_descriptors() {
  for (const int standard : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (::fcntl(standard, F_GETFD) >= 0 || errno != EBADF) continue;
    int fd = ::open("/dev/null", O_RDWR);
    if (fd < 0) fd = ::open("/", O_PATH);  // without /dev: a descriptor that refuses every write
    if (fd < 0 || fd == standard) continue;
    ::dup2(fd, standard);
    ::close(fd);
  }
}

void send_output_by_line() {
  struct stat target {};
  if (::fstat(STDOUT_FILENO, &target) != 0) return;
  if (!S_ISFIFO(target.st_mode) && !S_ISSOCK(target.st_mode)) return;
  if (__flbf(stdout) != 0 || __fbufsize(stdout) == 1) return;  // 1 means unbuffered
  // A new buffer makes glibc flush the old one. If only the mode changed, putchar would go on
  // filling the rest of the old buffer.
  static std::array<char, BUFSIZ> buffer;
  std::setvbuf(stdout, buffer.data(), _IOLBF, buffer.size());
}

void print_error(std::string_view text) noexcept {
  const PipeSignalBlock block;
  std::fwrite(text.data(), 1, text.size(), stderr);
  std::fflush(stderr);
}

int run_program(int (*body)(int argc, char** argv), int argc, char** argv) {
  reserve_standard_descriptors();
  send_output_by_line();
  ::signal(SIGXFSZ, SIG_IGN);  // a write past the file size limit then fails with EFBIG
  try {
    const int code = body(argc, argv);
    if (code == 0 && std::fflush(stdout) != 0) throw output_error(errno);
    if (code == 0 && std::ferror(stdout) != 0) throw output_error(0);
    return code;
  } catch (const Error& error) {
    return report_failure(error);
  } catch (const std::exception& error) {
    return report_failure(report_of(error));
  }
}

}  // namespace lockstep
