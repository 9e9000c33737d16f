#pragma once

// practical10_hybrid as a user starts it: stages on devices of one process, and on ranks.

#include <gtest/gtest.h>

#include <string>

#include "lockstep/record.hpp"
#include "program_support.hpp"

namespace lockstep::test {

// Deep enough to be cut into four, small enough that a run is mostly start-up.
inline const Arguments kModel = {"--steps",  "10", "--batch", "24", "--dim", "32",
                                 "--hidden", "48", "--depth", "6",  "--lr",  "0.05"};

// The program alone where `ranks` is 0, otherwise under `lockstep run`.
inline ChildResult run_hybrid(int ranks, const Arguments& arguments) {
  const Arguments whole = join(kModel, arguments);
  if (ranks == 0) return run("practical10_hybrid", whole);
  const ScratchFolder logs;  // kept after failures: not in the user's folder
  return run("lockstep", join({"run", "-n", std::to_string(ranks), "--ranks", "all", "--log-dir",
                               logs.file("logs"), kBin + "practical10_hybrid"},
                              whole));
}

inline RunRecord record_of(int ranks, const Arguments& arguments) {
  const ScratchFolder folder;
  const std::string path = folder.file("record.json");
  const ChildResult result = run_hybrid(ranks, join(arguments, {"--quiet", "--json", path}));
  EXPECT_EQ(result.exit_code, 0) << result.errors;
  EXPECT_EQ(result.output, "") << "told to be quiet";
  return read_record(path);
}

inline std::string text_of(const Arguments& arguments) {
  std::string text;
  for (const auto& word : arguments) text += " " + word;
  return text;
}

}  // namespace lockstep::test
