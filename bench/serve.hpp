#pragma once

#include <cstdint>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>

// For a program that bench/gpu starts once and measures many times, so that peers can take turns
// without being restarted. docs/performance.md says how to read the tables.

namespace bench {

/// Writes `ready` as a line, then for each command "go N" the result of `measure(N)` as a line,
/// until the commands end. Every rank gets the commands, in its own file if the settings name one
/// ("{rank}" in the name is replaced); rank 0 answers.
inline void serve(const nlohmann::json& settings, int rank, const nlohmann::json& ready,
                  const std::function<nlohmann::json(int64_t)>& measure) {
  std::string path = settings.value("commands", "/dev/stdin");
  if (const size_t at = path.find("{rank}"); at != std::string::npos) {
    path.replace(at, 6, std::to_string(rank));
  }
  std::ofstream answers;
  if (rank == 0) answers.open(settings.value("answers", "/dev/stdout"), std::ios::app);
  const auto answer = [&](const nlohmann::json& value) {
    if (rank == 0) answers << value.dump() << std::endl;
  };
  answer(ready);
  std::ifstream commands(path);
  std::string word;
  int64_t count = 0;
  while (commands >> word >> count) answer(measure(count));
}

}  // namespace bench
