#pragma once

#include <sys/types.h>

#include <cstdint>
#include <vector>

namespace lockstep {

/// Children of this process, zombies included. A subreaper's orphaned descendants are among them.
std::vector<pid_t> list_children();

/// Kills and reaps every child, then those that their deaths made children of this subreaper, until
/// none is left or the deadline has passed. Only children are killed: nobody else can reap them, so
/// a number never belongs to a stranger. Gives how many were still alive.
int sweep_children(int64_t deadline_ns);

}  // namespace lockstep
