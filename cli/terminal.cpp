#include "cli/terminal.hpp"

#include <fmt/format.h>
#include <langinfo.h>
#include <locale.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <string_view>

#include "lockstep/table.hpp"

namespace lockstep::cli {
namespace {

constexpr size_t kBarWidth = 24;
constexpr size_t kLeastTitle = 20;  // columns; with fewer there is no bar

std::string rough_time(double seconds) {
  if (seconds < 90) return fmt::format("{:.0f} s", seconds);
  return fmt::format("{:.0f} min", seconds / 60);
}

}  // namespace

bool can_redraw(int descriptor) {
  const char* term = std::getenv("TERM");
  return ::isatty(descriptor) == 1 && term != nullptr && *term != '\0' &&
         std::string_view(term) != "dumb";
}

bool locale_is_utf8() {
  const locale_t locale = ::newlocale(LC_CTYPE_MASK, "", nullptr);
  if (locale == nullptr) return false;
  const bool utf8 = std::string_view(::nl_langinfo_l(CODESET, locale)) == "UTF-8";
  ::freelocale(locale);
  return utf8;
}

std::string progress_line(const ProgressState& state, size_t width, bool utf8) {
  const std::string count = fmt::format("{}/{}  ", state.done + 1, state.all);
  const std::string left =
      state.seconds_left > 0 ? fmt::format("  about {} left", rough_time(state.seconds_left)) : "";
  const size_t fixed = count.size() + left.size();
  std::string bar;
  if (fixed + kBarWidth + 1 + kLeastTitle <= width) {
    const auto filled = static_cast<size_t>(std::clamp(state.share, 0.0, 1.0) * kBarWidth);
    for (size_t i = 0; i < kBarWidth; ++i) {
      bar += utf8 ? (i < filled ? "█" : "░") : (i < filled ? "#" : ".");
    }
    bar += " ";
  }
  const size_t taken = fixed + (bar.empty() ? 0 : kBarWidth + 1);
  const std::string title = clip_text(state.title, width > taken ? width - taken : 0);
  return clip_text(bar + count + title + left, width);
}

}  // namespace lockstep::cli
