#pragma once

#include <string>
#include <string_view>

#include "launch/flags.hpp"
#include "launch/plan.hpp"

namespace lockstep {

/// The longest time that a flag takes.
inline constexpr double kLongestSeconds = 1e7;

/// Reads settings one by one, and records each value as a fact of the plan. Every error names the
/// flag or variable, its text and the remedy.
class PlanReader {
 public:
  PlanReader(const Settings& settings, LaunchPlan& plan) : settings_(settings), plan_(plan) {}

  const Setting* find(std::string_view name) const;  ///< nullptr if not set
  bool is_on(std::string_view name) const { return find(name) != nullptr; }

  int whole(std::string_view name, std::string_view fact, int fallback, int first, int last);
  double seconds(std::string_view name, std::string_view fact, double fallback);
  std::string text(std::string_view name, std::string_view fact, const std::string& fallback);

  void add_fact(std::string_view fact, std::string value, std::string source);

  [[noreturn]] static void fail(const Setting& setting, const std::string& reason,
                                const std::string& help);

 private:
  const Settings& settings_;
  LaunchPlan& plan_;
};

/// Plans how many hosts there are, where and how long they wait for each other, and when one counts
/// as lost; for one host, MASTER_ADDR and MASTER_PORT.
void plan_hosts(PlanReader& reader, LaunchPlan& plan);

}  // namespace lockstep
