#pragma once

#include <cstdint>
#include <functional>

namespace lockstep {

/// Runs `body(begin, end)` over parts of the range from 0 to count, on as many threads as libtorch
/// would use here (at::get_num_threads: the budget of a rank or a logical device), and returns when
/// all are done. A part has at least `grain` elements, unless there are fewer in total. `body` must
/// not throw, and results must not depend on where the range is cut.
///
/// This does not use at::parallel_for, a template that runs on one thread if it is compiled without
/// OpenMP. It uses the OpenMP runtime that libtorch has loaded, so that both share their threads.
void parallel_ranges(int64_t count, int64_t grain,
                     const std::function<void(int64_t begin, int64_t end)>& body);

}  // namespace lockstep
