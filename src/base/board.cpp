#include "lockstep/detail/board.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <mutex>
#include <new>

#include "base/board_layout.hpp"
#include "base/file.hpp"
#include "base/process.hpp"
#include "lockstep/clock.hpp"
#include "lockstep/units.hpp"

namespace lockstep {
namespace {

[[noreturn]] void board_error(const std::string& message, const std::string& help,
                              std::vector<std::string> notes = {}) {
  throw Error(Code::kBoard, message, help, std::move(notes));
}

}  // namespace

/// Removes the file when its creator is done with it. A forked child's copy does not.
class FileRemoval {
 public:
  explicit FileRemoval(std::string path) : path_(std::move(path)), creator_pid_(::getpid()) {}
  ~FileRemoval() {
    if (creator_pid_ == ::getpid()) ::unlink(path_.c_str());
  }
  FileRemoval(const FileRemoval&) = delete;
  FileRemoval& operator=(const FileRemoval&) = delete;

 private:
  std::string path_;
  pid_t creator_pid_;
};

/// A mapped board file, shared by a Board and its pages.
class BoardMapping {
 public:
  enum class Access { kRead, kWrite };

  BoardMapping(std::string path, void* memory, int64_t bytes, int ranks, Access access)
      : path_(std::move(path)), memory_(memory), bytes_(bytes), ranks_(ranks), access_(access) {}
  ~BoardMapping() { ::munmap(memory_, static_cast<size_t>(bytes_)); }
  BoardMapping(const BoardMapping&) = delete;
  BoardMapping& operator=(const BoardMapping&) = delete;

  /// Maps an existing board. Throws if it is truncated, of another user or version.
  static std::shared_ptr<const BoardMapping> open(const std::string& path, Access access);

  /// Maps an open file. `ranks` must match the file's size.
  static std::shared_ptr<const BoardMapping> map(const std::string& path, int fd, int64_t bytes,
                                                 int ranks, Access access) {
    const int protection = access == Access::kWrite ? PROT_READ | PROT_WRITE : PROT_READ;
    void* memory = ::mmap(nullptr, static_cast<size_t>(bytes), protection, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED) {
      board_error(fmt::format("cannot map the board {}: {}", path, std::strerror(errno)),
                  "check the memory limits (ulimit -v)");
    }
    return std::make_shared<const BoardMapping>(path, memory, bytes, ranks, access);
  }

  const std::string& path() const { return path_; }
  int ranks() const { return ranks_; }
  Access access() const { return access_; }

  void* header_address() const { return memory_; }
  BoardHeader& header() const { return *std::launder(static_cast<BoardHeader*>(memory_)); }

  void* page_address(int rank) const {
    return static_cast<std::byte*>(memory_) + kBoardHeaderBytes + rank * kBoardPageBytes;
  }
  RankPage& page(int rank) const {
    return *std::launder(static_cast<RankPage*>(page_address(rank)));
  }

  /// Guards values of several words: threads of a rank may communicate at the same time.
  std::mutex& writing() const { return writing_; }

  void check_rank(int rank) const {
    if (rank >= 0 && rank < ranks_) return;
    board_error(fmt::format("the board {} has no rank {}", path_, rank),
                fmt::format("its ranks are 0 to {}", ranks_ - 1));
  }

