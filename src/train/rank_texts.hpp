#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/communicator.hpp"

// Texts and numbers that ranks tell each other, of any length. All calls are collective.

namespace lockstep {

/// The texts of all ranks: [rank].
std::vector<std::string> all_gather_texts(const Communicator& ranks, const std::string& mine,
                                          const CallOptions& call);

/// The same on rank 0, and nothing on the others, which need no memory for them.
std::vector<std::string> gather_texts(const Communicator& ranks, const std::string& mine,
                                      const CallOptions& call);

/// The numbers of all ranks, of which each may have a different count: [rank].
std::vector<std::vector<int64_t>> all_gather_numbers(const Communicator& ranks,
                                                     const std::vector<int64_t>& mine,
                                                     const CallOptions& call);

/// The text of rank 0.
std::string broadcast_text(const Communicator& ranks, const std::string& mine,
                           const CallOptions& call);

}  // namespace lockstep
