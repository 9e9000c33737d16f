// What ranks and the kernel write and the launcher reads: lines of output, stacks, counters of
// out-of-memory kills.

#include <algorithm>

#include "base/stack.hpp"
#include "fuzz.hpp"
#include "launch/oom_watch.hpp"
#include "launch/output.hpp"

namespace lockstep::fuzz {
namespace {

using Lines = std::vector<std::pair<std::string, char>>;

// Lines of a text that arrives in pieces of this size.
Lines lines_of(std::string_view text, size_t piece) {
  Lines lines;
  LineSplitter splitter;
  const auto take = [&](std::string_view line, char end) {
    require(line.size() <= LineSplitter::kLongestLine, "a line is bounded");
    lines.emplace_back(line, end);
  };
  while (!text.empty()) {
    splitter.add(text.substr(0, piece), take);
    text.remove_prefix(std::min(piece, text.size()));
  }
  splitter.finish(take);
  return lines;
}

}  // namespace
}  // namespace lockstep::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace lockstep;
  using namespace lockstep::fuzz;
  Input input(data, size);
  const size_t piece = 1 + input.byte() % 64U;
  const std::string_view text = input.rest();
  const Lines whole = lines_of(text, text.size() + 1);
  require(lines_of(text, piece) == whole, "lines do not depend on how bytes arrive");
  size_t bytes = 0;
  for (const auto& [line, end] : whole) bytes += line.size();
  const auto ends =
      std::count_if(text.begin(), text.end(), [](char c) { return c == '\n' || c == '\r'; });
  require(bytes + static_cast<size_t>(ends) == text.size(), "no character of a line is lost");
  require(functions_in_stack(text).size() <= text.size(), "a function is on a line");
  parse_oom_kills(text);
  oom_counter_file(text, "/sys/fs/cgroup");
  return 0;
}
