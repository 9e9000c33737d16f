#include "cli/top/top_command.hpp"

#include <fmt/format.h>

#include <CLI/CLI.hpp>

namespace lockstep::cli {
namespace {

constexpr const char* kExamples =
    "Examples:\n"
    "  lockstep top                   every run of yours, until q\n"
    "  lockstep top practical5        runs whose name begins so\n"
    "  lockstep top --once --json     one sample as a JSON object\n";

// CLI11's own would write the ends as 0.050000 and 3600.000000.
CLI::Validator between(double first, double last) {
  const auto check = [first, last](const std::string& text) -> std::string {
    double value = 0;
    if (CLI::detail::lexical_cast(text, value) && value >= first && value <= last) return "";
    return fmt::format("Value {} not in range {} to {}", text, first, last);
  };
  return CLI::Validator(check, "");
}

}  // namespace

CLI::App* add_top_command(CLI::App& app, TopOptions& options) {
  auto* top = app.add_subcommand("top", "watch runs: who is busy, who waits, whose memory is full");
  top->footer(kExamples);
  top->add_option("RUN", options.run, "a run's name or how it begins (default: all runs)")
      ->type_name("");
  top->add_flag("--once", options.once, "print one sample and end");
  top->add_flag("--json", options.json, "one JSON object per sample, a line each");
  top->add_option("--interval", options.interval_s, "time between samples")
      ->capture_default_str()
      ->check(between(0.05, 3600))
      ->type_name("SECONDS");
  return top;
}

}  // namespace lockstep::cli
