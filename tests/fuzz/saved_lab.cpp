// lab.json in the folder of a lab's report.

#include "cli/lab/saved_lab.hpp"

#include "fuzz.hpp"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace lockstep::cli;
  using namespace lockstep::fuzz;
  static const Scratch scratch;
  static const std::string again = scratch.file("again");
  std::filesystem::create_directories(again);
  scratch.write(kSavedLab, {reinterpret_cast<const char*>(data), size});
  accepts([&] {
    const SavedLab lab = read_saved_lab(scratch.file(""));
    for (const auto& experiment : lab.experiments) {
      const std::filesystem::path record(experiment.name + ".json");
      require(record == record.filename() && record.has_stem(),
              "an experiment's record lies in the folder of records");
    }
    save_lab(lab, again);
    const std::string once = read_bytes(again + "/" + kSavedLab);
    save_lab(read_saved_lab(again), again);
    require_equal(once, read_bytes(again + "/" + kSavedLab),
                  "lab.json survives writing and reading");
    for (const auto& [flag, value] : lab.options.own) {
      accepts([&, &name = flag] { lab.options.count(name); });
      accepts([&, &name = flag] { lab.options.ascending(name, {}); });
    }
    accepts([&] { saved_runs(lab, scratch.file("")); });
  });
  return 0;
}
