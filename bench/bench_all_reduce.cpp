// How long an all_reduce takes between the ranks of `lockstep run` or mpirun: through shared memory
// without a copy, the same from private memory, through Gloo and, under mpirun, MPI, and the floor
// that memory bandwidth sets. The cases take turns; rank 0 prints a table of medians as JSON. Links
// no libtorch.

#include <fmt/format.h>

#include <cstring>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <vector>

#include "comm/backend.hpp"
#include "lockstep/clock.hpp"
#include "lockstep/error.hpp"
#include "lockstep/rank_environment.hpp"
#include "lockstep/record.hpp"
#include "net/store.hpp"

namespace lockstep {
namespace {

constexpr int64_t kPatience = 60'000'000'000;

CallContext context() {
  return {monotonic_ns() + kPatience, "bench"};
}

void all_reduce(Backend& backend, float* data, int64_t count) {
  backend.all_reduce({data, count, Dtype::kF32}, ReduceOp::kSum, 1, context())->wait();
}

// Reads and writes as many bytes as an all_reduce of this size between two ranks, and does nothing
// else: each rank scales a buffer of its own in place.
void touch_like_all_reduce(float* data, int64_t count) {
  for (int64_t i = 0; i < count; ++i) data[i] *= 1.0000001F;
}

struct Case {
  const char* name;
  std::function<void(int64_t count)> run;
  std::vector<double> microseconds = {};
};

// All ranks take part in each repetition; several short calls are timed together.
void measure(Backend& backend, Case& what, int64_t count) {
  const int64_t calls = count >= 1 << 18 ? 1 : (count >= 1 << 13 ? 16 : 64);
  backend.barrier(context());
  const int64_t begin_ns = monotonic_ns();
  for (int64_t i = 0; i < calls; ++i) what.run(count);
  what.microseconds.push_back(static_cast<double>(monotonic_ns() - begin_ns) * 1e-3 /
                              static_cast<double>(calls));
}

int run(int argc, char** argv) {
  const int repetitions = argc > 1 ? std::atoi(argv[1]) : 30;
  const auto environment = RankEnvironment::from_env();
  const int64_t deadline_ns = monotonic_ns() + kPatience;
  const auto shm = make_shm_backend({.session = environment.session,
                                     .rank = environment.rank,
                                     .size = environment.world_size,
                                     .deadline_ns = deadline_ns});
  std::optional<StoreServer> server;
  StoreAddress rendezvous;
  rendezvous.unix_name = "bench-" + environment.session;
  if (environment.rank == 0) server.emplace(rendezvous);
  const auto store = connect_store(rendezvous, deadline_ns);
  const auto network = [&](const char* prefix) {
    return NetworkOptions{.store = make_prefix_store(store, prefix),
                          .rank = environment.rank,
                          .size = environment.world_size,
                          .address = "127.0.0.1",
                          .deadline_ns = deadline_ns};
  };
  const auto gloo = make_network_backend("gloo", network("gloo/"));
  const auto mpi = environment.under_mpi ? make_network_backend("mpi", network("mpi/")) : nullptr;

  nlohmann::json table;
  for (const int64_t bytes : {int64_t{256}, int64_t{4096}, int64_t{65536}, int64_t{1} << 20,
                              int64_t{32} << 20, int64_t{64} << 20}) {
    const int64_t count = bytes / 4;
    const auto registered = shm->allocate(bytes, context());
    auto* shared = static_cast<float*>(registered->data());
    std::vector<float> own(static_cast<size_t>(count), 0.0F);
    std::vector<Case> cases = {
        {"shm", [&](int64_t n) { all_reduce(*shm, shared, n); }},
        {"shm, private memory", [&](int64_t n) { all_reduce(*shm, own.data(), n); }},
        {"gloo", [&](int64_t n) { all_reduce(*gloo, own.data(), n); }},
        {"floor", [&](int64_t n) { touch_like_all_reduce(own.data(), n); }}};
    if (mpi) cases.push_back({"mpi", [&](int64_t n) { all_reduce(*mpi, own.data(), n); }});
    for (int i = 0; i < repetitions; ++i) {
      for (auto& what : cases) measure(*shm, what, count);
    }
    for (auto& what : cases)
      table[std::to_string(bytes)][what.name] = summarize(what.microseconds).median;
  }
  shm->barrier(context());
  if (environment.rank == 0) fmt::print("{}\n", table.dump());
  return 0;
}

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) {
  return lockstep::run_program(lockstep::run, argc, argv);
}