 private:
  std::string path_;
  void* memory_;
  int64_t bytes_;
  int ranks_;  // a copy: the number in the file may change after it was checked
  Access access_;
  mutable std::mutex writing_;
};

namespace {

int64_t file_bytes_for(int64_t ranks) {
  return kBoardHeaderBytes + ranks * kBoardPageBytes;
}

void check_header(const std::string& path, const BoardHeader& header, int64_t file_bytes) {
  if (header.magic.load(std::memory_order_acquire) != kBoardMagic) {
    board_error(fmt::format("{} is not a board, or is still being made", path),
                "name the board of a running job");
  }
  if (header.layout_version != kBoardLayoutVersion || header.page_bytes != kBoardPageBytes) {
    board_error(
        fmt::format("the board {} has layout {} with pages of {} bytes; this program reads layout "
                    "{} with {}",
                    path, header.layout_version, header.page_bytes, kBoardLayoutVersion,
                    kBoardPageBytes),
        "use the same version of lockstep for the launcher, the program and `lockstep top`");
  }
  if (header.ranks < 1 || file_bytes_for(header.ranks) != file_bytes) {
    board_error(fmt::format("the board {} has {} bytes, but {} ranks need {}", path, file_bytes,
                            header.ranks, file_bytes_for(header.ranks)),
                "it is damaged: remove it and start the run again");
  }
}

}  // namespace

std::shared_ptr<const BoardMapping> BoardMapping::open(const std::string& path, Access access) {
  const int mode = access == Access::kWrite ? O_RDWR : O_RDONLY;
  const Descriptor file(::open(path.c_str(), mode | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  struct stat status {};
  if (file.get() < 0 || ::fstat(file.get(), &status) != 0) {
    const int reason = errno;
    board_error(fmt::format("cannot open the board {}: {}", path, std::strerror(reason)),
                limit_help(reason, reason == ENOENT ? "the run has ended, or was never started"
                                                    : "name the board of a running job"));
  }
  if (!S_ISREG(status.st_mode))
    board_error(fmt::format("{} is not a board: not a regular file", path), "name a board");
  if (status.st_uid != ::geteuid()) {
    board_error(fmt::format("the board {} belongs to user {}, this process runs as {}", path,
                            status.st_uid, ::geteuid()),
                "open only your own runs");
  }
  if (status.st_size < kBoardHeaderBytes) {
    board_error(fmt::format("{} has {} bytes; a board has at least {}", path, status.st_size,
                            kBoardHeaderBytes),
                "it is damaged or still being made: remove it if no run uses it");
  }
  const int64_t ranks = (status.st_size - kBoardHeaderBytes) / kBoardPageBytes;
  auto mapping = map(path, file.get(), status.st_size, static_cast<int>(ranks), access);
  check_header(path, mapping->header(), status.st_size);
  return mapping;
}

namespace {

constexpr const char* kBoardFolder = "/dev/shm";
constexpr std::string_view kNameCharacters =
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-";
constexpr std::array<std::string_view, 4> kPhaseNames = {"starting", "training", "finished",
                                                         "failed"};

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

// When a process started, in clock ticks since boot; nothing if it has ended.
std::optional<int64_t> start_ticks(int64_t pid) {
  const auto stat = read_process_stat(static_cast<pid_t>(pid));
  if (!stat || stat->has_ended()) return std::nullopt;
  return stat->start_ticks;
}

// A launcher in another container counts as alive, so that nobody removes its board.
bool launcher_alive(const BoardHeader& header) {
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

// Reserves every byte: a write to a hole in a full tmpfs would raise SIGBUS.
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

// A time or a counter from a page, which any process of this user may have written: readers may
// subtract and add a few of them.
int64_t bounded(int64_t value) {
  return std::clamp<int64_t>(value, 0, int64_t{1} << 60);
}

int64_t bounded(const std::atomic<int64_t>& value) {
  return bounded(value.load(std::memory_order_relaxed));
}

DeviceStatus read_device(const DevicePage& page) {
  const DeviceIdentity identity = page.identity.load();
  return {.name = identity.name.str(),
          .physical = identity.physical.str(),
          .capacity_bytes = identity.capacity_bytes,
          .live_bytes = page.live_bytes.load(std::memory_order_relaxed),
          .peak_bytes = page.peak_bytes.load(std::memory_order_relaxed),
          .busy_ns = bounded(page.busy_ns)};
}

// The finish was loaded first, so that the start belongs to it or to a later collective.
CollectiveStatus collective_status(const CollectiveFinish& finish, const CollectiveStart& start) {
  CollectiveStatus status;
  if (start.sequence == 0) return status;
  status.sequence = start.sequence;
  status.operation = start.operation.str();
  status.bytes = start.bytes;
  status.bucket = start.bucket;
  status.started_ns = bounded(start.started_ns);
  status.finished_ns = finish.sequence == start.sequence ? bounded(finish.finished_ns) : 0;
  return status;
}

PastCollective& past_of(RankPage& page, int64_t sequence) {
  return page.past[static_cast<uint64_t>(sequence) % kBoardCollectives];
}

std::optional<FirstError> read_error(const RankPage& page) {
  const auto state = static_cast<ErrorState>(page.error_state.load(std::memory_order_acquire));
  if (state == ErrorState::kNone) return std::nullopt;
  if (state == ErrorState::kWriting) {
    return FirstError{.message = "an error was being written; it is lost if the process has died"};
  }
  const ErrorText error = page.error.load();
  return FirstError{static_cast<Code>(error.code), bounded(error.at_ns),
                    static_cast<int>(error.blamed_rank), error.message.str()};
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
  auto mapping = BoardMapping::map(path, file.get(), bytes, ranks, BoardMapping::Access::kWrite);
  for (int rank = 0; rank < ranks; ++rank) {
    auto* page = new (mapping->page_address(rank)) RankPage{};
    page->loss.store(std::numeric_limits<double>::quiet_NaN(), std::memory_order_relaxed);
  }
  auto* header = new (mapping->header_address()) BoardHeader{};
  header->layout_version = kBoardLayoutVersion;
  header->ranks = static_cast<uint32_t>(ranks);
  header->page_bytes = kBoardPageBytes;
  header->launcher_pid = ::getpid();
  header->launcher_start_ticks = start_ticks(::getpid()).value_or(0);
  header->pid_namespace = pid_namespace();
  header->started_ns = monotonic_ns();
  header->run_name = BoardText<64>::of(run_name);
  header->magic.store(kBoardMagic, std::memory_order_release);
  return Board(std::move(mapping), std::move(removal));
}

Board Board::open(const std::string& path) {
  return Board(BoardMapping::open(path, BoardMapping::Access::kRead), nullptr);
}

std::string Board::default_path(const std::string& run_name) {
  check_run_name(run_name);
  return fmt::format("{}/{}{}", kBoardFolder, file_prefix(), run_name);
}

const std::string& Board::path() const {
  return mapping_->path();
}

int Board::ranks() const {
  return mapping_->ranks();
}

BoardInfo Board::info() const {
  const BoardHeader& header = mapping_->header();
  return {.run_name = header.run_name.str(),
          .ranks = ranks(),
          .launcher_pid = static_cast<pid_t>(header.launcher_pid),
          .launcher_alive = launcher_alive(header),
          .started_ns = bounded(header.started_ns)};
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
  status.versions = page.versions.load().str();
  status.started_ns = bounded(page.started_ns);
  status.updated_ns = bounded(page.updated_ns);
  status.step = bounded(page.step);
  status.loss = page.loss.load(std::memory_order_relaxed);
  const CollectiveFinish finish = page.collective_finish.load();
  status.collective = collective_status(finish, page.collective_start.load());
  status.busy_ns = bounded(page.clocks_ns[0]);
  status.communicating_ns = bounded(page.clocks_ns[1]);
  status.idle_ns = bounded(page.clocks_ns[2]);
  for (int64_t index = 0; index < devices; ++index) {
    status.devices.push_back(read_device(page.devices[static_cast<size_t>(index)]));
  }
  status.error = read_error(page);
  return status;
}

std::vector<CollectiveStatus> Board::past_collectives(int rank) const {
  mapping_->check_rank(rank);
  std::vector<CollectiveStatus> all;
  for (const PastCollective& past : mapping_->page(rank).past) {
    const CollectiveFinish finish = past.finish.load();
    all.push_back(collective_status(finish, past.start.load()));
  }
  std::erase_if(all, [](const CollectiveStatus& each) { return each.sequence == 0; });
  std::sort(all.begin(), all.end(), [](const CollectiveStatus& a, const CollectiveStatus& b) {
    return a.started_ns < b.started_ns;
  });
  return all;
}

BoardPage Board::page(int rank) const {
  return {mapping_, rank};
}

std::vector<BoardEntry> list_boards() {
  std::vector<BoardEntry> entries;
  std::error_code ignored;  // without /dev/shm there are no boards
  for (const auto& file : std::filesystem::directory_iterator(kBoardFolder, ignored)) {
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

namespace {

void touch(RankPage& page) {
  page.updated_ns.store(monotonic_ns(), std::memory_order_relaxed);
}

DevicePage& device_page(RankPage& page, int index) {
  if (index < 0 || index >= kBoardDevices) {
    board_error(fmt::format("the board has no room for logical device {}", index),
                fmt::format("devices are numbered 0 to {}", kBoardDevices - 1));
  }
  return page.devices[static_cast<size_t>(index)];
}

void raise_to(std::atomic<int64_t>& highest, int64_t value) {
  int64_t seen = highest.load(std::memory_order_relaxed);
  while (seen < value && !highest.compare_exchange_weak(seen, value, std::memory_order_release)) {
  }
}

}  // namespace

BoardPage::BoardPage(std::shared_ptr<const BoardMapping> mapping, int rank)
    : mapping_(std::move(mapping)), rank_(rank) {
  mapping_->check_rank(rank);
  if (mapping_->access() != BoardMapping::Access::kWrite) {
    board_error(fmt::format("the board {} is open for reading only", mapping_->path()),
                "ranks take their page with BoardPage::attach");
  }
}

BoardPage BoardPage::attach(const std::string& path, int rank) {
  return {BoardMapping::open(path, BoardMapping::Access::kWrite), rank};
}

void BoardPage::start(std::string_view program) {
  RankPage& page = mapping_->page(rank_);
  const int64_t before = page.pid.exchange(::getpid(), std::memory_order_acq_rel);
  if (before != 0 && before != ::getpid()) {
    // The previous process of this rank may have died in the middle of a write.
    page.program.release();
    page.versions.release();
    page.collective_start.release();
    page.collective_finish.release();
    for (auto& past : page.past) {
      past.start.release();
      past.finish.release();
    }
    for (auto& device : page.devices) device.identity.release();
  }
  page.program.store(BoardText<64>::of(program));
  page.started_ns.store(monotonic_ns(), std::memory_order_relaxed);
  set_phase(Phase::kStarting);
}

void BoardPage::set_versions(std::string_view versions) {
  mapping_->page(rank_).versions.store(BoardText<128>::of(versions));
}

void BoardPage::set_phase(Phase phase) {
  RankPage& page = mapping_->page(rank_);
  page.phase.store(static_cast<uint32_t>(phase), std::memory_order_release);
  touch(page);
}

void BoardPage::set_step(int64_t step) {
  RankPage& page = mapping_->page(rank_);
  page.step.store(step, std::memory_order_relaxed);
  touch(page);
}

void BoardPage::set_loss(double loss) {
  RankPage& page = mapping_->page(rank_);
  page.loss.store(loss, std::memory_order_relaxed);
  touch(page);
}

void BoardPage::add_clock(Activity activity, int64_t nanoseconds) {
  auto& clock = mapping_->page(rank_).clocks_ns.at(static_cast<size_t>(activity));
  clock.fetch_add(nanoseconds, std::memory_order_relaxed);
}

void BoardPage::set_device(int index, const DeviceStatus& status) {
  RankPage& page = mapping_->page(rank_);
  device_page(page, index)
      .identity.store({.name = BoardText<32>::of(status.name),
                       .physical = BoardText<64>::of(status.physical),
                       .capacity_bytes = status.capacity_bytes});
  update_device(index, status.live_bytes, status.peak_bytes, status.busy_ns);
  raise_to(page.device_count, index + 1);
}

void BoardPage::update_device(int index, int64_t live_bytes, int64_t peak_bytes, int64_t busy_ns) {
  RankPage& page = mapping_->page(rank_);
  DevicePage& device = device_page(page, index);
  device.live_bytes.store(live_bytes, std::memory_order_relaxed);
  device.peak_bytes.store(peak_bytes, std::memory_order_relaxed);
  device.busy_ns.store(busy_ns, std::memory_order_relaxed);
  touch(page);
}

void BoardPage::begin_collective(int64_t sequence, std::string_view operation, int64_t bytes,
                                 int64_t bucket) {
  RankPage& page = mapping_->page(rank_);
  touch(page);
  const std::lock_guard lock(mapping_->writing());
  const CollectiveStart start{.sequence = sequence,
                              .operation = BoardText<24>::of(operation),
                              .bytes = bytes,
                              .bucket = bucket,
                              .started_ns = monotonic_ns()};
  page.collective_start.store(start);
  past_of(page, sequence).start.store(start);
}

void BoardPage::finish_collective(int64_t sequence) {
  RankPage& page = mapping_->page(rank_);
  touch(page);
  const std::lock_guard lock(mapping_->writing());
  const CollectiveFinish finish{.sequence = sequence, .finished_ns = monotonic_ns()};
  page.collective_finish.store(finish);
  past_of(page, sequence).finish.store(finish);
}

bool BoardPage::record_first_error(Code code, std::string_view message, int blamed_rank) {
  RankPage& page = mapping_->page(rank_);
  auto none = static_cast<uint32_t>(ErrorState::kNone);
  const auto writing = static_cast<uint32_t>(ErrorState::kWriting);
  if (!page.error_state.compare_exchange_strong(none, writing)) return false;
  touch(page);
  page.error.store({.code = static_cast<int64_t>(code),
                    .at_ns = monotonic_ns(),
                    .blamed_rank = blamed_rank,
                    .message = BoardText<496>::of(message)});
  page.error_state.store(static_cast<uint32_t>(ErrorState::kComplete), std::memory_order_release);
  set_phase(Phase::kFailed);
  return true;
}

}  // namespace lockstep
