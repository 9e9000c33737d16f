#include "lockstep/world.hpp"

#include <errno.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/socket.h>
#include <unistd.h>
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "base/backends.hpp"
#include "base/counted.hpp"
#include "base/file.hpp"
#include "base/process.hpp"
#include "base/running_clock.hpp"
#include "base/stack.hpp"
#include "comm/backend.hpp"
#include "comm/network/transport_loader.hpp"
#include "comm/shm/shm_control.hpp"
#include "comm/two_level/host_map.hpp"
#include "device/hardware.hpp"
#include "lockstep/detail/board.hpp"
#include "lockstep/error.hpp"
#include "lockstep/rank_environment.hpp"
#include "net/connection.hpp"
#include "net/secret.hpp"
#include "net/socket.hpp"
#include "net/store.hpp"
#include "world/comm_state.hpp"
#include "world/gpu_backends.hpp"

namespace lockstep {

/// How the ranks of a job find each other before they have a communicator: the launcher's store;
/// where there is none, one that rank 0 serves itself, on a Unix socket on one host and at
/// MASTER_ADDR and MASTER_PORT on several; under torchrun, which holds that port, at one of rank
/// 0's own that it announces through torchrun's store. Under MPI nobody needs to know MASTER_ADDR.
class WorldStore {
 public:
  WorldStore(RankEnvironment environment, const BackendInfo& backend, int64_t deadline_ns);

  const std::shared_ptr<Store>& store() const { return store_; }

  /// This host's address as the other hosts reach it.
  const std::string& own_address() const { return own_address_; }

 private:
  void announce_by_module(const ModuleInfo& module, RankEnvironment& environment,
                          int64_t deadline_ns);

