// A board file as `lockstep top` reads and shows it. A short input is a list of edits of a good
// board (where, how many bytes, the bytes); a long one is the file itself.

#include "lockstep/detail/board.hpp"

#include <nlohmann/json.hpp>

#include "base/board_layout.hpp"
#include "cli/top/top_draw.hpp"
#include "cli/top/top_screen.hpp"
#include "fuzz.hpp"
#include "lockstep/clock.hpp"
#include "lockstep/table.hpp"

namespace lockstep::fuzz {
namespace {

std::string good_board(const Scratch& scratch) {
  const std::string path = scratch.file("good");
  const Board board = Board::create(path, 1, "train-abc123");
  BoardPage page = board.page(0);
  page.start("train");
  page.set_phase(Phase::kTraining);
  page.set_step(7);
  page.set_loss(0.5);
  page.add_clock(Activity::kBusy, 1'000'000);
  page.set_device(0, {.name = "cpu:0",
                      .physical = "core 0",
                      .capacity_bytes = 1 << 30,
                      .live_bytes = 1000,
                      .peak_bytes = 2000,
                      .busy_ns = 10});
  page.begin_collective(3, "all_reduce", 4096, 1);
  page.finish_collective(3);
  page.record_first_error(Code::kRankFailed, "rank 0 failed", 0);
  return read_bytes(path);
}

std::string edited(std::string_view bytes, const std::string& good) {
  if (bytes.size() >= static_cast<size_t>(kBoardHeaderBytes)) return std::string(bytes);
  std::string file = good;
  Input input(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size());
  while (!input.empty()) {
    const uint32_t at = input.number16() | static_cast<uint32_t>(input.byte()) << 16U;
    const uint8_t count = input.byte();
    if (count == 0xFF) {
      file.resize(at % (file.size() + 1));
      continue;
    }
    const std::string_view piece = input.take(count);
    const size_t to = at % (file.size() + 1);
    file.replace(to, std::min(piece.size(), file.size() - to), piece);
  }
  return file;
}

void require_safe(const std::string& line, size_t width) {
  for (const char c : line) {
    const auto byte = static_cast<unsigned char>(c);
    require(byte >= 0x20 && byte != 0x7F, "a line holds no control characters");
  }
  require(display_width(line) <= width, "no line is wider than the terminal");
}

void show(const Board& board, const std::string& path) {
  cli::RunReading reading{.path = path, .info = board.info()};
  for (int rank = 0; rank < board.ranks(); ++rank) {
    cli::RankReading& read = reading.ranks.emplace_back();
    read.status.rank = rank;
    // As `lockstep top` does it: one bad page must not hide the others.
    if (!accepts([&] { read.status = board.status(rank); })) read.problem = "damaged";
    board.past_collectives(rank);
  }
  cli::TopRates rates;
  const int64_t now_ns = monotonic_ns();
  rates.update({reading}, now_ns);
  for (auto& rank : reading.ranks) {
    // As after another second of training.
    rank.status.step = static_cast<int64_t>(static_cast<uint64_t>(rank.status.step) + 1);
    rank.status.updated_ns =
        static_cast<int64_t>(static_cast<uint64_t>(rank.status.updated_ns) + 1'000'000'000);
  }
  const cli::TopView view = rates.update({reading}, now_ns + 1'000'000'000);
  for (const size_t width : {20U, 80U, 200U}) {
    const cli::DrawStyle style{.width = width, .utf8 = width != 80, .colour = false};
    for (const auto& line : draw_runs(view, style)) require_safe(line, width);
    for (const auto& run : view.runs) require_safe(draw_folded_run(run, style), width);
    cli::TopScreen screen(1);
    const auto lines = screen.draw(view, 24, style);
    require(lines.size() <= 24, "the screen is no higher than the terminal");
    for (const auto& line : lines) require_safe(line, width);
  }
  for (const auto& line : rank_lines(view)) require_safe(line, std::string::npos);
  top_json(view).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

}  // namespace
}  // namespace lockstep::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace lockstep::fuzz;
  static const Scratch scratch;
  static const std::string good = good_board(scratch);
  const std::string path =
      scratch.write("board", edited({reinterpret_cast<const char*>(data), size}, good));
  accepts([&] { show(lockstep::Board::open(path), path); });
  return 0;
}
