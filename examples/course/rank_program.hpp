#pragma once

#include "course/options.hpp"
#include "lockstep/error.hpp"
#include "lockstep/world.hpp"

namespace course {

/// Called on a rank that is about to end with `error`. Flags and files are the same on all ranks,
/// so that what one rank finds wrong with them all do: rank 0 says it, and the others wait a moment
/// to be stopped by the launcher before they would say it once more.
void let_rank_0_speak(const lockstep::Error& error);

/// "Rank: 0 | Local Rank: 0 | Device: …", unless --quiet.
void print_rank(const lockstep::World& world, const Options& options);

/// The body of a program that is started once for each rank, for lockstep::run_program.
template <int (*Body)(int argc, char** argv)>
int on_rank(int argc, char** argv) {
  try {
    return Body(argc, argv);
  } catch (const lockstep::Error& error) {
    let_rank_0_speak(error);
    throw;
  }
}

}  // namespace course
