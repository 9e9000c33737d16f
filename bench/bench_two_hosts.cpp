// How long an all_reduce takes between ranks of several hosts: in two levels, and over Gloo from
// each rank to each. The backends take turns; rank 0 prints medians as JSON. Links no libtorch.
//
// usage: bench_two_hosts ADDRESS REPETITIONS BYTES...    (as a rank: RANK, WORLD_SIZE, MASTER_ADDR)

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <optional>
#include <vector>

#include "comm/backend.hpp"
#include "comm/two_level/host_map.hpp"
#include "lockstep/clock.hpp"
#include "lockstep/error.hpp"
#include "lockstep/rank_environment.hpp"
#include "lockstep/record.hpp"
#include "net/store.hpp"

namespace lockstep {
namespace {

constexpr int64_t kPatience = 120'000'000'000;

CallContext context() {
  return {.deadline_ns = monotonic_ns() + kPatience, .label = "bench", .waits_at_once = true};
}

// The slowest rank's time for one call: an all_reduce is done when all have it.
double call_us(Backend& backend, float* data, int64_t count) {
  backend.barrier(context());
  const int64_t begin_ns = monotonic_ns();
  backend.all_reduce({data, count, Dtype::kF32}, ReduceOp::kSum, 1, context())->wait();
  double took = static_cast<double>(monotonic_ns() - begin_ns) * 1e-3;
  backend.all_reduce({&took, 1, Dtype::kF64}, ReduceOp::kMax, 1, context())->wait();
  return took;
}

void require_sum(const float* data, int64_t count, int ranks, const std::string& who) {
  const auto sum = static_cast<float>(ranks * (ranks + 1) / 2);
  const auto wrong = std::find_if(data, data + count, [&](float value) { return value != sum; });
  if (wrong == data + count) return;
  throw Error(Code::kInternal, fmt::format("{}: element {} is {}", who, wrong - data, *wrong));
}

int run(int argc, char** argv) {
  if (argc < 4) throw Error(Code::kUsage, "give an address, repetitions and sizes", "see the file");
  const int repetitions = std::atoi(argv[2]);
  const auto environment = RankEnvironment::from_env();
  const int64_t deadline_ns = monotonic_ns() + kPatience;
  const StoreAddress rendezvous{.unix_name = {},
                                .host = environment.master_addr,
                                .port = environment.master_port,
                                .token = environment.token};
  std::optional<StoreServer> server;
  if (environment.rank == 0) server.emplace(rendezvous);
  const auto store = connect_store(rendezvous, deadline_ns);
  const auto gloo = [&](const char* prefix) {
    return NetworkOptions{.store = make_prefix_store(store, prefix),
                          .rank = environment.rank,
                          .size = environment.world_size,
                          .address = argv[1],
                          .deadline_ns = deadline_ns};
  };
  const auto flat = make_network_backend("gloo", gloo("flat/"));
  const auto two_level =
      make_two_level_backend({.network = gloo("two/"), .host = host_identity(environment)});
  nlohmann::json table;
  for (int argument = 3; argument < argc; ++argument) {
    const int64_t bytes = std::atoll(argv[argument]);
    const int64_t count = bytes / 4;
    const auto memory = two_level->allocate(bytes, context());  // as DDP's buckets
    auto* data = static_cast<float*>(memory->data());
    std::vector<double> times[2];
    for (int i = 0; i < repetitions; ++i) {
      for (int which = 0; which < 2; ++which) {
        Backend& backend = which == 0 ? *two_level : *flat;
        std::fill_n(data, count, static_cast<float>(environment.rank + 1));
        times[which].push_back(call_us(backend, data, count));
        require_sum(data, count, environment.world_size, std::string(backend.name()));
      }
    }
    for (int which = 0; which < 2; ++which) {
      table[which == 0 ? "two_level" : "gloo"][argv[argument]] = summarize(times[which]).median;
    }
  }
  two_level->barrier(context());
  if (environment.rank == 0) fmt::print("{}\n", table.dump());
  return 0;
}

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) {
  return lockstep::run_program(lockstep::run, argc, argv);
}
