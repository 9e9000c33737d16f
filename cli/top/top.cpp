#include "cli/top/top.hpp"

#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <cstdio>
#include <nlohmann/json.hpp>

#include "cli/child.hpp"
#include "cli/top/top_draw.hpp"
#include "cli/top/top_json.hpp"
#include "cli/top/top_sample.hpp"
#include "cli/top/top_terminal.hpp"
#include "lockstep/clock.hpp"
#include "lockstep/table.hpp"

namespace lockstep::cli {
namespace {

// Readings of the runs asked for, turned into views.
class Watch {
 public:
  explicit Watch(const TopOptions& options) : selection_(options.run) {
    const auto all = read_runs();
    const auto chosen = select_runs(all, selection_);
    if (!selection_.empty() && chosen.empty()) fail_no_run(selection_, all);
    update(chosen);
  }

  void sample() { update(select_runs(read_runs(), selection_)); }
  const TopView& view() const { return view_; }

 private:
  void update(const std::vector<RunReading>& readings) {
    view_ = rates_.update(readings, monotonic_ns());
    view_.gpus = nvml_.sample();
  }

  std::string selection_;
  Nvml nvml_;  // opened once: that takes longer than to ask it
  TopRates rates_;
  TopView view_;
};

// Columns of the terminal that standard output is, or 100.
size_t output_width() {
  winsize window{};
  return ::ioctl(STDOUT_FILENO, TIOCGWINSZ, &window) == 0 && window.ws_col > 0 ? window.ws_col
                                                                               : 100;
}

void print_json(const TopView& view) {
  fmt::print("{}\n", top_json(view).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
}

void print_lines(const std::vector<std::string>& lines) {
  for (const auto& line : lines) fmt::print("{}\n", line);
}

// Waits without a screen; false: the user has had enough.
bool wait_plainly(const Interrupts& interrupts, int64_t deadline_ns) {
  while (true) {
    const int64_t left_ms = (deadline_ns - monotonic_ns() + 999'999) / 1'000'000;
    if (left_ms <= 0) return true;
    pollfd event{interrupts.descriptor(), POLLIN, 0};
    ::poll(&event, 1, static_cast<int>(std::min<int64_t>(left_ms, 1 << 30)));
    const int signal = interrupts.take();
    if (signal == SIGINT) return false;
    if (signal != 0) throw Interrupted{signal};
  }
}

int show_once(const TopOptions& options, int64_t interval_ns, const Interrupts& interrupts) {
  Watch watch(options);
  if (!watch.view().runs.empty()) {  // one reading has no rates
    if (!wait_plainly(interrupts, monotonic_ns() + interval_ns)) return 0;
    watch.sample();
  }
  if (options.json) {
    print_json(watch.view());
  } else {
    if (watch.view().runs.empty()) fmt::print("{}\n", no_run_text());
    print_lines(draw_runs(
        watch.view(),
        {.width = output_width(), .utf8 = locale_is_utf8(), .colour = may_style(STDOUT_FILENO)}));
  }
  return 0;
}

int print_stream(const TopOptions& options, int64_t interval_ns, const Interrupts& interrupts) {
  Watch watch(options);
  bool told_none = false;
  for (int64_t next = monotonic_ns() + interval_ns; wait_plainly(interrupts, next);
       next += interval_ns) {
    watch.sample();
    const bool none = watch.view().runs.empty();
    if (options.json) {
      print_json(watch.view());
    } else if (!none) {
      print_lines(rank_lines(watch.view()));
    } else if (!told_none) {
      fmt::print("{}\n", no_run_text());
    }
    told_none = none;
    if (std::fflush(stdout) != 0) return 0;  // nobody reads any more
  }
  return 0;
}

int show_screen(const TopOptions& options, int64_t interval_ns, const Interrupts& interrupts) {
  Watch watch(options);  // a wrong name is told before the screen changes
  const bool utf8 = locale_is_utf8();
  const bool colour = may_style(STDOUT_FILENO);
  Screen screen(interrupts);
  int64_t next = monotonic_ns() + interval_ns;
  while (true) {
    const auto [width, height] = screen.size();
    screen.show(draw_screen(watch.view(), options.interval_s, height,
                            {.width = width, .utf8 = utf8, .colour = colour}));
    switch (screen.wait_until(next)) {
      case Wake::kQuit:
        return 0;
      case Wake::kRedraw:
        break;
      case Wake::kTime:
        watch.sample();
        next = std::max(next, monotonic_ns() - interval_ns) + interval_ns;
        break;
    }
  }
}

}  // namespace

int run_top(const TopOptions& options) {
  const Interrupts interrupts;
  const auto interval_ns = static_cast<int64_t>(options.interval_s * 1e9);
  if (options.once) return show_once(options, interval_ns, interrupts);
  if (options.json || !can_redraw_output()) return print_stream(options, interval_ns, interrupts);
  return show_screen(options, interval_ns, interrupts);
}

}  // namespace lockstep::cli
