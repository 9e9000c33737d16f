// Short texts that users type: endpoints, error codes, names of programs and labs, commands to
// compare.

#include <fmt/format.h>

#include <sstream>

#include "cli/app.hpp"
#include "cli/lab/lab_command.hpp"
#include "cli/own/comparison.hpp"
#include "cli/own/new_program.hpp"
#include "fuzz.hpp"
#include "net/socket.hpp"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace lockstep;
  using namespace lockstep::fuzz;
  const std::string text(reinterpret_cast<const char*>(data), size);
  accepts([&] {
    const Endpoint endpoint = parse_endpoint(text);
    const Endpoint again = parse_endpoint(endpoint_text(endpoint.host, endpoint.port));
    require(again.host == endpoint.host && again.port == endpoint.port,
            "an endpoint survives writing");
    require(endpoint.port >= 0 && endpoint.port <= 65535, "a port is a port");
  });
  accepts([&] { require(!cli::explain(text).empty(), "a code is explained"); });
  accepts([&] { cli::check_program_name(text); });
  accepts([&] { cli::lab_named(text); });
  accepts([&] {
    std::istringstream stream(text);
    std::vector<std::string> words;
    for (std::string word; stream >> word;) words.push_back(word);
    cli::SavedComparison comparison{
        .title = "", .command = "", .sides = cli::compared_sides(words)};
    require(comparison.sides.size() >= 2, "two sides are compared");
    for (size_t side = 0; side < comparison.sides.size(); ++side) {
      const std::filesystem::path record(compared_record(comparison, side, 0));
      require(record == record.filename(), "a record lies in the folder of records");
    }
  });
  return 0;
}
