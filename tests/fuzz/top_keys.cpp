// Keys as a terminal sends them to `lockstep top`.

#include "cli/top/top_screen.hpp"
#include "fuzz.hpp"
#include "lockstep/table.hpp"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace lockstep;
  using namespace lockstep::fuzz;
  const std::string_view typed(reinterpret_cast<const char*>(data), size);
  require(cli::decode_keys(typed).size() <= size, "a key is at least a byte");
  cli::TopView view;
  for (int i = 0; i < 3; ++i) {
    cli::RunView& run = view.runs.emplace_back();
    run.info = {.run_name = "run-" + std::to_string(i), .ranks = 2, .launcher_pid = 10 + i};
    run.ranks.resize(2);
  }
  cli::TopScreen screen(1);
  Input input(data, size);
  for (bool open = true; open && !input.empty();) {
    // As many bytes at once as a read may give.
    open = screen.press(cli::decode_keys(input.take(1 + input.byte() % 8U)));
    const size_t height = 1 + input.rest().size() % 12;
    for (const auto& line :
         screen.draw(view, height, {.width = 40, .utf8 = true, .colour = false})) {
      require(display_width(line) <= 40, "no line is wider than the terminal");
    }
  }
  return 0;
}
