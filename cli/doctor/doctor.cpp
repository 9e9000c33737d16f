#include "cli/doctor/doctor.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "cli/doctor/facts.hpp"
#include "lockstep/table.hpp"
#include "lockstep/version.hpp"

namespace lockstep::cli {
namespace {

using nlohmann::json;

constexpr size_t kWidth = 100;
constexpr size_t kIndent = 22;  // columns before a value: "  pass  thread budget "

int64_t count(const std::vector<Finding>& findings, Level level) {
  return std::count_if(findings.begin(), findings.end(),
                       [level](const Finding& finding) { return finding.level == level; });
}

std::string coloured(Level level, bool style) {
  if (!style) return level_name(level);
  const int color = level == Level::kPass ? 32 : level == Level::kWarn ? 33 : 31;
  return fmt::format("\033[{}m{}\033[0m", color, level_name(level));
}

void print_findings(const std::vector<Finding>& findings) {
  const bool style = may_style(STDOUT_FILENO);
  const std::string indent(kIndent, ' ');
  for (const auto& finding : findings) {
    const std::string value = wrap_text(finding.value, kWidth, indent).substr(kIndent);
    fmt::print("  {}  {:<14}{}\n", coloured(finding.level, style), finding.check, value);
    if (!finding.remedy.empty()) {
      fmt::print("{}\n", wrap_text("help: " + finding.remedy, kWidth, indent));
    }
  }
  fmt::print("\n{} checks: {} passed, {} warned, {} failed\n", findings.size(),
             count(findings, Level::kPass), count(findings, Level::kWarn),
             count(findings, Level::kFail));
}

void print_json(const json& facts, const std::vector<Finding>& findings, bool ok) {
  json list = json::array();
  for (const auto& finding : findings) {
    list.push_back({{"check", finding.check},
                    {"level", level_name(finding.level)},
                    {"value", finding.value},
                    {"remedy", finding.remedy}});
  }
  const json report = {{"schema", 1}, {"ok", ok}, {"findings", list}, {"facts", facts}};
  fmt::print("{}\n", report.dump(2, ' ', false, json::error_handler_t::replace));
}

}  // namespace

int run_doctor(bool as_json) {
  const Interrupts interrupts;
  const json facts = {{"lockstep", kVersion},
                      {"machine", machine_facts()},
                      {"probe", probe_facts(true, interrupts)}};
  const auto findings = diagnose(facts);
  const bool ok = count(findings, Level::kFail) == 0;
  if (as_json) {
    print_json(facts, findings, ok);
  } else {
    print_findings(findings);
  }
  return ok ? 0 : 1;
}

}  // namespace lockstep::cli
