#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/communicator.hpp"

// Short texts and numbers that ranks tell each other about a checkpoint. All calls are collective.

namespace lockstep {

/// The texts of all ranks: [rank].
std::vector<std::string> all_gather_texts(const Communicator& ranks, const std::string& mine);

/// The numbers of all ranks, of which each may have a different count: [rank].
std::vector<std::vector<int64_t>> all_gather_numbers(const Communicator& ranks,
                                                     const std::vector<int64_t>& mine);

/// The text of rank 0.
std::string broadcast_text(const Communicator& ranks, const std::string& mine);

}  // namespace lockstep
