#pragma once

#include <cstdint>

namespace lockstep {

/// In which processes are numbered as in this one; 0 where the system does not tell. Containers of
/// one host number theirs each for itself.
uint64_t pid_namespace();

}  // namespace lockstep
