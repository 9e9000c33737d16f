#pragma once

#include <optional>
#include <vector>

namespace lockstep {

enum class Stream { kOut, kErr };

/// What the console does with a line; files keep every line.
enum class Shown {
  kHidden,
  kHeld,  ///< shown a moment later, unless the run fails meanwhile: then only the culprit counts
  kLive
};

/// Whose output is shown.
struct ConsolePlan {
  std::optional<std::vector<int>> ranks = std::vector<int>{0};  ///< --ranks; nothing: all
  std::optional<std::vector<int>> local_ranks;  ///< --local-ranks-filter: these and nobody else
  std::vector<int> redirects;                   ///< [local rank] bit 0: output, bit 1: errors
  std::vector<int> tee;                         ///< [local rank] as redirects; wins over them
};

Shown decide_shown(const ConsolePlan& plan, int rank, int local_rank, Stream stream);

}  // namespace lockstep
