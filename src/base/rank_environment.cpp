#include "lockstep/rank_environment.hpp"

#include <fmt/format.h>
#include <openssl/evp.h>
#include <unistd.h>

#include <array>
#include <charconv>
#include <cstdlib>
#include <initializer_list>
#include <limits>
#include <vector>

#include "lockstep/clock.hpp"
#include "lockstep/error.hpp"
#include "slurm_lists.hpp"

namespace lockstep {
namespace {

constexpr const char* kStartHelp =
    "start the program with `lockstep run -n N`, or alone with none of these variables set";

[[noreturn]] void fail(const std::string& message, const std::string& help = kStartHelp) {
  throw Error(Code::kWorld, message, help);
}

// Variables of this process; an empty one counts as not set.
class Variables {
 public:
  explicit Variables(const RankEnvironment::Lookup& lookup) : lookup_(lookup) {}

  std::string text(const char* name) const {
    const char* value = lookup_(name);
    return value == nullptr ? "" : value;
  }

  bool has(const char* name) const { return !text(name).empty(); }

  std::optional<int> number(const char* name, int least, int most) const {
    const std::string value = text(name);
    if (value.empty()) return std::nullopt;
    int result = 0;
    const char* last = value.data() + value.size();
    const auto [end, error] = std::from_chars(value.data(), last, result);
    if (error != std::errc() || end != last) {
      fail(fmt::format("{}=\"{}\" is not a whole number", name, value));
    }
    if (result < least || result > most) {
      fail(fmt::format(
          "{}={} is out of range: it must be {}", name, value,
          most == kMost ? fmt::format("{} or more", least) : fmt::format("{} to {}", least, most)));
    }
    return result;
  }

  // Where a partner is set, this one must be too.
  int needed(const char* name, const char* partner, int least) const {
    const auto value = number(name, least, kMost);
    if (!value) fail(fmt::format("{} is set, but {} is not", partner, name));
    return *value;
  }

  static constexpr int kMost = std::numeric_limits<int>::max();

