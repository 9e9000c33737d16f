#pragma once

#include <sys/types.h>

#include <string>
#include <string_view>
#include <vector>

// Where a rank that makes no progress is: it writes its own stack when the launcher asks for it.

namespace lockstep {

/// Lets this process write its main thread's stack to a file when it gets stack_signal(). Does
/// nothing if LOCKSTEP_STACK_FILE does not name one.
void write_stack_on_request();

/// The signal that asks for it.
int stack_signal();

/// Whether a process would answer it; any other process would be killed by it.
bool writes_stack(pid_t pid);

/// The functions in such a file, innermost first, without those of the signal's delivery.
std::vector<std::string> functions_in_stack(std::string_view text);

}  // namespace lockstep
