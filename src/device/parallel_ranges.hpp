#pragma once

#include <cstdint>
#include <functional>

namespace lockstep {

/// Runs `body(begin, end)` over parts of 0 to count, on as many threads as libtorch would use here
/// (at::get_num_threads: the budget of a rank or a logical device), and returns when all are done.
/// A part has at least `grain` elements, unless there are fewer in all. `body` must not throw, and
/// results must not depend on where the parts are cut.
///
/// at::parallel_for is not used: it is a template that runs on one thread wherever it is compiled
/// without OpenMP. Here OpenMP's runtime is the one that libtorch has loaded, whichever that is, so
/// that the two share their threads.
void parallel_ranges(int64_t count, int64_t grain,
                     const std::function<void(int64_t begin, int64_t end)>& body);

}  // namespace lockstep
