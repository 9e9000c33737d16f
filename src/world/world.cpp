#include "lockstep/world.hpp"

#include <errno.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>

#include "base/board_layout.hpp"
#include "base/running_clock.hpp"
#include "base/standard_streams.hpp"
#include "comm/backends.hpp"
#include "launch/token.hpp"
#include "lockstep/error.hpp"
#include "world/comm_state.hpp"
#include "world/gpu_backends.hpp"
#include "world/world_store.hpp"

namespace lockstep {
namespace {

// `lockstep run` gives its ranks a random session. Ranks that were started otherwise derive theirs
// from public values, and keep the names of their sockets from other users by themselves.
RankEnvironment read_environment() {
  RankEnvironment environment = RankEnvironment::from_env();
  const char* given = std::getenv("LOCKSTEP_SESSION");
  const bool derived = given == nullptr || *given == '\0';
  if (derived && environment.one_host() && environment.world_size > 1) {
    environment.session = private_session(environment.session);
  }
  return environment;
}

std::chrono::milliseconds choose_timeout(const WorldOptions& options,
                                         const RankEnvironment& environment) {
  if (options.timeout) return *options.timeout;
  if (!environment.timeout_s) return kDefaultTimeout;
  return std::chrono::milliseconds(static_cast<int64_t>(*environment.timeout_s * 1e3));
}

std::string asked_backend(const WorldOptions& options, const RankEnvironment& environment) {
  const std::string name = options.backend == "auto" && !environment.backend.empty()
                               ? environment.backend
                               : options.backend;
  const std::vector<std::string> all = {"auto", "self", "shm", "gloo", "nccl", "ipc"};
  if (std::find(all.begin(), all.end(), name) != all.end()) return name;
  throw Error(Code::kBackend, fmt::format("there is no backend \"{}\"", name),
              "use auto, self, shm, gloo, nccl or ipc");
}

// The backend of the host's memory, over which those of GPUs stand.
std::string choose_host_backend(const std::string& asked, const RankEnvironment& environment) {
  if (asked == "auto" || names_gpu_backend(asked)) {
    if (environment.world_size == 1) return "self";
    return environment.one_host() ? "shm" : "gloo";
  }
  if (asked == "self" && environment.world_size > 1) {
    throw Error(
        Code::kBackend,
        fmt::format("backend self serves one rank, but there are {}", environment.world_size),
        "use auto, shm or gloo");
  }
  if (asked == "shm" && !environment.one_host()) {
    throw Error(
        Code::kBackend,
        fmt::format("backend shm serves the ranks of one host, but {} of {} are on others",
                    environment.world_size - environment.local_world_size, environment.world_size),
        "use auto or gloo");
  }
  return asked;
}

std::unique_ptr<Backend> make_host_backend(const std::string& name,
                                           const RankEnvironment& environment, int64_t deadline_ns,
                                           std::unique_ptr<WorldStore>& store) {
  if (name == "self") return make_self_backend();
  if (name == "shm") {
    return make_shm_backend({.session = environment.session,
                             .rank = environment.rank,
                             .size = environment.world_size,
                             .deadline_ns = deadline_ns});
  }
  store = std::make_unique<WorldStore>(environment, deadline_ns);
  return make_gloo_backend({.store = store->store(),
                            .rank = environment.rank,
                            .size = environment.world_size,
                            .address = store->own_address(),
                            .deadline_ns = deadline_ns});
}

// A host's backend that was asked for by name serves GPUs, too: through the host's memory.
std::unique_ptr<Backend> make_gpu_backend_for(const std::string& asked, const Device& device,
                                              Backend& host, bool one_host, int64_t deadline_ns) {
  const bool alone = asked == "auto" && host.size() == 1;
  if (alone || (asked != "auto" && !names_gpu_backend(asked))) return nullptr;
  return meet_on_gpus(asked, device, host, one_host, deadline_ns);
}

std::shared_ptr<CommState> connect(const std::string& asked, const RankEnvironment& environment,
                                   const Device& device, std::chrono::milliseconds timeout,
                                   std::unique_ptr<WorldStore>& store) {
  const int64_t deadline_ns =
      running_ns() + std::chrono::duration_cast<std::chrono::nanoseconds>(timeout).count();
  auto host =
      make_host_backend(choose_host_backend(asked, environment), environment, deadline_ns, store);
  auto gpu = make_gpu_backend_for(asked, device, *host, environment.one_host(), deadline_ns);
  return std::make_shared<CommState>(std::move(host), std::move(gpu), device.plan().gpu, timeout);
}

// Whether nobody has bound this process to some of the machine's cores.
bool may_use_all_cores(const Hardware& hardware) {
  return static_cast<int64_t>(hardware.cores.size()) == ::sysconf(_SC_NPROCESSORS_ONLN);
}

[[noreturn]] void fail_devices_missing(const std::string& spec, size_t slots, int ranks,
                                       int devices_per_rank) {
  const int needed = ranks * devices_per_rank;
  const std::string each =
      devices_per_rank == 1 ? "" : fmt::format(" with {} devices each", devices_per_rank);
  throw Error(
      Code::kDeviceMissing,
      fmt::format("--devices {} makes {} logical device{}, but this host has {} rank{}{}", spec,
                  slots, slots == 1 ? "" : "s", ranks, ranks == 1 ? "" : "s", each),
      spec.starts_with("cpu")
          ? fmt::format("use --devices cpu:{}, or leave it out", needed)
          : fmt::format("let them share a GPU with --devices cuda:0*{}, or start fewer", needed));
}

// Each rank's share of the host is the same plan's slots, so that launcher, ranks and tables agree.
std::vector<SlotPlan> choose_slots(const WorldOptions& options,
                                   const RankEnvironment& environment) {
  const int ranks = environment.local_world_size;
  const int each = options.devices_per_rank;
  if (each < 1) {
    throw Error(Code::kUsage, fmt::format("a rank cannot have {} devices", each),
                "set devices_per_rank to 1 or more");
  }
  Hardware hardware = detect_hardware();
  // OMP_NUM_THREADS counts a process's threads, which its devices divide.
  if (hardware.threads_per_device) {
    hardware.threads_per_device = std::max(1, *hardware.threads_per_device / each);
  }
  const std::string spec =
      options.devices.empty() ? default_devices(hardware, ranks * each) : options.devices;
  if (!environment.host_cores.empty()) {
    hardware.cores = parse_cores(environment.host_cores);
  } else if (spec.starts_with("cpu") && !may_use_all_cores(hardware)) {
    // mpirun or srun bound this rank already: the cores it has are its own.
    auto slots = plan_devices(fmt::format("cpu:{}", each), hardware);
    for (auto& slot : slots) slot.index = environment.local_rank + slot.index * ranks;
    return slots;
  }
  const auto host_slots = plan_devices(spec, hardware);
  if (host_slots.size() < static_cast<size_t>(ranks * each)) {
    fail_devices_missing(spec, host_slots.size(), ranks, each);
  }
  std::vector<SlotPlan> slots;
  for (int i = 0; i < each; ++i) {
    slots.push_back(host_slots[static_cast<size_t>(environment.local_rank + i * ranks)]);
  }
  return slots;
}

}  // namespace

struct World::State {
  RankEnvironment environment;
  Devices devices;
  std::optional<BoardPage> page;
  std::unique_ptr<WorldStore> store;  // outlives the communicator, whose parts may still need it
  std::optional<Communicator> comm;
};

World::World(std::unique_ptr<State> state) : state_(std::move(state)) {}
World::~World() = default;
World::World(World&&) noexcept = default;
World& World::operator=(World&&) noexcept = default;

World World::from_env(const WorldOptions& options) {
  reserve_standard_descriptors();  // before the first socket, in programs without run_program
  send_output_by_line();
  const auto environment = read_environment();
  const auto timeout = choose_timeout(options, environment);
  const auto asked = asked_backend(options, environment);
  if (names_gpu_backend(asked)) require_gpu_backend_built(asked);
  choose_host_backend(asked, environment);  // what cannot be is refused before anything starts
  const auto slots = choose_slots(options, environment);
  auto state = std::make_unique<State>(State{environment, Devices(slots), {}, nullptr, {}});
  if (!environment.board.empty()) {
    state->page = BoardPage::attach(environment.board, environment.local_rank);
    state->page->start(program_invocation_short_name);
  }
  // The launcher learns from it which ranks wait here for one that has ended and will never come.
  const bool shown = state->page && environment.world_size > 1;
  if (shown)
    state->page->begin_collective(board_layout::kRendezvousSequence, board_layout::kRendezvousName,
                                  0);
  state->comm.emplace(connect(asked, environment, state->devices[0], timeout, state->store));
  if (shown) state->page->finish_collective(board_layout::kRendezvousSequence);
  if (state->page) state->comm->show_on(*state->page);
  return World(std::move(state));
}

const RankEnvironment& World::environment() const {
  return state_->environment;
}

const Devices& World::devices() const {
  return state_->devices;
}

const Communicator& World::comm() const {
  return *state_->comm;
}

const std::optional<BoardPage>& World::board_page() const {
  return state_->page;
}

}  // namespace lockstep
