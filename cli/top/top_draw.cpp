#include "cli/top/top_draw.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "base/counted.hpp"
#include "cli/top/top_line.hpp"
#include "lockstep/table.hpp"
#include "lockstep/units.hpp"

namespace lockstep::cli {
namespace {

constexpr size_t kIndent = 2;
constexpr size_t kErrorLines = 3;
constexpr size_t kBytesWidth = 8;    // "36.1 MiB"
constexpr size_t kPercentWidth = 5;  // "100 %"
constexpr double kAlmostFull = 0.9;
constexpr double kQuietShown = 5;  // seconds

// Bytes of the UTF-8 character that begins at `at`; 0 if it is incomplete or invalid.
size_t character_bytes(const std::string& text, size_t at) {
  const auto lead = static_cast<unsigned char>(text[at]);
  const size_t count = lead < 0x80   ? 1
                       : lead < 0xC2 ? 0
                       : lead < 0xE0 ? 2
                       : lead < 0xF0 ? 3
                       : lead < 0xF5 ? 4
                                     : 0;
  if (count == 0 || at + count > text.size()) return 0;
  for (size_t i = 1; i < count; ++i) {
    if ((static_cast<unsigned char>(text[at + i]) & 0xC0) != 0x80) return 0;
  }
  return count;
}

// U+0080 to U+009F, which some terminals obey as they obey ESC.
bool is_control(const std::string& character) {
  const auto first = static_cast<unsigned char>(character[0]);
  if (character.size() == 1) return first < 0x20 || first == 0x7F;
  return first == 0xC2 && static_cast<unsigned char>(character[1]) < 0xA0;
}

std::string power_text(const GpuSample& gpu) {
  if (!gpu.power_limit_w) return fmt::format("{:.0f} W", *gpu.power_w);
  return fmt::format("{:.0f} of {:.0f} W", *gpu.power_w, *gpu.power_limit_w);
}

void add_fields(Flow& flow, const GpuSample& gpu, bool utf8) {
  flow.add(fmt::format("GPU {}", gpu.index), Ink::kStrong);
  flow.add(printable(gpu.name, utf8));
  if (gpu.utilisation) flow.add(fmt::format("{:.0f} %", *gpu.utilisation * 100), Ink::kBusy);
  const bool almost_full = static_cast<double>(gpu.memory_used_bytes) >
                           kAlmostFull * static_cast<double>(gpu.memory_bytes);
  flow.add(
      fmt::format("{} of {}", format_bytes(gpu.memory_used_bytes), format_bytes(gpu.memory_bytes)),
      almost_full ? Ink::kBad : Ink::kMemory);
  if (gpu.power_w) flow.add(power_text(gpu));
  if (gpu.temperature_c) flow.add(fmt::format("{} {}C", *gpu.temperature_c, utf8 ? "°" : ""));
  if (gpu.sm_clock_mhz) flow.add(fmt::format("{} MHz", *gpu.sm_clock_mhz), Ink::kFaint);
  if (gpu.processes) {
    flow.add(counted(gpu.processes->size(), "process"), Ink::kFaint);
  }
}

// One line for each GPU, or several if it does not fit into `width`. Unknown values are left out.
std::vector<Line> gpu_lines(const std::vector<GpuSample>& gpus, size_t width, bool utf8) {
  std::vector<Line> lines;
  for (const auto& gpu : gpus) {
    Flow flow(width, kIndent);
    add_fields(flow, gpu, utf8);
    flow.finish(lines);
  }
  return lines;
}

// The columns of a device line, the same for all devices of a run.
struct Columns {
  size_t name = 0;
  size_t physical = 0;  // 0: no room for it
  size_t memory_bar = 0;
  size_t busy_bar = 0;
  size_t sparkline = 0;
  bool peak = false;
  bool capacity = false;
};

std::string percent(double value) {
  return std::isnan(value) ? "-" : fmt::format("{:.0f} %", value * 100);
}

std::string pad_left(const std::string& text, size_t width) {
  const size_t own = display_width(text);
  return std::string(own < width ? width - own : 0, ' ') + text;
}

std::string pad_right(const std::string& text, size_t width) {
  const size_t own = display_width(text);
  return text + std::string(own < width ? width - own : 0, ' ');
}

std::string repeat(const char* glyph, size_t count) {
  std::string text;
  for (size_t i = 0; i < count; ++i) text += glyph;
  return text;
}

size_t cells(double part, size_t width) {
  if (std::isnan(part)) return 0;
  return static_cast<size_t>(std::lround(std::clamp(part, 0.0, 1.0) * static_cast<double>(width)));
}

// A bar that is filled to `part` and marked up to `mark`.
void add_bar(Line& line, double part, double mark, size_t width, Ink ink, bool utf8) {
  const size_t filled = cells(part, width);
  const size_t marked = std::max(filled, cells(mark, width));
  line.add(repeat(utf8 ? "█" : "#", filled), ink);
  line.add(repeat(utf8 ? "▒" : "=", marked - filled), ink);
  line.add(repeat(utf8 ? "·" : ".", width - marked), Ink::kFaint);
}

int64_t largest_peak(const RunView& run) {
  int64_t largest = 0;
  for (const auto& rank : run.ranks) {
    for (const auto& device : rank.devices) {
      largest = std::max({largest, device.status.peak_bytes, device.status.live_bytes});
    }
  }
  return largest;
}

Columns divide(const RunView& run, const DrawStyle& style) {
  Columns columns;
  size_t physical = 0;
  for (const auto& rank : run.ranks) {
    for (const auto& device : rank.devices) {
      columns.name = std::max(columns.name, display_width(printable(device.status.name, true)));
      physical = std::max(physical, display_width(printable(device.status.physical, true)));
    }
  }
  columns.name = std::min(columns.name, size_t{12});
  size_t taken = kIndent + columns.name + 1 + 1 + kBytesWidth + 2 + 1 + kPercentWidth;
  const auto take = [&](size_t cost, size_t wanted_width) {
    if (style.width < wanted_width) return false;
    taken += cost;
    return true;
  };
  columns.peak = take(kBytesWidth + 7, 90);        // ", peak 36.1 MiB"
  columns.capacity = take(kBytesWidth + 11, 120);  // ", 100 % of 62.8 GiB"
  if (take(physical + 1, 110)) columns.physical = physical;
  const size_t left = style.width > taken ? style.width - taken : 0;
  if (left >= 24) columns.sparkline = std::min(left / 4, kRecentSamples);
  const size_t bars = left - (columns.sparkline > 0 ? columns.sparkline + 2 : 0);
  columns.memory_bar = std::min<size_t>(bars * 3 / 5, 40);
  columns.busy_bar = std::min<size_t>(bars - columns.memory_bar, 30);
  return columns;
}

std::string share_of_capacity(const DeviceStatus& device) {
  if (device.capacity_bytes <= 0) return "";
  const double share =
      static_cast<double>(device.live_bytes) / static_cast<double>(device.capacity_bytes);
  return fmt::format(", {:.0f} % of {}", share * 100, format_bytes(device.capacity_bytes));
}

bool almost_full(const DeviceStatus& device) {
  return device.capacity_bytes > 0 && static_cast<double>(device.live_bytes) >
                                          kAlmostFull * static_cast<double>(device.capacity_bytes);
}

Line device_line(const DeviceView& view, const Columns& columns, int64_t scale_bytes,
                 const DrawStyle& style) {
  const DeviceStatus& device = view.status;
  const auto scaled = [scale_bytes](int64_t bytes) {
    return scale_bytes > 0 ? static_cast<double>(bytes) / static_cast<double>(scale_bytes) : 0;
  };
  Line line;
  line.add(std::string(kIndent, ' ') + pad_right(printable(device.name, style.utf8), columns.name) +
           " ");
  if (columns.physical > 0) {
    line.add(pad_right(printable(device.physical, style.utf8), columns.physical) + " ",
             Ink::kFaint);
  }
  const Ink memory = almost_full(device) ? Ink::kBad : Ink::kMemory;
  add_bar(line, scaled(device.live_bytes), scaled(device.peak_bytes), columns.memory_bar, memory,
          style.utf8);
  line.add(" " + pad_left(format_bytes(device.live_bytes), kBytesWidth));
  if (columns.peak) line.add(", peak " + pad_left(format_bytes(device.peak_bytes), kBytesWidth));
  if (columns.capacity) line.add(pad_right(share_of_capacity(device), kBytesWidth + 11));
  line.add("  ");
  add_bar(line, view.busy, 0, columns.busy_bar, Ink::kBusy, style.utf8);
  line.add(" " + pad_left(percent(view.busy), kPercentWidth));
  if (columns.sparkline > 0) {
    line.add("  " + sparkline(view.recent, columns.sparkline, style.utf8), Ink::kBusy);
  }
  return line;
}

std::string collective_name(const CollectiveStatus& collective, bool utf8) {
  std::string text = printable(collective.operation, utf8);
  if (collective.sequence > 0) text += fmt::format(" #{}", collective.sequence);
  if (collective.bucket >= 0) text += fmt::format(" bucket {}", collective.bucket);
  return text;
}

std::string duration(double seconds, bool utf8) {
  return printable(format_seconds(seconds), utf8);
}

void add_rank_fields(Flow& flow, const RankView& rank, bool utf8) {
  const RankStatus& status = rank.status;
  flow.add(fmt::format("rank {}", status.rank), Ink::kStrong);
  flow.add(rank.state, rank.troubled ? Ink::kBad : Ink::kGood);
  if (status.pid == 0) return;
  flow.add(fmt::format("step {}", status.step));
  if (!std::isnan(rank.steps_per_s)) flow.add(fmt::format("{:.3g} steps/s", rank.steps_per_s));
  if (status.step > 0) flow.add(fmt::format("loss {:.4g}", status.loss));
  flow.add("busy " + percent(rank.busy));
  flow.add("comm " + percent(rank.communicating));
  flow.add("idle " + percent(rank.idle));
  if (rank.quiet_s > kQuietShown && status.phase == Phase::kTraining) {
    flow.add("silent for " + duration(rank.quiet_s, utf8), Ink::kWarn);
  }
  const CollectiveStatus& collective = status.collective;
  if (collective.sequence == 0) return;
  const bool running = collective.finished_ns == 0;
  const Ink ink = running ? Ink::kWarn : Ink::kPlain;
  flow.add(collective_name(collective, utf8), ink);
  const std::string size = collective.bytes > 0 ? format_bytes(collective.bytes) + " " : "";
  flow.add(fmt::format("{}{} {}", size, running ? "running for" : "took",
                       duration(rank.collective_s, utf8)),
           ink);
}

void add_trouble(std::vector<Line>& lines, std::string what, const DrawStyle& style) {
  std::replace(what.begin(), what.end(), '\n', ' ');
  const std::string indent(kIndent, ' ');
  const std::string text = wrap_text(printable(what, style.utf8), style.width, indent);
  size_t begin = 0;
  for (size_t count = 0; begin < text.size() && count < kErrorLines; ++count) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    Line line;
    line.add(text.substr(begin, end - begin), Ink::kBad);
    lines.push_back(std::move(line));
    begin = end + 1;
  }
}

std::string error_text(const FirstError& error) {
  std::string text = fmt::format("{}: {}", code_name(error.code), error.message);
  if (error.blamed_rank >= 0) text += fmt::format(" (because of rank {})", error.blamed_rank);
  return text;
}

void add_run(std::vector<Line>& lines, const RunView& run, const DrawStyle& style) {
  const int64_t scale_bytes = largest_peak(run);
  Flow title(style.width, kIndent);
  title.add(printable(run.info.run_name, style.utf8), Ink::kStrong);
  if (run.ended) title.add("ended", Ink::kWarn);
  title.add(counted(run.ranks.size(), "rank"));
  title.add("for " + duration(run.age_s, style.utf8));
  title.add(fmt::format("process {}", run.info.launcher_pid));
  if (scale_bytes > 0) {
    title.add("full memory bar = " + format_bytes(scale_bytes), Ink::kFaint);
  }
  title.finish(lines);
  const Columns columns = divide(run, style);
  for (const auto& rank : run.ranks) {
    Flow fields(style.width, kIndent);
    add_rank_fields(fields, rank, style.utf8);
    fields.finish(lines);
    if (!rank.problem.empty()) add_trouble(lines, rank.problem, style);
    if (rank.status.error) add_trouble(lines, error_text(*rank.status.error), style);
    for (const auto& device : rank.devices) {
      lines.push_back(device_line(device, columns, scale_bytes, style));
    }
  }
}

// What one line can say of a run: its first rank that started, and all ranks together.
struct RunSummary {
  const RankView* first = nullptr;
  size_t troubled = 0;
  double busy = kUnknown;  // mean of the ranks that know it
};

RunSummary summarise(const RunView& run) {
  RunSummary summary;
  double sum = 0;
  size_t known = 0;
  for (const auto& rank : run.ranks) {
    if (rank.troubled) ++summary.troubled;
    if (rank.status.pid != 0 && summary.first == nullptr) summary.first = &rank;
    if (std::isnan(rank.busy)) continue;
    sum += rank.busy;
    ++known;
  }
  if (known > 0) summary.busy = sum / static_cast<double>(known);
  return summary;
}

}  // namespace

