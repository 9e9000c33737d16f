// For tests/parity/sampler_parity.py: reads cases "rows rank ranks shuffle seed drop_last epoch",
// one a line, and prints the indices of each.

#include <cstdio>

#include "lockstep/distributed_sampler.hpp"
#include "lockstep/error.hpp"

namespace {

int dump(int, char**) {
  long long rows = 0, seed = 0, epoch = 0;
  int rank = 0, ranks = 0, shuffle = 0, drop_last = 0;
  while (std::scanf("%lld %d %d %d %lld %d %lld", &rows, &rank, &ranks, &shuffle, &seed, &drop_last,
                    &epoch) == 7) {
    lockstep::DistributedSampler sampler(
        rows, ranks, rank, {.shuffle = shuffle != 0, .seed = seed, .drop_last = drop_last != 0});
    sampler.set_epoch(epoch);
    for (const int64_t index : sampler.indices())
      std::printf("%lld ", static_cast<long long>(index));
    std::printf("\n");
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return lockstep::run_program(dump, argc, argv);
}
