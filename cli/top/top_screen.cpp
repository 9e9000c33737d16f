#include "cli/top/top_screen.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <utility>

#include "base/counted.hpp"
#include "cli/top/top_line.hpp"
#include "lockstep/table.hpp"
#include "lockstep/units.hpp"

namespace lockstep::cli {
namespace {

struct Sequence {
  std::string_view bytes;
  Key key;
};

// As xterm, the Linux console, tmux and screen send them.
constexpr std::array kSequences = {
    Sequence{"\033[A", Key::kUp},      Sequence{"\033OA", Key::kUp},
    Sequence{"\033[B", Key::kDown},    Sequence{"\033OB", Key::kDown},
    Sequence{"\033[5~", Key::kPageUp}, Sequence{"\033[6~", Key::kPageDown},
    Sequence{"\033[H", Key::kHome},    Sequence{"\033OH", Key::kHome},
    Sequence{"\033[1~", Key::kHome},   Sequence{"\033[F", Key::kEnd},
    Sequence{"\033OF", Key::kEnd},     Sequence{"\033[4~", Key::kEnd},
    Sequence{"\r", Key::kEnter},       Sequence{"\n", Key::kEnter},
    Sequence{"\x7f", Key::kErase},     Sequence{"\b", Key::kErase}};

// The length of an escape sequence: its introducer, parameters, and one final byte.
size_t escape_length(std::string_view typed) {
  if (typed.size() < 2) return 1;
  if (typed[1] == 'O') return std::min<size_t>(3, typed.size());
  if (typed[1] != '[') return 1;
  size_t end = 2;
  while (end < typed.size() && (typed[end] < '@' || typed[end] > '~')) ++end;
  return std::min(end + 1, typed.size());
}

constexpr size_t kMarkWidth = 2;  // "> " before each line of a run

}  // namespace

std::vector<KeyPress> decode_keys(std::string_view typed) {
  std::vector<KeyPress> keys;
  while (!typed.empty()) {
    const auto known = std::find_if(kSequences.begin(), kSequences.end(), [typed](const auto& one) {
      return typed.starts_with(one.bytes);
    });
    if (known != kSequences.end()) {
      keys.push_back({known->key});
      typed.remove_prefix(known->bytes.size());
    } else if (typed[0] == '\033') {
      const size_t length = escape_length(typed);
      if (length == 1) keys.push_back({Key::kEscape});
      typed.remove_prefix(length);
    } else {
      if (typed[0] >= ' ') keys.push_back({Key::kCharacter, typed[0]});
      typed.remove_prefix(1);
    }
  }
  return keys;
}

std::string TopScreen::id_of(const RunView& run) const {
  return fmt::format("{} {} {}", run.info.run_name, run.info.launcher_pid, run.info.started_ns);
}

bool TopScreen::press(const std::vector<KeyPress>& keys) {
  for (const auto& key : keys) {
    if (typing_) {
      press_while_typing(key);
    } else {
      press_one(key);
    }
    if (quit_) return false;
  }
  return true;
}

void TopScreen::press_while_typing(const KeyPress& pressed) {
  first_ = 0;
  if (pressed.key == Key::kCharacter) {
    filter_ += pressed.character;
  } else if (pressed.key == Key::kErase && !filter_.empty()) {
    filter_.pop_back();
  } else if (pressed.key == Key::kEnter) {
    typing_ = false;
  } else if (pressed.key == Key::kEscape) {
    typing_ = false;
    filter_.clear();
  }
}

void TopScreen::press_one(const KeyPress& pressed) {
  const size_t at = selected_index();
  const size_t last = entries_.empty() ? 0 : entries_.size() - 1;
  const size_t page = std::max<size_t>(1, room_ - 1);
  const auto scroll_up = [&](size_t lines) { first_ -= std::min(first_, lines); };
  const auto scroll_down = [&](size_t lines) { first_ += lines; };  // draw() knows where they end
  // One run needs no selection, so that the arrows scroll its lines.
  const auto up = [&] { at > 0 ? select(at - 1) : scroll_up(1); };
  const auto down = [&] { at < last ? select(at + 1) : scroll_down(1); };
  switch (pressed.key) {
    case Key::kUp:
      return up();
    case Key::kDown:
      return down();
    case Key::kHome:
      select(0);
      first_ = 0;
      return;
    case Key::kEnd:
      return select(last);
    case Key::kPageUp:
      return scroll_up(page);
    case Key::kPageDown:
      return scroll_down(page);
    case Key::kEnter:
      if (!entries_.empty()) open_by_user_[entries_[at].id] = !entries_[at].open;
      return select(at);
    case Key::kEscape:
      filter_.clear();
      return;
    case Key::kErase:
      return;
    case Key::kCharacter:
      break;
  }
  switch (pressed.character) {
    case 'q':
    case 'Q':
      quit_ = true;
      return;
    case 'k':
      return up();
    case 'j':
      return down();
    case 'b':
      return scroll_up(page);
    case ' ':
      return scroll_down(page);
    case '/':
      typing_ = true;
      filter_.clear();
      return;
    case 'a': {
      const bool open = std::all_of(entries_.begin(), entries_.end(),
                                    [](const Entry& entry) { return entry.open; });
      for (const auto& entry : entries_) open_by_user_[entry.id] = !open;
      return select(at);
    }
    default:
      return;
  }
}

void TopScreen::select(size_t index) {
  if (entries_.empty()) return;
  selected_ = entries_[index].id;
  follow_ = true;
}

// The first where the one selected has gone.
size_t TopScreen::selected_index() const {
  for (size_t i = 0; i < entries_.size(); ++i) {
    if (entries_[i].id == selected_) return i;
  }
  return 0;
}

std::vector<const RunView*> TopScreen::chosen_runs(const TopView& view) const {
  std::vector<const RunView*> runs;
  for (const auto& run : view.runs) {
    if (run.info.run_name.find(filter_) != std::string::npos) runs.push_back(&run);
  }
  return runs;
}

std::string TopScreen::title(const TopView& view, size_t shown, const DrawStyle& style) const {
  const size_t all = view.runs.size();
  Flow fields(style.width, 0);
  fields.add("lockstep top", Ink::kStrong);
  const std::string some = shown < all ? fmt::format("{} of ", shown) : "";
  fields.add(some + counted(all, "run"));
  if (!filter_.empty() && !typing_) {
    fields.add(fmt::format("with \"{}\"", filter_), Ink::kWarn);
  }
  fields.add("every " + printable(format_seconds(interval_s_), style.utf8), Ink::kFaint);
  std::vector<Line> lines;
  fields.finish(lines);
  return lines.front().text(style.width, style.colour);
}

// The keys, the most important first: what does not fit is left out.
std::string TopScreen::last_line(size_t lines, size_t room, const DrawStyle& style) const {
  Line line;
  if (typing_) {
    line.add("name: " + filter_ + (style.utf8 ? "▏" : "_"), Ink::kStrong);
    line.add("  Enter keeps it, Esc shows all", Ink::kFaint);
    return line.text(style.width, style.colour);
  }
  std::vector<std::string> keys = {"q quit"};
  if (entries_.size() > 1) keys.push_back(style.utf8 ? "↑↓ select" : "j/k select");
  if (!entries_.empty()) keys.push_back("Enter fold");
  std::string position;
  if (lines > room) {
    position = fmt::format("{}-{} of {}", first_ + 1, std::min(first_ + room, lines), lines);
    keys.push_back("PgUp/PgDn scroll");
  }
  if (entries_.size() > 1 || !filter_.empty()) keys.push_back("/ find");
  if (entries_.size() > 1) keys.push_back("a all");
  const size_t reserved = position.empty() ? 0 : position.size() + 2;
  for (const auto& key : keys) {
    const size_t gap = line.width() > 0 ? 2 : 0;
    if (line.width() + gap + display_width(key) + reserved > style.width) continue;
    line.add(std::string(gap, ' '));
    line.add(key, Ink::kFaint);
  }
  if (!position.empty() && line.width() + reserved <= style.width) {
    line.add(std::string(style.width - line.width() - position.size(), ' '));
    line.add(position, Ink::kWarn);
  }
  return line.text(style.width, style.colour);
}

std::vector<std::string> TopScreen::draw(const TopView& view, size_t height,
                                         const DrawStyle& style) {
  const auto runs = chosen_runs(view);
  room_ = height > 2 ? height - 2 : 1;
  const bool marked = runs.size() > 1 && style.width > kMarkWidth;  // one run needs no selection
  DrawStyle inner = style;
  if (marked) inner.width = style.width - kMarkWidth;

  const std::vector<std::string> gpus = draw_gpus(view, style);
  std::vector<std::vector<std::string>> drawn;  // [run], unfolded
  size_t all = gpus.size();
  for (const RunView* run : runs) {
    drawn.push_back(draw_run(*run, inner));
    all += drawn.back().size() + (all > 0 ? 1 : 0);
  }
  const bool fits = all <= room_;

  std::vector<std::string> lines;
  if (runs.empty()) {
    const std::string none =
        view.runs.empty() ? no_run_text() : fmt::format("no run's name has \"{}\" in it", filter_);
    const std::string text = wrap_text(printable(none, style.utf8), style.width);
    for (size_t begin = 0; begin <= text.size();) {
      const size_t end = std::min(text.find('\n', begin), text.size());
      Line line;
      line.add(text.substr(begin, end - begin));
      lines.push_back(line.text(style.width, style.colour));
      begin = end + 1;
    }
    if (!gpus.empty()) lines.emplace_back();
  }
  lines.insert(lines.end(), gpus.begin(), gpus.end());
  entries_.clear();
  for (size_t i = 0; i < runs.size(); ++i) {
    const std::string id = id_of(*runs[i]);
    const auto by_user = open_by_user_.find(id);
    const bool open = by_user != open_by_user_.end() ? by_user->second : fits || runs.size() == 1;
    // Unfolded runs stand apart.
    const bool apart = open || (i > 0 && entries_.back().open);
    if (!lines.empty() && apart) lines.emplace_back();
    entries_.push_back({id, open, lines.size(), 0});
    if (!open) drawn[i] = {draw_folded_run(*runs[i], inner)};
    for (auto& line : drawn[i]) lines.push_back(std::move(line));
    entries_.back().end = lines.size();
  }
  if (marked) {
    const size_t chosen = selected_index();
    for (size_t i = 0; i < entries_.size(); ++i) {
      for (size_t at = entries_[i].begin; at < entries_[i].end; ++at) {
        const char* mark = i != chosen ? "  " : !style.utf8 ? "> " : "▌ ";
        lines[at] = mark + lines[at];
      }
    }
  }
  if (std::exchange(follow_, false) && !entries_.empty()) {
    const Entry& entry = entries_[selected_index()];
    if (entry.end > first_ + room_) first_ = entry.end - room_;
    if (entry.begin < first_) first_ = entry.begin;
  }
  first_ = std::min(first_, lines.size() > room_ ? lines.size() - room_ : 0);

  std::vector<std::string> texts = {title(view, runs.size(), style)};
  for (size_t at = first_; at < std::min(first_ + room_, lines.size()); ++at) {
    texts.push_back(std::move(lines[at]));
  }
  // The keys stay in the last row of the window.
  texts.resize(std::max<size_t>(texts.size(), height > 1 ? height - 1 : 1));
  texts.push_back(last_line(lines.size(), room_, style));
  texts.resize(std::min(texts.size(), std::max<size_t>(1, height)));
  return texts;
}

}  // namespace lockstep::cli
