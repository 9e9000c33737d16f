#include "course/rank_program.hpp"

#include <chrono>
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

}  // namespace course
