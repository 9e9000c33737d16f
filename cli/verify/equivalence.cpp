// The last page of `lockstep lab all`: do the course's methods train the same?

#include <fmt/format.h>

#include <ctime>
#include <filesystem>

#include "base/process.hpp"
#include "cli/lab/folder_lock.hpp"
#include "cli/lab/lab_report.hpp"
#include "cli/verify/verify.hpp"

namespace lockstep::cli {
namespace {

namespace fs = std::filesystem;
using Words = std::vector<std::string>;

// A method of the course, and how its program trains the same rows.
struct CourseMethod {
  const char* name;
  const char* program;
  int ranks;
  Words arguments;
  RunFacts facts;
};

// Methods that are compared with one run on one device.
struct CourseReference {
  const char* precision;
  const char* program;
  Words arguments;
  std::vector<CourseMethod> methods;
};

std::vector<CourseReference> course_references() {
  const RunFacts two = {.divides_rows = true, .ranks = 2};
  const RunFacts windows = {.divides_rows = true, .micro_steps = 2, .ranks = 2};
  const Words halves = {"--batch", "32", "--accum-steps", "2", "--print-steps", "0"};
  const Words staged = {"--stages", "2", "--micro-batches", "4", "--print-steps", "0"};
  Words halves_in_bf16 = halves;
  halves_in_bf16.insert(halves_in_bf16.end(), {"--amp", "bf16"});
  return {{"float32",
           "practical5_single",
           {"--batch", "64", "--devices", "cpu:1"},
           {{"DataParallel, 2 devices", "practical5_dp", 1, {"--devices", "cpu:2"}, two},
            {"DDP, 2 ranks", "practical6_ddp", 2, {"--devices", "cpu:2"}, two},
            {"accumulation, 2 ranks", "practical7_accumulation", 2, halves, windows},
            {"hybrid, 2 ranks of 2 stages", "practical10_hybrid", 2, staged, two}}},
          {"bf16",
           "practical7_amp",
           {"--batch", "64", "--amp", "bf16"},
           {{"AMP, 2 ranks", "practical7_amp", 2, {}, two},
            {"accumulation and AMP, 2 ranks", "homework2_combined", 2, halves_in_bf16, windows}}}};
}

// Without --devices, which programs of ranks and of devices understand differently.
Words shared_arguments(const CourseReference& reference) {
  Words shared = {"--steps", "5", "--dim", "32", "--hidden", "48", "--quiet"};
  for (size_t i = 0; i + 1 < reference.arguments.size(); i += 2) {
    if (reference.arguments[i] == "--devices") continue;
    shared.insert(shared.end(), {reference.arguments[i], reference.arguments[i + 1]});
  }
  return shared;
}

}  // namespace

int run_equivalence(const fs::path& folder, const std::string& command) {
  const Interrupts interrupts;
  make_report_folder(folder);
  const FolderLock lock(folder.string());
  const RecordingsFolder recordings(folder / "recordings", /*keep=*/false);
  std::vector<VerifiedRun> runs;
  for (const auto& reference : course_references()) {
    const Words shared = shared_arguments(reference);
    Words own = shared;
    own.insert(own.end(), reference.arguments.begin(), reference.arguments.end());
    const VerifyRunner one({sibling_path(reference.program)}, recordings, interrupts);
    const Baseline baseline = make_baseline(one, {reference.program, own, {}}, 2);
    for (const auto& method : reference.methods) {
      const VerifyRunner runner({sibling_path(method.program)}, recordings, interrupts);
      const Family family{reference.precision, shared, {}};
      Variant variant{.name = method.name, .ranks = method.ranks, .arguments = method.arguments};
      variant.facts = method.facts;
      runs.push_back(verify_variant(runner, baseline, family, variant));
      print_error(fmt::format("{}: {}\n", method.name, verdict_text(runs.back())));
    }
  }
  LabReport report = verify_report({"the course's methods"}, runs);
  report.title = "Do the course's methods train the same?";
  publish_report(report, {command, std::time(nullptr), {}}, {}, folder);
  return exit_code_of(runs);
}

}  // namespace lockstep::cli
