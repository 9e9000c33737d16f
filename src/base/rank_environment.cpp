#include "lockstep/rank_environment.hpp"

#include <fmt/format.h>
#include <openssl/evp.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdlib>
#include <initializer_list>
#include <limits>
#include <optional>
#include <vector>

#include "base/slurm_lists.hpp"
#include "lockstep/clock.hpp"
#include "lockstep/error.hpp"

namespace lockstep {
namespace {

constexpr size_t kMostItems = 1 << 16;
constexpr size_t kLongestName = 255;  // as of a host in DNS
constexpr int kMostBrackets = 8;      // in one name

[[noreturn]] void fail_list(const std::string& variable, std::string_view text,
                            std::string_view form) {
  throw Error(Code::kWorld,
              fmt::format("{}=\"{}\" is not a list as SLURM writes it", variable, text),
              fmt::format("it should look like {}; unset it if SLURM did not set it", form));
}

std::optional<int> slurm_number(std::string_view digits) {
  int value = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  const bool whole = end == digits.data() + digits.size() && !digits.empty() && digits[0] != '-';
  return error == std::errc() && whole ? std::optional(value) : std::nullopt;
}

// Splits at commas that are not inside brackets.
std::vector<std::string_view> split_outside_brackets(std::string_view text) {
  std::vector<std::string_view> parts;
  size_t begin = 0;
  int depth = 0;
  for (size_t i = 0; i <= text.size(); ++i) {
    if (i == text.size() || (text[i] == ',' && depth == 0)) {
      parts.push_back(text.substr(begin, i - begin));
      begin = i + 1;
    } else if (text[i] == '[') {
      ++depth;
    } else if (text[i] == ']') {
      --depth;
    }
  }
  return parts;
}

// Expands "01-03,07", without its brackets, and keeps leading zeros. Nothing if the form is wrong.
std::optional<std::vector<std::string>> expand_ranges(std::string_view ranges) {
  std::vector<std::string> all;
  for (const std::string_view range : split_outside_brackets(ranges)) {
    const size_t dash = range.find('-');
    const std::string_view low = range.substr(0, dash);
    const std::string_view high = dash == std::string_view::npos ? low : range.substr(dash + 1);
    const auto first = slurm_number(low);
    const auto last = slurm_number(high);
    if (!first || !last || *last < *first || low.size() > kLongestName ||
        all.size() + static_cast<size_t>(*last - *first) >= kMostItems)
      return std::nullopt;
    // int64_t, since the last number may be the largest int.
    for (int64_t i = *first; i <= *last; ++i) all.push_back(fmt::format("{:0{}}", i, low.size()));
  }
  return all;
}

// Expands a name with any number of brackets: each bracket multiplies the names so far.
bool expand_name(std::string_view name, std::vector<std::string>& hosts) {
  if (std::count(name.begin(), name.end(), '[') > kMostBrackets) return false;
  std::vector<std::string> names = {""};
  for (size_t open = name.find('['); open != std::string_view::npos; open = name.find('[')) {
    const size_t close = name.find(']');
    if (close == std::string_view::npos || close < open) return false;
    const auto middle = expand_ranges(name.substr(open + 1, close - open - 1));
    if (!middle || middle->size() * names.size() > kMostItems) return false;
    std::vector<std::string> longer;
    longer.reserve(middle->size() * names.size());
    for (const auto& before : names) {
      for (const auto& part : *middle) {
        longer.push_back(before + std::string(name.substr(0, open)) + part);
        if (longer.back().size() > kLongestName) return false;
      }
    }
    names = std::move(longer);
    name.remove_prefix(close + 1);
  }
  if (name.find(']') != std::string_view::npos) return false;
  if (hosts.size() + names.size() > kMostItems) return false;
  for (const auto& before : names) {
    hosts.push_back(before + std::string(name));
    if (hosts.back().empty() || hosts.back().size() > kLongestName) return false;
  }
  return true;
}

constexpr const char* kStartHelp =
    "start the program with `lockstep run -n N`, or alone with none of these variables set";

[[noreturn]] void fail_world(const std::string& message, const std::string& help = kStartHelp) {
  throw Error(Code::kWorld, message, help);
}

// Environment variables. An empty one counts as not set.
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
      fail_world(fmt::format("{}=\"{}\" is not a whole number", name, value));
    }
    if (result < least || result > most) {
      fail_world(fmt::format(
          "{}={} is out of range: it must be {}", name, value,
          most == kMost ? fmt::format("{} or more", least) : fmt::format("{} to {}", least, most)));
    }
    return result;
  }

  // A variable that must be set because `partner` is.
  int needed(const char* name, const char* partner, int least) const {
    const auto value = number(name, least, kMost);
    if (!value) fail_world(fmt::format("{} is set, but {} is not", partner, name));
    return *value;
  }

  static constexpr int kMost = std::numeric_limits<int>::max();

 private:
  const RankEnvironment::Lookup& lookup_;
};