std::string printable(const std::string& text, bool utf8) {
  std::string safe;
  for (size_t at = 0; at < text.size();) {
    const size_t count = character_bytes(text, at);
    const std::string character = text.substr(at, std::max<size_t>(1, count));
    if (count == 0 || is_control(character)) {
      safe += '?';
    } else if (count > 1 && !utf8) {
      safe += character == "µ" ? "u" : "?";
    } else {
      safe += character;
    }
    at += character.size();
  }
  return safe;
}

std::string no_run_text() {
  return "No run of yours is going on. One that starts is shown here: lockstep run -n 2 ./program";
}

std::string sparkline(const std::vector<double>& fractions, size_t width, bool utf8) {
  static constexpr std::array kBlocks = {"▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"};
  static constexpr std::array kAscii = {"_", ".", "-", "~", "=", "+", "*", "#"};
  const size_t count = std::min(width, fractions.size());
  std::string text(width - count, ' ');
  for (auto it = fractions.end() - static_cast<long>(count); it != fractions.end(); ++it) {
    const size_t level = cells(*it, kBlocks.size() - 1);
    text += utf8 ? kBlocks[level] : kAscii[level];
  }
  return text;
}

std::vector<std::string> draw_gpus(const TopView& view, const DrawStyle& style) {
  return render(gpu_lines(view.gpus, style.width, style.utf8), style.width, style.colour);
}

