#pragma once

#include <cstdint>

namespace lockstep {

// Note [Running clock]: a deadline blames whoever did not come in time. Time in which the waiting
// process itself did not run is nobody's fault: SLURM suspends jobs (`scontrol suspend`), people
// type Ctrl-Z, containers are frozen. When such a job runs again, CLOCK_MONOTONIC has gone on for
// all its ranks, and each of them would blame a peer that was stopped as long as itself. So
// every deadline of a wait for another process is a time of this clock.
//
// The kernel does not tell a process for how long it was stopped. A thread that ticks every
// quarter of a second finds out: a gap of more than kLongestGapNs between two ticks is time in
// which this process did not run, and all of the gap but kLongestGapNs is left out. Whoever reads
// the clock before the first tick after the gap gets the same answer.

/// The longest time without a tick that still counts.
inline constexpr int64_t kLongestGapNs = 1'000'000'000;

/// Nanoseconds of CLOCK_MONOTONIC, less the time in which this process was stopped since it first
/// asked. Never goes back. Equal to monotonic_ns() as long as the process was not stopped.
int64_t running_ns();

}  // namespace lockstep
