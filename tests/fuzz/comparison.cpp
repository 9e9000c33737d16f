// compare.json in the folder of a comparison.

#include "cli/own/comparison.hpp"

#include "fuzz.hpp"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace lockstep::cli;
  using namespace lockstep::fuzz;
  static const Scratch scratch;
  static const std::string again = scratch.file("again");
  std::filesystem::create_directories(again);
  scratch.write(kSavedComparison, {reinterpret_cast<const char*>(data), size});
  accepts([&] {
    const SavedComparison comparison = read_comparison(scratch.file(""));
    save_comparison(comparison, again);
    const std::string once = read_bytes(again + "/" + kSavedComparison);
    save_comparison(read_comparison(again), again);
    require_equal(once, read_bytes(again + "/" + kSavedComparison),
                  "compare.json survives writing and reading");
    for (size_t side = 0; side < comparison.sides.size(); ++side) {
      const std::filesystem::path record(compared_record(comparison, side, 0) + ".json");
      require(record == record.filename(), "a record lies in the folder of records");
    }
    const LabReport report = comparison_report(comparison, scratch.file(""));
    for (const auto& [name, table] : report.tables) table.csv();
  });
  return 0;
}
