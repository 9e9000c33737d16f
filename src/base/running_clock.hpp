#pragma once

#include <cstdint>

namespace lockstep {

// Note [Running clock]: a deadline blames the peer that did not arrive in time. Time in which the
// waiting process itself did not run must not count: SLURM suspends jobs (`scontrol suspend`),
// users type Ctrl-Z, containers are frozen. When such a job resumes, CLOCK_MONOTONIC has advanced
// for all its ranks, and each would blame a peer that was stopped as long as itself. So every
// deadline of a wait for another process is a time of this clock.
//
// The kernel does not tell a process for how long it was stopped. A thread that ticks every quarter
// of a second finds out: if two ticks are more than kLongestGapNs apart, the process did not run,
// and the clock skips all of the gap but kLongestGapNs. A reader before the first tick after the
// gap gets the same answer.

/// The longest time between two ticks that counts in full.
inline constexpr int64_t kLongestGapNs = 1'000'000'000;

/// Nanoseconds of CLOCK_MONOTONIC without the time for which this process was stopped since the
/// first call. Never goes back.
int64_t running_ns();

}  // namespace lockstep
