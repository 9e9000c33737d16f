#include "cli/lab/lab.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <limits>
#include <set>
#include <sstream>

#include "lockstep/error.hpp"

namespace lockstep::cli {
namespace {

// The command line checks its flags; lab.json may hold anything.
int64_t number_of(const std::string& flag, const std::string& text, int64_t most) {
  char* end = nullptr;
  errno = 0;
  const long long value = std::strtoll(text.c_str(), &end, 0);
  if (errno == 0 && end != text.c_str() && *end == '\0' && value >= -most && value <= most) {
    return value;
  }
  throw Error(Code::kUsage, fmt::format("{} \"{}\" is not a whole number", flag, text),
              "write a number such as 4; if it is from lab.json, run the lab again");
}

[[noreturn]] void fail_missing(const std::string& run) {
  throw Error(Code::kRecord, fmt::format("the lab has no run of {}", run),
              "its lab.json does not name all runs that the report needs: run the lab again");
}

}  // namespace

std::string LabOptions::text(const std::string& flag) const {
  const auto found = own.find(flag);
  return found == own.end() ? "" : found->second;
}

std::optional<int64_t> LabOptions::count(const std::string& flag) const {
  const std::string value = text(flag);
  if (value.empty()) return std::nullopt;
  return number_of(flag, value, std::numeric_limits<int64_t>::max());
}

std::vector<int> LabOptions::list(const std::string& flag) const {
  std::vector<int> values;
  std::istringstream words(text(flag));
  for (std::string word; std::getline(words, word, ',');) {
    values.push_back(static_cast<int>(number_of(flag, word, std::numeric_limits<int>::max())));
  }
  return values;
}

std::vector<int> LabOptions::ascending(const std::string& flag,
                                       const std::vector<int>& standard) const {
  const std::vector<int> given = list(flag);
  const std::vector<int>& values = given.empty() ? standard : given;
  const std::set<int> sorted(values.begin(), values.end());
  return {sorted.begin(), sorted.end()};
}

void LabRuns::add(const Experiment& experiment, const RunRecord& record) {
  for (const auto& [what, size] : experiment.keys) {
    std::vector<RunSet>& all = sets[what];
    auto at = std::find_if(all.begin(), all.end(), [&wanted = size](const RunSet& set_up) {
      return set_up.size >= wanted;
    });
    if (at == all.end() || at->size != size) at = all.insert(at, RunSet{.size = size});
    at->devices = experiment.devices;
    at->runs.push_back(record);
  }
}

const std::vector<RunSet>& LabRuns::all(const std::string& what) const {
  static const std::vector<RunSet> kNone;
  const auto found = sets.find(what);
  return found == sets.end() ? kNone : found->second;
}

const std::vector<RunSet>& LabRuns::some(const std::string& what) const {
  if (all(what).empty()) fail_missing(fmt::format("\"{}\"", what));
  return all(what);
}

const RunSet& LabRuns::of(const std::string& what) const {
  return some(what).front();
}

const RunSet& LabRuns::of(const std::string& what, int64_t size) const {
  for (const auto& set_up : all(what)) {
    if (set_up.size == size) return set_up;
  }
  fail_missing(fmt::format("\"{}\" at {}", what, size));
}

}  // namespace lockstep::cli
