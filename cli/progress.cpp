#include "cli/progress.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <string_view>

#include "base/standard_streams.hpp"
#include "lockstep/units.hpp"

namespace lockstep::cli {
namespace {

constexpr int kBarWidth = 24;

bool can_redraw() {
  const char* term = std::getenv("TERM");
  return ::isatty(STDERR_FILENO) == 1 && term != nullptr && std::string_view(term) != "dumb";
}

}  // namespace

Progress::Progress(int experiments, double total_weight)
    : bar_(can_redraw()), experiments_(experiments), total_weight_(total_weight) {}

Progress::~Progress() {
  if (bar_) print_error("\r\033[K");
}

void Progress::begin(const std::string& title, double weight) {
  title_ = title;
  weight_ = weight;
  begun_ = Clock::now();
  tick();
}

void Progress::tick() {
  if (!bar_) return;
  const int filled = static_cast<int>(kBarWidth * done_weight_ / total_weight_);
  std::string bar;
  for (int i = 0; i < kBarWidth; ++i) bar += i < filled ? "█" : "░";
  const double left = seconds_left();
  print_error(fmt::format("\r\033[K{} {}/{}  {}{}", bar, done_ + 1, experiments_, title_,
                          left > 0 ? fmt::format("  about {:.0f} s left", left) : ""));
}

void Progress::end() {
  const double seconds = std::chrono::duration<double>(Clock::now() - begun_).count();
  ++done_;
  done_weight_ += weight_;
  spent_s_ += seconds;
  if (!bar_) {
    print_error(
        fmt::format("[{}/{}] {}: {}\n", done_, experiments_, title_, format_seconds(seconds)));
  }
}

double Progress::seconds_left() const {
  if (done_weight_ <= 0) return 0;
  const double running = std::chrono::duration<double>(Clock::now() - begun_).count();
  return std::max(0.0, spent_s_ / done_weight_ * (total_weight_ - done_weight_) - running);
}

}  // namespace lockstep::cli
