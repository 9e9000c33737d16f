// A message between the launchers of a job.

#include <limits>

#include "fuzz.hpp"
#include "launch/rendezvous_messages.hpp"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace lockstep;
  using namespace lockstep::fuzz;
  accepts([&] {
    const NodeMessage message = decode_node_message({reinterpret_cast<const char*>(data), size});
    const std::string once = encode(message);
    require_equal(once, encode(decode_node_message(once)),
                  "a message survives writing and reading");
    const auto* layout = std::get_if<LayoutMessage>(&message);
    if (layout == nullptr) return;
    int64_t ranks = 0;
    for (const int size_of_node : layout->layout.local_world_sizes) {
      require(size_of_node >= 1, "every host has a rank");
      ranks += size_of_node;
    }
    require(ranks <= std::numeric_limits<int>::max(), "ranks can be counted");
    require(layout->layout.world_size() == static_cast<int>(ranks), "ranks are counted");
  });
  return 0;
}
