#pragma once

namespace lockstep {

/// Whether this thread runs a loop of join() over several ranks, some of which may make fewer steps
/// than others: no place for a collective that all ranks have to call.
bool inside_join();

}  // namespace lockstep