// The variables through which a launcher numbers its ranks.
struct Names {
  const char* rank;
  const char* world_size;
  const char* local_rank;
  const char* local_world_size;
};

constexpr Names kPlainNames = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"};
constexpr Names kOpenMpiNames = {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
                                 "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"};
constexpr Names kPmiNames = {"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"};
constexpr Names kSlurmNames = {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID",
                               "SLURM_STEP_TASKS_PER_NODE"};

bool is_this_host(const std::string& address) {
  if (address.empty() || address == "localhost" || address == "::1" || address.starts_with("127."))
    return true;
  std::array<char, 256> name{};
  ::gethostname(name.data(), name.size() - 1);
  return address == name.data();
}

void check_ranks(const RankEnvironment& world, const Names& names) {
  if (world.rank >= world.world_size) {
    fail_world(fmt::format("{}={} does not exist in a world of {}={} ranks", names.rank, world.rank,
                           names.world_size, world.world_size));
  }
  if (world.local_world_size > world.world_size) {
    fail_world(fmt::format("{}={} ranks on this host are more than {}={} in the world",
                           names.local_world_size, world.local_world_size, names.world_size,
                           world.world_size));
  }
  if (world.local_rank >= world.local_world_size) {
    fail_world(fmt::format("{}={} does not exist on a host of {}={} ranks", names.local_rank,
                           world.local_rank, names.local_world_size, world.local_world_size));
  }
  if (world.one_host() && world.local_rank != world.rank) {
    fail_world(fmt::format("{}={} and {}={} differ, although all {} ranks are on this host",
                           names.rank, world.rank, names.local_rank, world.local_rank,
                           world.world_size));
  }
}

// Guesses which host this is from hosts of equal size with consecutive ranks.
int likely_node_rank(const RankEnvironment& world) {
  if (world.rank == world.local_rank) return 0;
  return std::max(1, (world.rank - world.local_rank) / world.local_world_size);
}

