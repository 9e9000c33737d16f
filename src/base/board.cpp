#include "lockstep/board.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <new>
#include <sstream>

#include "base/limits.hpp"
#include "board_layout.hpp"
#include "board_mapping.hpp"
#include "descriptor.hpp"
#include "lockstep/clock.hpp"
#include "lockstep/units.hpp"
#include "pid_namespace.hpp"

namespace lockstep {

using namespace board_layout;

namespace {

constexpr const char* kFolder = "/dev/shm";
constexpr std::string_view kNameCharacters =
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-";
constexpr std::array<std::string_view, 7> kPhaseNames = {
    "starting", "loading", "training", "evaluating", "saving", "finished", "failed"};

std::string file_prefix() {
  return fmt::format("lockstep-{}-", ::geteuid());
}

void check_run_name(const std::string& name) {
  if (!name.empty() && name.size() < 64 &&
      name.find_first_not_of(kNameCharacters) == std::string::npos) {
    return;
  }
  board_error(fmt::format("\"{}\" cannot name a run", name),
              "use 1 to 63 letters, digits, '.', '_' or '-'");
}

// When a process started, in clock ticks since boot; nothing where it is gone or a zombie.
std::optional<int64_t> start_ticks(int64_t pid) {
  std::ifstream file(fmt::format("/proc/{}/stat", pid));
  std::string line;
  if (!std::getline(file, line)) return std::nullopt;
  // The second field is the program's name in parentheses and may hold anything, ')' included.
  const size_t name_end = line.rfind(')');
  if (name_end == std::string::npos) return std::nullopt;
  std::istringstream fields(line.substr(name_end + 1));
  std::string field;
  for (int number = 3; number < 22 && fields >> field; ++number) {
    if (number == 3 && (field == "Z" || field == "X")) return std::nullopt;
  }
  int64_t ticks = 0;
  if (!(fields >> ticks)) return std::nullopt;
  return ticks;
}

// Of another container nothing can be known: it counts as alive, so that nobody removes its board.
bool launcher_alive(const Header& header) {
  if (header.pid_namespace != pid_namespace()) return true;
  return start_ticks(header.launcher_pid) == header.launcher_start_ticks;
}

[[noreturn]] void fail_exists(const std::string& path) {
  std::string who;
  std::string help = "give the run another name";
  try {
    const BoardInfo info = Board::open(path).info();
    who = fmt::format("it belongs to run \"{}\", process {}, which {}", info.run_name,
                      info.launcher_pid, info.launcher_alive ? "is running" : "has ended");
    if (!info.launcher_alive) help = fmt::format("remove it with rm {}, or {}", path, help);
  } catch (const Error& error) {
    who = error.message();
  }
  board_error(fmt::format("a board exists already at {}", path), help, {who});
}

// Reserves every byte: a write to a hole in a full tmpfs would be a SIGBUS.
void reserve(const std::string& path, int fd, int64_t bytes) {
  int error = 0;
  do {
    error = ::posix_fallocate(fd, 0, bytes);
  } while (error == EINTR);
  if (error == 0) return;
  const std::string folder = std::filesystem::path(path).parent_path().string();
  struct statvfs space {};
  ::fstatvfs(fd, &space);
  board_error(
      fmt::format("cannot reserve {} for the board {}: {}", format_bytes(bytes), path,
                  std::strerror(error)),
      limit_help(error, fmt::format("remove old files from {0}, or make it larger: mount -o "
                                    "remount,size=1G {0} (docker run --shm-size=1g)",
                                    folder)),
      {fmt::format("need {}, have {}", format_bytes(bytes),
                   format_bytes(static_cast<int64_t>(space.f_bavail * space.f_frsize)))});
}

DeviceStatus read_device(const DevicePage& page) {
  const DeviceIdentity identity = page.identity.load();
  return {.name = identity.name.str(),
          .physical = identity.physical.str(),
          .capacity_bytes = identity.capacity_bytes,
          .live_bytes = page.live_bytes.load(std::memory_order_relaxed),
          .peak_bytes = page.peak_bytes.load(std::memory_order_relaxed),
          .busy_ns = page.busy_ns.load(std::memory_order_relaxed)};
}

CollectiveStatus read_collective(const RankPage& page) {
  // The finish first: every finish read then has its own start, or a later one, in the next load.
  const CollectiveFinish finish = page.collective_finish.load();
  const CollectiveStart start = page.collective_start.load();
  CollectiveStatus status;
  if (start.sequence == 0) return status;
  status.sequence = start.sequence;
  status.operation = start.operation.str();
  status.bytes = start.bytes;
  status.bucket = start.bucket;
  status.started_ns = start.started_ns;
  status.finished_ns = finish.sequence == start.sequence ? finish.finished_ns : 0;
  return status;
}

std::optional<FirstError> read_error(const RankPage& page) {
  const auto state = static_cast<ErrorState>(page.error_state.load(std::memory_order_acquire));
  if (state == ErrorState::kNone) return std::nullopt;
  if (state == ErrorState::kWriting) {
    return FirstError{.message =
                          "an error was being written; where the process has died it is lost"};
  }
  const ErrorText error = page.error.load();
  return FirstError{static_cast<Code>(error.code), error.at_ns, static_cast<int>(error.blamed_rank),
                    error.message.str()};
}

}  // namespace

std::string_view phase_name(Phase phase) {
  return kPhaseNames.at(static_cast<size_t>(phase));
}

Board Board::create(const std::string& path, int ranks, const std::string& run_name) {
  check_run_name(run_name);
  if (ranks < 1)
    board_error(fmt::format("a board needs at least one rank, not {}", ranks),
                "ask for one or more");
  const Descriptor file(
      ::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
  if (file.get() < 0 && errno == EEXIST) fail_exists(path);
  if (file.get() < 0) {
    const int reason = errno;
    board_error(fmt::format("cannot make the board {}: {}", path, std::strerror(reason)),
                limit_help(reason, "`lockstep doctor` checks shared memory"));
  }
  auto removal = std::make_shared<const FileRemoval>(path);
  const int64_t bytes = file_bytes_for(ranks);
  reserve(path, file.get(), bytes);
  auto mapping = BoardMapping::map(path, file.get(), bytes, ranks, Access::kWrite);
  for (int rank = 0; rank < ranks; ++rank) {
    auto* page = new (mapping->page_address(rank)) RankPage{};
    page->loss.store(std::numeric_limits<double>::quiet_NaN(), std::memory_order_relaxed);
  }
  auto* header = new (mapping->header_address()) Header{};
  header->layout_version = kLayoutVersion;
  header->ranks = static_cast<uint32_t>(ranks);
  header->page_bytes = kPageBytes;
  header->launcher_pid = ::getpid();
  header->launcher_start_ticks = start_ticks(::getpid()).value_or(0);
  header->pid_namespace = pid_namespace();
  header->started_ns = monotonic_ns();
  header->run_name = Text<64>::of(run_name);
  header->magic.store(kMagic, std::memory_order_release);
  return Board(std::move(mapping), std::move(removal));
}

Board Board::open(const std::string& path) {
  return Board(open_mapping(path, Access::kRead), nullptr);
}

std::string Board::default_path(const std::string& run_name) {
  check_run_name(run_name);
  return fmt::format("{}/{}{}", kFolder, file_prefix(), run_name);
}

const std::string& Board::path() const {
  return mapping_->path();
}

int Board::ranks() const {
  return mapping_->ranks();
}

BoardInfo Board::info() const {
  const Header& header = mapping_->header();
  return {.run_name = header.run_name.str(),
          .ranks = ranks(),
          .launcher_pid = static_cast<pid_t>(header.launcher_pid),
          .launcher_alive = launcher_alive(header),
          .started_ns = header.started_ns};
}

RankStatus Board::status(int rank) const {
  mapping_->check_rank(rank);
  const RankPage& page = mapping_->page(rank);
  const uint32_t phase = page.phase.load(std::memory_order_acquire);
  const int64_t devices = page.device_count.load(std::memory_order_acquire);
  if (phase >= kPhaseNames.size() || devices < 0 || devices > kBoardDevices) {
    board_error(fmt::format("rank {}'s page of the board {} is damaged: phase {}, {} devices", rank,
                            path(), phase, devices),
                "a program wrote where it should not have; start the run again");
  }
  RankStatus status;
  status.rank = rank;
  status.pid = static_cast<pid_t>(page.pid.load(std::memory_order_acquire));
  status.phase = static_cast<Phase>(phase);
  status.program = page.program.load().str();
  status.started_ns = page.started_ns.load(std::memory_order_relaxed);
  status.updated_ns = page.updated_ns.load(std::memory_order_relaxed);
  status.step = page.step.load(std::memory_order_relaxed);
  status.loss = page.loss.load(std::memory_order_relaxed);
  status.collective = read_collective(page);
  status.busy_ns = page.clocks_ns[0].load(std::memory_order_relaxed);
  status.communicating_ns = page.clocks_ns[1].load(std::memory_order_relaxed);
  status.idle_ns = page.clocks_ns[2].load(std::memory_order_relaxed);
  for (int64_t index = 0; index < devices; ++index) {
    status.devices.push_back(read_device(page.devices[static_cast<size_t>(index)]));
  }
  status.error = read_error(page);
  return status;
}

BoardPage Board::page(int rank) const {
  return {mapping_, rank};
}

std::vector<BoardEntry> list_boards() {
  std::vector<BoardEntry> entries;
  std::error_code ignored;  // no /dev/shm: no boards
  for (const auto& file : std::filesystem::directory_iterator(kFolder, ignored)) {
    if (!file.path().filename().string().starts_with(file_prefix())) continue;
    BoardEntry entry;
    entry.path = file.path().string();
    try {
      entry.info = Board::open(entry.path).info();
      entry.state = entry.info.launcher_alive ? BoardState::kLive : BoardState::kStale;
    } catch (const Error& error) {
      entry.state = BoardState::kUnusable;
      entry.problem = error.message();
    }
    entries.push_back(std::move(entry));
  }
  std::sort(entries.begin(), entries.end(),
            [](const auto& a, const auto& b) { return a.path < b.path; });
  return entries;
}

int remove_stale_boards() {
  int removed = 0;
  for (const auto& entry : list_boards()) {
    if (entry.state == BoardState::kStale && ::unlink(entry.path.c_str()) == 0) ++removed;
  }
  return removed;
}

}  // namespace lockstep
