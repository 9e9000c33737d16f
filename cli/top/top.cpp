#include "cli/top/top.hpp"

#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "cli/child.hpp"
#include "cli/terminal.hpp"
#include "cli/top/top_draw.hpp"
#include "cli/top/top_sample.hpp"
#include "cli/top/top_screen.hpp"
#include "cli/top/top_terminal.hpp"
#include "lockstep/cli_parse.hpp"
#include "lockstep/clock.hpp"
#include "lockstep/table.hpp"

namespace lockstep::cli {
namespace {

const std::vector<Example> kTopExamples = {
    {"lockstep top", "every run of yours, until q"},
    {"lockstep top practical5", "runs whose names begin with practical5"},
    {"lockstep top --once", "one sample of every run, printed"},
    {"lockstep top --once --json", "one sample as a JSON object"}};

// CLI11's own validator would write the limits as 0.050000 and 3600.000000.
CLI::Validator between(double first, double last) {
  const auto check = [first, last](const std::string& text) -> std::string {
    double value = 0;
    if (CLI::detail::lexical_cast(text, value) && value >= first && value <= last) return "";
    return fmt::format("Value {} not in range {} to {}", text, first, last);
  };
  return CLI::Validator(check, "");
}

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
  Nvml nvml_;  // opened once, since opening takes longer than a query
  TopRates rates_;
  TopView view_;
};

// The width of lines that go to a pipe.
constexpr size_t kPipeWidth = 100;

void print_view_json(const TopView& view) {
  fmt::print("{}\n", top_json(view).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
}

void print_lines(const std::vector<std::string>& lines) {
  for (const auto& line : lines) fmt::print("{}\n", line);
}

// Waits without a screen. Returns false if the user wants to quit.
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
    print_view_json(watch.view());
  } else {
    const size_t width = terminal_width(STDOUT_FILENO);
    if (watch.view().runs.empty()) fmt::print("{}\n", no_run_text());
    print_lines(draw_runs(watch.view(), {.width = width == kAnyWidth ? kPipeWidth : width,
                                         .utf8 = locale_is_utf8(),
                                         .colour = may_style(STDOUT_FILENO)}));
  }
  return 0;
}

int print_stream(const TopOptions& options, int64_t interval_ns, const Interrupts& interrupts) {
  Watch watch(options);
  bool reported_none = false;
  for (int64_t next = monotonic_ns() + interval_ns; wait_plainly(interrupts, next);
       next += interval_ns) {
    watch.sample();
    const bool none = watch.view().runs.empty();
    if (options.json) {
      print_view_json(watch.view());
    } else if (!none) {
      print_lines(rank_lines(watch.view()));
    } else if (!reported_none) {
      fmt::print("{}\n", no_run_text());
    }
    reported_none = none;
    if (std::fflush(stdout) != 0) return 0;  // nobody reads any more
  }
  return 0;
}

int show_screen(const TopOptions& options, int64_t interval_ns, const Interrupts& interrupts) {
  Watch watch(options);  // reports a wrong name before the screen changes
  const bool utf8 = locale_is_utf8();
  const bool colour = may_style(STDOUT_FILENO);
  TopScreen shown(options.interval_s);
  Screen screen(interrupts);
  int64_t next = monotonic_ns() + interval_ns;
  while (true) {
    const auto [width, height] = screen.size();
    screen.show(shown.draw(watch.view(), height, {.width = width, .utf8 = utf8, .colour = colour}));
    switch (screen.wait_until(next)) {
      case Wake::kQuit:
        return 0;
      case Wake::kKeys:
        if (!shown.press(decode_keys(screen.take_typed()))) return 0;
        break;
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

CLI::App* add_top_command(CLI::App& app, TopOptions& options) {
  auto* top = app.add_subcommand("top", "watch runs: who is busy, who waits, whose memory is full");
  top->footer(format_examples(kTopExamples));
  top->add_option("RUN", options.run, "a run's name or a prefix of it (default: all runs)")
      ->type_name("");
  top->add_flag("--once", options.once, "print one sample and end");
  top->add_flag("--json", options.json, "one JSON object per sample, a line each");
  top->add_option("--interval", options.interval_s, "time between samples")
      ->capture_default_str()
      ->check(between(0.05, 3600))
      ->type_name("SECONDS");
  return top;
}

int run_top(const TopOptions& options) {
  const Interrupts interrupts;
  const auto interval_ns = static_cast<int64_t>(options.interval_s * 1e9);
  if (options.once) return show_once(options, interval_ns, interrupts);
  if (options.json || !can_redraw(STDOUT_FILENO))
    return print_stream(options, interval_ns, interrupts);
  return show_screen(options, interval_ns, interrupts);
}

}  // namespace lockstep::cli