// A job on one host whose variables are set by hand needs no LOCAL_RANK.
void read_local_rank(const Variables& variables, const Names& names, RankEnvironment& world) {
  const auto local_rank = variables.number(names.local_rank, 0, Variables::kMost);
  const auto local_size = variables.number(names.local_world_size, 1, Variables::kMost);
  const bool one_host = is_this_host(world.master_addr);
  if ((!local_rank || !local_size) && !one_host && world.world_size > 1) {
    fail_world(
        fmt::format("{} is not set, and MASTER_ADDR={} is another host",
                    local_rank ? names.local_world_size : names.local_rank, world.master_addr),
        fmt::format("set {} and {} too, or start the program with `lockstep run`", names.local_rank,
                    names.local_world_size));
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
  read_local_rank(variables, kPlainNames, world);
  check_ranks(world, kPlainNames);
  const auto group = variables.number("GROUP_RANK", 0, Variables::kMost);
  const auto node = variables.number("NODE_RANK", 0, Variables::kMost);
  world.node_rank = group.value_or(node.value_or(likely_node_rank(world)));
  world.restart_count =
      variables.number("TORCHELASTIC_RESTART_COUNT", 0, Variables::kMost).value_or(0);
}

// Open MPI and Hydra (MPICH, Intel) always set the local rank. OMPI_COMM_WORLD_NODE_RANK is not
// what its name says, and is not used.
void read_mpi(const Variables& variables, const Names& names, RankEnvironment& world) {
  world.launcher = "mpirun";
  world.rank = variables.needed(names.rank, names.world_size, 0);
  world.world_size = variables.needed(names.world_size, names.rank, 1);
  world.local_rank = variables.needed(names.local_rank, names.rank, 0);
  world.local_world_size = variables.needed(names.local_world_size, names.rank, 1);
  check_ranks(world, names);
  world.node_rank = likely_node_rank(world);
}

void read_slurm_step(const Variables& variables, RankEnvironment& world) {
  world.launcher = "srun";
  world.rank = variables.needed(kSlurmNames.rank, kSlurmNames.world_size, 0);
  world.world_size = variables.needed(kSlurmNames.world_size, kSlurmNames.rank, 1);
  world.local_rank = variables.needed(kSlurmNames.local_rank, kSlurmNames.rank, 0);
  world.node_rank = variables.needed("SLURM_NODEID", kSlurmNames.rank, 0);
  const std::string tasks = variables.text(kSlurmNames.local_world_size);
  if (tasks.empty())
    fail_world(fmt::format("SLURM_PROCID is set, but {} is not", kSlurmNames.local_world_size));
  const std::vector<int> counts = expand_slurm_counts(kSlurmNames.local_world_size, tasks);
  if (static_cast<size_t>(world.node_rank) >= counts.size()) {
    fail_world(fmt::format("SLURM_NODEID={} does not exist in {}={}", world.node_rank,
                           kSlurmNames.local_world_size, tasks));
  }
  world.local_world_size = counts[static_cast<size_t>(world.node_rank)];
  check_ranks(world, kSlurmNames);
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

// A text that is the same on all ranks of a job and differs between jobs of this user. Each
// launcher has its own name for a job; the master's address distinguishes jobs that were started by
// hand.
std::string derive_session(const Variables& variables, const RankEnvironment& world) {
  std::string identity = fmt::format("{}|{}|{}", ::geteuid(), world.launcher, world.world_size);
  const auto add = [&](std::initializer_list<const char*> names) {
    for (const char* name : names) identity += fmt::format("|{}", variables.text(name));
  };
  if (world.launcher == "mpirun") {
    add({"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID", "PMI_PORT"});
    // Hydra does not name its jobs, but the ranks of one host have the same parent.
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
  // A year is as good as no limit and does not overflow nanoseconds.
  if (error != std::errc() || end != last || !(seconds > 0) || seconds > 366 * 86'400.0) {
    fail_world(fmt::format("LOCKSTEP_TIMEOUT_S=\"{}\" is not a number of seconds above 0", timeout),
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
  // srun with PMI-2 sets PMI_RANK too, but not the local rank, which SLURM's variables then give.
  const bool in_step = variables.has(kSlurmNames.rank) && variables.has(kSlurmNames.world_size);
  const bool under_hydra =
      variables.has(kPmiNames.rank) && !(in_step && !variables.has(kPmiNames.local_rank));
  if (variables.has("RANK") || variables.has("WORLD_SIZE")) {
    read_plain(variables, world);
  } else if (variables.has(kOpenMpiNames.rank)) {
    read_mpi(variables, kOpenMpiNames, world);
  } else if (under_hydra) {
    read_mpi(variables, kPmiNames, world);
  } else if (in_step) {
    read_slurm_step(variables, world);
  }
  const std::string session = variables.text("LOCKSTEP_SESSION");
  world.session = session.empty() ? derive_session(variables, world) : session;
  read_lockstep_variables(variables, world);
  world.under_mpi = variables.has("PMIX_RANK") || variables.has(kOpenMpiNames.rank) ||
                    variables.has(kPmiNames.rank);
  return world;
}

RankEnvironment RankEnvironment::from_env() {
  return from([](const char* name) -> const char* { return std::getenv(name); });
}

std::vector<std::string> expand_slurm_hosts(const std::string& variable, std::string_view text) {
  std::vector<std::string> hosts;
  for (const std::string_view name : split_outside_brackets(text)) {
    if (!expand_name(name, hosts)) fail_list(variable, text, "n[01-03,07],gpu2");
  }
  return hosts;
}

std::vector<int> expand_slurm_counts(const std::string& variable, std::string_view text) {
  std::vector<int> counts;
  for (const std::string_view part : split_outside_brackets(text)) {
    const size_t open = part.find("(x");
    const bool repeated = open != std::string_view::npos && part.back() == ')';
    const auto count = slurm_number(part.substr(0, open));
    const auto times = repeated
                           ? slurm_number(part.substr(open + 2, part.size() - open - 3))
                           : (open == std::string_view::npos ? std::optional(1) : std::nullopt);
    if (!count || !times || *count < 1 || *times < 1 ||
        counts.size() + static_cast<size_t>(*times) > kMostItems)
      fail_list(variable, text, "2(x3),1");
    counts.insert(counts.end(), static_cast<size_t>(*times), *count);
  }
  return counts;
}

int slurm_port(std::string_view job_id, std::string_view step_id, int offset) {
  constexpr int kFirstPort = 12'000;  // below those that Linux gives to connections
  constexpr uint32_t kSteps = 10'000;
  constexpr int kPortsOfStep = 2;
  uint32_t hash = 0x811c9dc5;  // FNV-1a: neighbours, such as the jobs of an array, are far apart
  for (const char digit : fmt::format("{}.{}", job_id, step_id)) {
    hash = (hash ^ static_cast<unsigned char>(digit)) * 0x01000193;
  }
  return kFirstPort + kPortsOfStep * static_cast<int>(hash % kSteps) + offset;
}

}  // namespace lockstep