std::vector<std::string> draw_run(const RunView& run, const DrawStyle& style) {
  std::vector<Line> lines;
  add_run(lines, run, style);
  return render(lines, style.width, style.colour);
}

std::string draw_folded_run(const RunView& run, const DrawStyle& style) {
  const RunSummary summary = summarise(run);
  std::vector<Line> lines;
  Flow fields(style.width, 0);
  fields.add(printable(run.info.run_name, style.utf8), Ink::kStrong);
  if (run.ended) fields.add("ended", Ink::kWarn);
  if (summary.troubled > 0) {
    fields.add(fmt::format("{} in trouble", counted(summary.troubled, "rank")), Ink::kBad);
  }
  fields.add(counted(run.ranks.size(), "rank"));
  if (summary.first != nullptr) {
    const RankView& rank = *summary.first;
    if (summary.troubled == 0) fields.add(rank.state, Ink::kGood);
    fields.add(fmt::format("step {}", rank.status.step));
    if (!std::isnan(rank.steps_per_s)) fields.add(fmt::format("{:.3g} steps/s", rank.steps_per_s));
    if (rank.status.step > 0) fields.add(fmt::format("loss {:.4g}", rank.status.loss));
    fields.add("busy " + percent(summary.busy));
  }
  fields.finish(lines);
  return lines.front().text(style.width, style.colour);
}