 private:
  const RankEnvironment::Lookup& lookup_;
};

// The names by which one launcher tells ranks their place.
struct Names {
  const char* rank;
  const char* world_size;
  const char* local_rank;
  const char* local_world_size;
};

constexpr Names kPlain = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"};
constexpr Names kOpenMpi = {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
                            "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"};
constexpr Names kPmi = {"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"};
constexpr Names kSlurm = {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID",
                          "SLURM_STEP_TASKS_PER_NODE"};

bool is_this_host(const std::string& address) {
  if (address.empty() || address == "localhost" || address == "::1" || address.starts_with("127."))
    return true;
  std::array<char, 256> name{};
  ::gethostname(name.data(), name.size() - 1);
  return address == name.data();
}

void check_place(const RankEnvironment& world, const Names& names) {
  if (world.rank >= world.world_size) {
    fail(fmt::format("{}={} does not exist in a world of {}={} ranks", names.rank, world.rank,
                     names.world_size, world.world_size));
  }
  if (world.local_world_size > world.world_size) {
    fail(fmt::format("{}={} ranks on this host are more than {}={} in the world",
                     names.local_world_size, world.local_world_size, names.world_size,
                     world.world_size));
  }
  if (world.local_rank >= world.local_world_size) {
    fail(fmt::format("{}={} does not exist on a host of {}={} ranks", names.local_rank,
                     world.local_rank, names.local_world_size, world.local_world_size));
  }
  if (world.one_host() && world.local_rank != world.rank) {
    fail(fmt::format("{}={} and {}={} differ, although all {} ranks are on this host", names.rank,
                     world.rank, names.local_rank, world.local_rank, world.world_size));
  }
}

// Hosts of equal size whose ranks follow each other, where nobody says which host this is.
int likely_node_rank(const RankEnvironment& world) {
  if (world.rank == world.local_rank) return 0;
  return std::max(1, (world.rank - world.local_rank) / world.local_world_size);
}

// Set by hand, a job of one host needs no LOCAL_RANK.
void read_local_place(const Variables& variables, const Names& names, RankEnvironment& world) {
  const auto local_rank = variables.number(names.local_rank, 0, Variables::kMost);
  const auto local_size = variables.number(names.local_world_size, 1, Variables::kMost);
  const bool one_host = is_this_host(world.master_addr);
  if ((!local_rank || !local_size) && !one_host && world.world_size > 1) {
    fail(fmt::format("{} is not set, and MASTER_ADDR={} is another host",
                     local_rank ? names.local_world_size : names.local_rank, world.master_addr),
         fmt::format("set {} and {} too, or start the program with `lockstep run`",
                     names.local_rank, names.local_world_size));
  }
  world.local_rank = local_rank.value_or(world.rank);
  world.local_world_size = local_size.value_or(world.world_size);
}

void read_plain(const Variables& variables, RankEnvironment& world) {
  world.launcher = variables.has("LOCKSTEP_RUN")          ? "lockstep"
                   : variables.has("TORCHELASTIC_RUN_ID") ? "torchrun"
                                                          : "variables";
  world.rank = variables.needed("RANK", "WORLD_SIZE", 0);
  world.world_size = variables.needed("WORLD_SIZE", "RANK", 1);
  read_local_place(variables, kPlain, world);
  check_place(world, kPlain);
  const auto group = variables.number("GROUP_RANK", 0, Variables::kMost);
  const auto node = variables.number("NODE_RANK", 0, Variables::kMost);
  world.node_rank = group.value_or(node.value_or(likely_node_rank(world)));
  world.restart_count =
      variables.number("TORCHELASTIC_RESTART_COUNT", 0, Variables::kMost).value_or(0);
}

// Open MPI and Hydra (MPICH, Intel) always tell the place on the host. OMPI_COMM_WORLD_NODE_RANK is
// not what its name says, and is not used.
void read_mpi(const Variables& variables, const Names& names, RankEnvironment& world) {
  world.launcher = "mpirun";
  world.rank = variables.needed(names.rank, names.world_size, 0);
  world.world_size = variables.needed(names.world_size, names.rank, 1);
  world.local_rank = variables.needed(names.local_rank, names.rank, 0);
  world.local_world_size = variables.needed(names.local_world_size, names.rank, 1);
  check_place(world, names);
  world.node_rank = likely_node_rank(world);
}

void read_slurm_step(const Variables& variables, RankEnvironment& world) {
  world.launcher = "srun";
  world.rank = variables.needed(kSlurm.rank, kSlurm.world_size, 0);
  world.world_size = variables.needed(kSlurm.world_size, kSlurm.rank, 1);
  world.local_rank = variables.needed(kSlurm.local_rank, kSlurm.rank, 0);
  world.node_rank = variables.needed("SLURM_NODEID", kSlurm.rank, 0);
  const std::string tasks = variables.text(kSlurm.local_world_size);
  if (tasks.empty())
    fail(fmt::format("SLURM_PROCID is set, but {} is not", kSlurm.local_world_size));
  const std::vector<int> counts = expand_slurm_counts(kSlurm.local_world_size, tasks);
  if (static_cast<size_t>(world.node_rank) >= counts.size()) {
    fail(fmt::format("SLURM_NODEID={} does not exist in {}={}", world.node_rank,
                     kSlurm.local_world_size, tasks));
  }
  world.local_world_size = counts[static_cast<size_t>(world.node_rank)];
  check_place(world, kSlurm);
  const std::string hosts = variables.text("SLURM_STEP_NODELIST");
  if (world.master_addr.empty() && !hosts.empty())
    world.master_addr = expand_slurm_hosts("SLURM_STEP_NODELIST", hosts).front();
  if (world.master_port == 0)
    world.master_port =
        slurm_port(variables.text("SLURM_JOB_ID"), variables.text("SLURM_STEP_ID"), 0);
}

std::string hash_to_hex(const std::string& text) {
  std::array<unsigned char, 32> digest{};
  size_t bytes = 0;
  if (!EVP_Q_digest(nullptr, "SHA256", nullptr, text.data(), text.size(), digest.data(), &bytes))
    throw Error(Code::kInternal, "OpenSSL cannot compute SHA-256",
                "check the installed OpenSSL 3 and its configuration");
  std::string hex;
  for (size_t i = 0; i < 16; ++i) hex += fmt::format("{:02x}", digest[i]);
  return hex;
}

// What all ranks of a job see alike, and no other job of this user does. Each launcher has its own
// name for a job; addresses tell jobs apart that were started by hand.
std::string derive_session(const Variables& variables, const RankEnvironment& world) {
  std::string identity = fmt::format("{}|{}|{}", ::geteuid(), world.launcher, world.world_size);
  const auto add = [&](std::initializer_list<const char*> names) {
    for (const char* name : names) identity += fmt::format("|{}", variables.text(name));
  };
  if (world.launcher == "mpirun") {
    add({"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID", "PMI_PORT"});
    // Hydra gives its jobs no name. The ranks of one host have one parent, though.
    const bool nameless = !variables.has("PMIX_NAMESPACE") && !variables.has("PMI_PORT");
    if (nameless && world.one_host()) identity += fmt::format("|{}", ::getppid());
  } else if (world.launcher == "srun") {
    add({"SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"});
  } else if (world.launcher == "none") {
    identity += fmt::format("|{}|{}", ::getpid(), monotonic_ns());
  }
  add({"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"});
  return hash_to_hex(identity);
}

void read_lockstep_variables(const Variables& variables, RankEnvironment& world) {
  world.board = variables.text("LOCKSTEP_BOARD");
  world.store = variables.text("LOCKSTEP_STORE");
  world.token = variables.text("LOCKSTEP_TOKEN");
  world.host_cores = variables.text("LOCKSTEP_HOST_CORES");
  world.backend = variables.text("LOCKSTEP_BACKEND");
  const std::string timeout = variables.text("LOCKSTEP_TIMEOUT_S");
  if (timeout.empty()) return;
  double seconds = 0;
  const char* last = timeout.data() + timeout.size();
  const auto [end, error] = std::from_chars(timeout.data(), last, seconds);
  // A year is as good as no limit, and does not overflow nanoseconds.
  if (error != std::errc() || end != last || !(seconds > 0) || seconds > 366 * 86'400.0) {
    fail(fmt::format("LOCKSTEP_TIMEOUT_S=\"{}\" is not a number of seconds above 0", timeout),
         "set it to seconds, such as 30 or 0.5, or unset it");
  }
  world.timeout_s = seconds;
}

}  // namespace

RankEnvironment RankEnvironment::from(const Lookup& lookup) {
  const Variables variables(lookup);
  RankEnvironment world;
  world.master_addr = variables.text("MASTER_ADDR");
  world.master_port = variables.number("MASTER_PORT", 1, 65535).value_or(0);
  // srun with PMI-2 sets PMI_RANK too, without the place on the host, which SLURM then tells.
  const bool in_step = variables.has(kSlurm.rank) && variables.has(kSlurm.world_size);
  const bool under_hydra =
      variables.has(kPmi.rank) && !(in_step && !variables.has(kPmi.local_rank));
  if (variables.has("RANK") || variables.has("WORLD_SIZE")) {
    read_plain(variables, world);
  } else if (variables.has(kOpenMpi.rank)) {
    read_mpi(variables, kOpenMpi, world);
  } else if (under_hydra) {
    read_mpi(variables, kPmi, world);
  } else if (in_step) {
    read_slurm_step(variables, world);
  }
  const std::string session = variables.text("LOCKSTEP_SESSION");
  world.session = session.empty() ? derive_session(variables, world) : session;
  read_lockstep_variables(variables, world);
  return world;
}

RankEnvironment RankEnvironment::from_env() {
  return from([](const char* name) -> const char* { return std::getenv(name); });
}

}  // namespace lockstep
