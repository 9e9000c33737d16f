#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/counted.hpp"
#include "lockstep/error.hpp"
#include "lockstep/schedule.hpp"
#include "lockstep/table.hpp"

namespace lockstep {
namespace {

// Nobody looks at more columns than this, and a double still represents each exactly.
constexpr double kMaxColumns = 1e6;

struct Cell {
  std::string text;
  int64_t begin;  // column
  int64_t end;
  bool marked;
};

struct Window {
  int64_t begin;  // column
  int64_t end;
};

void require_printable(const Schedule& schedule, const Simulation& simulation,
                       const GridOptions& options) {
  const auto reject = [](const std::string& message, const char* help) {
    throw Error(Code::kSchedule, message, help);
  };
  const size_t ranks = schedule.actions.size();
  if (simulation.timeline.size() != ranks) {
    reject(fmt::format("a timeline of {} does not fit schedule \"{}\" of {}",
                       counted(simulation.timeline.size(), "rank"), schedule.name, ranks),
           "print a simulation of this schedule");
  }
  if (!options.rank_names.empty() && options.rank_names.size() != ranks) {
    reject(fmt::format("{} for {}", counted(options.rank_names.size(), "name"),
                       counted(ranks, "rank")),
           "give one name for each rank, or none");
  }
  if (!std::isfinite(options.tick) || options.tick < 0) {
    reject(fmt::format("a tick of {}", options.tick), "a tick must be more than 0, or 0 to choose");
  }
  for (const auto& rank : simulation.timeline) {
    for (const auto& each : rank) {
      if (std::isfinite(each.end) && each.begin >= 0 && each.begin <= each.end) continue;
      reject(fmt::format("an action lasts from {} to {}", each.begin, each.end),
             "times count from the beginning of the step");
    }
  }
}

double end_of(const Simulation& simulation) {
  double end = 0;
  for (const auto& rank : simulation.timeline) {
    for (const auto& each : rank) end = std::max(end, each.end);
  }
  return end;
}

// The shortest action unless it is an outlier: one hiccup of a clock would stretch the whole grid.
double choose_tick(const Simulation& simulation, double asked) {
  double shortest = 0;
  double sum = 0;
  int64_t count = 0;
  for (const auto& rank : simulation.timeline) {
    for (const auto& each : rank) {
      const double lasts = each.end - each.begin;
      if (lasts <= 0) continue;
      shortest = count == 0 ? lasts : std::min(shortest, lasts);
      sum += lasts;
      ++count;
    }
  }
  if (count == 0 && asked == 0) return 1;
  const double tick = asked > 0 ? asked : std::max(shortest, sum / static_cast<double>(count) / 4);
  return std::max(tick, end_of(simulation) / kMaxColumns);
}

bool has_shared_rank(const Schedule& schedule) {
  return schedule.ranks() < schedule.stages();
}

std::string label(const Action& action, bool with_stage) {
  const std::string stage = with_stage ? fmt::format("{}.", action.stage) : "";
  return fmt::format("{}{}{}", letter(action.kind), stage, action.micro_batch);
}

std::vector<Cell> cells_of(const Schedule& schedule, const std::vector<PlannedAction>& timeline,
                           double tick, const GridOptions& options) {
  const bool with_stage = has_shared_rank(schedule);
  std::vector<Cell> cells;
  int64_t free = 0;
  for (const auto& each : timeline) {
    const bool marked = options.marked && *options.marked == each.action;
    const int64_t begin = std::max<int64_t>(free, std::llround(each.begin / tick));
    const int64_t end = std::max<int64_t>(begin + 1, std::llround(each.end / tick));
    cells.push_back({label(each.action, with_stage), begin, end, marked});
    free = end;
  }
  return cells;
}

// The columns that fit: the first ones, or those around the marked cell.
Window choose_window(const std::vector<std::vector<Cell>>& rows, int64_t fitting) {
  int64_t columns = 0;
  int64_t wanted = 0;
  for (const auto& row : rows) {
    for (const auto& cell : row) {
      columns = std::max(columns, cell.end);
      if (cell.marked) wanted = cell.begin;
    }
  }
  if (fitting >= columns) return {0, columns};
  const int64_t begin = wanted < fitting ? 0 : std::min(wanted - fitting / 2, columns - fitting);
  return {begin, begin + fitting};
}

// Every column is a separator and `width` characters; the mark replaces separators, so that it
// moves nothing.
std::string format_row(const std::vector<Cell>& row, const Window& window, size_t width) {
  std::string text;
  for (int64_t column = window.begin; column < window.end; ++column) {
    text += ' ' + std::string(width, '.');
  }
  text += ' ';
  bool marked = false;
  for (const auto& cell : row) {
    const int64_t begin = std::max(cell.begin, window.begin);
    const int64_t end = std::min(cell.end, window.end);
    if (begin >= end) continue;
    const size_t at = static_cast<size_t>(begin - window.begin) * (width + 1) + 1;
    const size_t length = static_cast<size_t>(end - begin) * (width + 1) - 1;
    text.replace(at, length, length, end - begin == 1 ? ' ' : '-');
    text.replace(at, cell.text.size(), cell.text);
    if (!cell.marked) continue;
    marked = true;
    text[at - 1] = '<';
    text[at + cell.text.size()] = '>';
  }
  while (text.back() == ' ') text.pop_back();
  return marked ? text + "  <-- here" : text;
}

std::string legend(const Schedule& schedule, const Simulation& simulation, size_t width,
                   double tick) {
  const bool with_stage = has_shared_rank(schedule);
  std::vector<std::string> kinds;
  for (const auto kind : {ActionKind::kForward, ActionKind::kBackward, ActionKind::kBackwardInput,
                          ActionKind::kBackwardWeight}) {
    const bool used =
        std::any_of(simulation.timeline.begin(), simulation.timeline.end(), [&](const auto& rank) {
          return std::any_of(rank.begin(), rank.end(),
                             [&](const PlannedAction& each) { return each.action.kind == kind; });
        });
    if (used) kinds.push_back(fmt::format("{} {}", letter(kind), action_name(kind)));
  }
  return fmt::format(
      "{}, {} wait; F{}0 is the forward of micro-batch 0{}; a column is {:.3g}, "
      "bubble {:.1f} %",
      fmt::join(kinds, ", "), std::string(width, '.'), with_stage ? "1." : "",
      with_stage ? " in stage 1" : "", tick, 100 * simulation.bubble);
}

}  // namespace

std::string format_grid(const Schedule& schedule, const Simulation& simulation,
                        const GridOptions& options) {
  require_printable(schedule, simulation, options);
  const double tick = choose_tick(simulation, options.tick);
  std::vector<std::string> names = options.rank_names;
  for (int rank = 0; options.rank_names.empty() && rank < schedule.ranks(); ++rank) {
    names.push_back(fmt::format("rank {}", rank));
  }
  std::vector<std::vector<Cell>> rows;
  size_t width = 2;
  size_t name_width = 0;
  for (size_t rank = 0; rank < names.size(); ++rank) {
    rows.push_back(cells_of(schedule, simulation.timeline[rank], tick, options));
    for (const auto& cell : rows.back()) width = std::max(width, cell.text.size());
    name_width = std::max(name_width, names[rank].size());
  }
  const int64_t room = options.width - static_cast<int64_t>(name_width) - 3;  // after "name |"
  const int64_t fitting = options.width <= 0
                              ? static_cast<int64_t>(2 * kMaxColumns)
                              : std::max<int64_t>(1, room / static_cast<int64_t>(width + 1));
  const Window window = choose_window(rows, fitting);
  std::string text;
  for (size_t rank = 0; rank < names.size(); ++rank) {
    text +=
        fmt::format("{:<{}} |{}\n", names[rank], name_width, format_row(rows[rank], window, width));
  }
  const Window all = choose_window(rows, static_cast<int64_t>(2 * kMaxColumns));
  if (window.end - window.begin < all.end) {
    text += fmt::format("columns {} to {} of {}; the others are left out\n", window.begin,
                        window.end - 1, all.end);
  }
  const std::string below = legend(schedule, simulation, width, tick);
  if (options.width <= 0) return text + below + "\n";
  return text + wrap_text(below, static_cast<size_t>(options.width)) + "\n";
}

}  // namespace lockstep
