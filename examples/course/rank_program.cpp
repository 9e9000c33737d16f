#include "course/rank_program.hpp"

#include <chrono>
#include <cstdio>
#include <thread>

#include "lockstep/rank_environment.hpp"

namespace course {
namespace {

constexpr std::chrono::seconds kPatience{2};

int own_rank() {
  try {
    return lockstep::RankEnvironment::from_env().rank;
  } catch (const lockstep::Error&) {
    return 0;  // who does not know its rank must speak for itself
  }
}

}  // namespace

void let_rank_0_speak(const lockstep::Error& error) {
  const bool asked_for_the_impossible = lockstep::exit_code(error.code()) == 2;
  if (asked_for_the_impossible && own_rank() != 0) std::this_thread::sleep_for(kPatience);
}

void print_rank(const lockstep::World& world, const Options& options) {
  if (options.quiet) return;
  const auto& device = world.device();
  std::fprintf(options.out(), "Rank: %d | Local Rank: %d | Device: %s (%s)\n", world.rank(),
               world.local_rank(), device.name().c_str(), device.plan().physical().c_str());
  std::fflush(options.out());
}

}  // namespace course