std::vector<std::string> draw_runs(const TopView& view, const DrawStyle& style) {
  std::vector<std::string> texts = draw_gpus(view, style);
  for (const auto& run : view.runs) {
    if (!texts.empty()) texts.emplace_back();
    for (auto& line : draw_run(run, style)) texts.push_back(std::move(line));
  }
  return texts;
}

std::vector<std::string> rank_lines(const TopView& view) {
  std::vector<std::string> texts;
  for (const auto& line : gpu_lines(view.gpus, std::string::npos, true)) {
    texts.push_back(line.text(std::string::npos, false));
  }
  for (const auto& run : view.runs) {
    for (const auto& rank : run.ranks) {
      Flow fields(std::string::npos, 0);
      fields.add(printable(run.info.run_name, true));
      if (run.ended) fields.add("ended");
      add_rank_fields(fields, rank, true);
      if (rank.status.error) fields.add(printable(error_text(*rank.status.error), true));
      for (const auto& device : rank.devices) {
        fields.add(fmt::format("{} {} {}", printable(device.status.name, true),
                               format_bytes(device.status.live_bytes), percent(device.busy)));
      }
      std::vector<Line> lines;
      fields.finish(lines);
      texts.push_back(lines.front().text(std::string::npos, false));
    }
  }
  return texts;
}

}  // namespace lockstep::cli
