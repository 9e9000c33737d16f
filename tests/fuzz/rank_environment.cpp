// The environment variables by which a launcher numbers its ranks: lines of NAME=VALUE.

#include "lockstep/rank_environment.hpp"

#include "fuzz.hpp"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace lockstep;
  using namespace lockstep::fuzz;
  const Variables variables({reinterpret_cast<const char*>(data), size});
  accepts([&] {
    const auto world =
        RankEnvironment::from([&](const char* name) { return variables.find(name); });
    require(world.rank >= 0 && world.rank < world.world_size, "a rank is one of its world");
    require(world.local_rank >= 0 && world.local_rank < world.local_world_size,
            "a local rank is one of its host");
    require(world.local_world_size <= world.world_size, "a host is no larger than the world");
    require(world.node_rank >= 0 && world.restart_count >= 0, "hosts and restarts are counted");
    require(world.master_port >= 0 && world.master_port <= 65535, "a port is a port");
    require(!world.session.empty(), "there is a session");
    require(!world.timeout_s || *world.timeout_s > 0, "a timeout is positive");
  });
  return 0;
}
