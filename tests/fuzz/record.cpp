// A run's record, as `lockstep report` reads it, and the report that is made of it.

#include "lockstep/record.hpp"

#include <nlohmann/json.hpp>

#include "base/table_data.hpp"
#include "cli/own/run_report.hpp"
#include "fuzz.hpp"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace lockstep;
  using namespace lockstep::fuzz;
  static const Scratch scratch;
  const std::string path =
      scratch.write("record.json", {reinterpret_cast<const char*>(data), size});
  accepts([&] {
    const RunRecord record = read_record(path);
    const auto written = to_json(record);
    require_equal(written.dump(), to_json(record_from_json(written)).dump(),
                  "a record survives writing and reading");
    cli::NamedRuns runs{
        "run", {.devices = static_cast<int>(record.devices.size()), .runs = {record, record}}};
    const cli::LabReport report = cli::report_on_runs("Runs", {runs});
    for (const auto& [name, table] : report.tables) {
      json_of(data_of(table));
      table.terminal(false, 80);
      table.markdown();
    }
  });
  return 0;
}