  std::optional<StoreServer> server_;  // rank 0's, where no launcher serves
  std::shared_ptr<Store> store_;
  std::string own_address_;
};

namespace {

// A server of N clients leaves at least as many files to its process, and rank 0 has more of its
// own.
constexpr int kFilesOfServer = 4;

// The local address of the route to a host: no packet is sent by connecting a datagram socket.
std::string address_towards(const std::string& host) {
  for (const ResolvedAddress& address : resolve({.host = host, .port = 9})) {
    const Socket socket(::socket(address.family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    const auto* bytes = reinterpret_cast<const sockaddr*>(address.bytes.data());
    if (socket &&
        ::connect(socket.get(), bytes, static_cast<socklen_t>(address.bytes.size())) == 0) {
      return own_address(socket);
    }
  }
  throw Error(Code::kRendezvous, fmt::format("there is no route to MASTER_ADDR {}", host),
              "check the network between the hosts");
}

// torchrun's agent serves MASTER_PORT itself, so that rank 0 cannot. It can announce another there.
int exchange_port_through_torchrun(const RankEnvironment& environment, int own_port,
                                   int64_t deadline_ns) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(environment.master_port);
  options.isServer = false;
  options.waitWorkers = false;
  options.timeout =
      std::chrono::milliseconds(std::max<int64_t>(1, (deadline_ns - running_ns()) / 1'000'000));
  const c10::intrusive_ptr<c10d::Store> agent =
      c10::make_intrusive<c10d::TCPStore>(environment.master_addr, options);
  const std::string key = "lockstep/" + environment.session;
  if (environment.rank == 0) {
    const std::string port = std::to_string(own_port);
    agent->set(key, std::vector<uint8_t>(port.begin(), port.end()));
    return own_port;
  }
  const std::vector<uint8_t> port = agent->get(key);
  return std::stoi(std::string(port.begin(), port.end()));
}

// mpirun does not tell its ranks where rank 0 is.
void require_master(const RankEnvironment& environment) {
  if (environment.one_host() || !environment.master_addr.empty()) return;
  throw Error(Code::kWorld, "the ranks are on several hosts, but the address of rank 0 is not set",
              "export MASTER_ADDR and MASTER_PORT to all ranks, e.g. mpirun -x MASTER_ADDR -x "
              "MASTER_PORT, or start them with `lockstep run --nnodes`");
}

// Gloo listens at a port for each pair of ranks, and each loopback address has only some 28,000.
std::string loopback_address(int rank) {
  constexpr int kRanksOfAddress = 16;
  constexpr int kLastOctets = 250;
  const int number = rank / kRanksOfAddress;
  return fmt::format("127.0.{}.{}", number / kLastOctets, 1 + number % kLastOctets);
}

// A host's own name often stands for 127.0.1.1 in its /etc/hosts, where other hosts cannot reach
// it. Only where MASTER_ADDR itself is a loopback address are all ranks on this machine.
std::string own_address_of(const RankEnvironment& environment) {
  require_master(environment);
  if (environment.one_host()) return loopback_address(environment.rank);
  std::string address = address_towards(environment.master_addr);
  const bool unreachable = is_loopback(address) && !is_loopback(environment.master_addr);
  return unreachable ? host_address() : address;
}

// A store that rank 0 serves: a rank that does not find it, or loses it, is rank 0's victim.
class StoreOfRank0 final : public Store {
 public:
  StoreOfRank0(const StoreAddress& address, int64_t deadline_ns) {
    try {
      store_ = connect_store(address, deadline_ns);
    } catch (const Error& error) {
      blame_rank_0(error);
    }
  }

  void set(std::string_view key, std::string_view value) override {
    try {
      store_->set(key, value);
    } catch (const ConnectionLost& error) {
      blame_rank_0(error);
    }
  }

  std::string get(std::string_view key, int64_t deadline_ns) override {
    try {
      return store_->get(key, deadline_ns);
    } catch (const ConnectionLost& error) {
      blame_rank_0(error);
    }
  }

 private:
  [[noreturn]] static void blame_rank_0(const Error& error) {
    throw RankError(Code::kRendezvous, 0, "the store of rank 0: " + error.message(), error.help());
  }

  std::shared_ptr<Store> store_;
};

}  // namespace

// MPI connects the ranks by itself, and tells the others where rank 0's store is. It may send this
// in plain text, so the store has a token of its own.
void WorldStore::announce_by_module(const ModuleInfo& module, RankEnvironment& environment,
                                    int64_t deadline_ns) {
  struct {
    char host[256] = {};
    char token[kTokenDigits + 1] = {};
    int32_t port = 0;
  } announced;
  if (environment.rank == 0) {
    host_address().copy(announced.host, sizeof announced.host - 1);
    const std::string token = make_token();
    server_.emplace(
        StoreAddress{.unix_name = {}, .host = announced.host, .port = 0, .token = token});
    announced.port = server_->port();
    token.copy(announced.token, token.size());
  }
  LockstepTransportMessage message{};
  if (load_transport(module).announce(&announced, sizeof announced, running_ns, deadline_ns,
                                      &message) != LOCKSTEP_TRANSPORT_OK) {
    throw Error(Code::kRendezvous,
                fmt::format("{} did not connect the ranks: {}", module.name, message.text),
                "see whether all ranks were started, and what their launcher reports");
  }
  environment.master_addr = announced.host;
  environment.store = fmt::format("{}:{}", announced.host, announced.port);
  environment.token = announced.token;
}

WorldStore::WorldStore(RankEnvironment environment, const BackendInfo& backend,
                       int64_t deadline_ns) {
  const bool nowhere = environment.master_addr.empty() && environment.store.empty();
  if (backend.has_own_launcher() && !environment.one_host() && nowhere) {
    announce_by_module(*backend.module, environment, deadline_ns);
  }
  own_address_ = own_address_of(environment);
  const bool serves = environment.rank == 0 && environment.store.empty();
  if (serves) make_room_for_files(kFilesOfServer * environment.world_size);
  StoreAddress address;
  if (!environment.store.empty()) {
    address = parse_store_address(environment.store, environment.token);
  } else if (environment.one_host()) {
    address.unix_name = "store-" + environment.session;
  } else {
    const bool under_torchrun = environment.launcher == "torchrun";
    address = {.unix_name = {},
               .host = environment.master_addr,
               .port = under_torchrun ? 0 : environment.master_port,
               .token = environment.token.empty() ? load_or_make_token() : environment.token};
    if (serves) server_.emplace(address);
    if (under_torchrun) {
      address.port =
          exchange_port_through_torchrun(environment, serves ? server_->port() : 0, deadline_ns);
    }
  }
  if (serves && !server_) server_.emplace(address);
  const auto connected = [&]() -> std::shared_ptr<Store> {
    const bool of_rank_0 = environment.store.empty() && !serves;
    if (of_rank_0) return std::make_shared<StoreOfRank0>(address, deadline_ns);
    return connect_store(address, deadline_ns);
  };
  store_ = make_prefix_store(connected(), environment.session + "/");
}

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
  if (name == "auto" || find_backend(name) != nullptr) return name;
  throw Error(Code::kBackend, fmt::format("there is no backend \"{}\"", name),
              "use " + alternatives(backend_names()));
}

// MPI begins only in processes that its own launcher started.
void require_own_launcher(const BackendInfo& backend, const RankEnvironment& environment) {
  if (environment.under_mpi || environment.world_size == 1) return;
  throw Error(Code::kBackend,
              fmt::format("backend {} serves ranks that its own launcher started, and {} started "
                          "these",
                          backend.name,
                          environment.launcher == "lockstep" ? "`lockstep run`"
                          : environment.launcher == "srun"   ? "srun without PMIx"
                                                             : environment.launcher),
              fmt::format("start them with {}, or {}; or use auto", backend.launchers[0],
                          backend.launchers[1]));
}

// The backend of the host's memory, on top of which GPU backends work.
std::string choose_host_backend(const std::string& asked, const RankEnvironment& environment) {
  if (asked == "auto" || names_gpu_backend(asked)) {
    if (environment.world_size == 1) return "self";
    return environment.one_host() && environment.world_size <= kShmRanks ? "shm" : "two_level";
  }
  const BackendInfo& backend = *find_backend(asked);
  if (backend.has_own_launcher()) require_own_launcher(backend, environment);
  if (backend.one_rank && environment.world_size > 1) {
    throw Error(
        Code::kBackend,
        fmt::format("backend {} serves one rank, but there are {}", asked, environment.world_size),
        "use auto, shm or gloo");
  }
  if (backend.one_host && !environment.one_host()) {
    throw Error(
        Code::kBackend,
        fmt::format("backend {} serves the ranks of one host, but {} of {} are on others", asked,
                    environment.world_size - environment.local_world_size, environment.world_size),
        "use auto, two_level or gloo");
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
  store = std::make_unique<WorldStore>(environment, *find_backend(name), deadline_ns);
  const NetworkOptions options{.store = store->store(),
                               .rank = environment.rank,
                               .size = environment.world_size,
                               .address = store->own_address(),
                               .deadline_ns = deadline_ns};
  if (name == "two_level") {
    return make_two_level_backend({.network = options, .host = host_identity(environment)});
  }
  return make_network_backend(name, options);
}

// A host backend that was asked for by name serves GPUs, too, through the host's memory.
std::unique_ptr<Backend> make_gpu_backend_for(const std::string& asked, const Device& device,
                                              Backend& host, bool one_host, int64_t deadline_ns) {
  const bool alone = asked == "auto" && host.size() == 1;
  if (alone || (asked != "auto" && !names_gpu_backend(asked))) return nullptr;
  return rendezvous_on_gpus(asked, device, host, one_host, deadline_ns);
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

// Whether this process may use all of the machine's cores.
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
      fmt::format("--devices {} makes {}, but this host has {}{}", spec,
                  counted(slots, "logical device"), counted(ranks, "rank"), each),
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

// What the launcher's crash bundle tells of this rank.
std::string versions_text() {
  std::vector<std::string> texts;
  for (const auto& [library, version] : library_versions())
    texts.push_back(library + " " + version);
  return fmt::format("{}", fmt::join(texts, ", "));
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
  choose_host_backend(asked, environment);  // the impossible is refused before anything starts
  const auto slots = choose_slots(options, environment);
  auto state = std::make_unique<State>(State{environment, Devices(slots), {}, nullptr, {}});
  if (!environment.board.empty()) {
    write_stack_on_request();
    state->page = BoardPage::attach(environment.board, environment.local_rank);
    state->page->start(program_invocation_short_name);
    state->page->set_versions(versions_text());
  }
  // The launcher learns from it which ranks wait here for one that has ended and will never come.
  const bool shown = state->page && environment.world_size > 1;
  if (shown) state->page->begin_collective(kRendezvousSequence, kRendezvousName, 0);
  state->comm.emplace(connect(asked, environment, state->devices[0], timeout, state->store));
  if (shown) state->page->finish_collective(kRendezvousSequence);
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
