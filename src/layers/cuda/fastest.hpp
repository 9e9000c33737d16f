#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <functional>
#include <vector>

namespace lockstep::layers {

/// One of several ways to do the same work: queues it on a stream, false where it cannot.
using Way = std::function<bool()>;

/// The position of the way that is fastest in a row; 0 where none can. Takes up to a second.
///
/// Large matrix products bring a GPU to its power limit, and the kernel that wins a few
/// milliseconds below the limit often draws most. So a brief comparison in turns only says which
/// few are worth a long one, each alone for as long as the clock needs to settle. Of ways that are
/// as good as equal the first wins, so that runs tend to agree.
size_t fastest(const std::vector<Way>& ways, cudaStream_t stream);

}  // namespace lockstep::layers
