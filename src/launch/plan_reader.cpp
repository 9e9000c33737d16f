#include "launch/plan_reader.hpp"

#include <fmt/format.h>

#include "base/lists.hpp"
#include "lockstep/error.hpp"

namespace lockstep {

const Setting* PlanReader::find(std::string_view name) const {
  const auto found = settings_.find(name);
  return found == settings_.end() ? nullptr : &found->second;
}

void PlanReader::fail(const Setting& setting, const std::string& reason, const std::string& help) {
  throw Error(Code::kUsage, fmt::format("{} \"{}\" {}", setting.source, setting.text, reason),
              help);
}

void PlanReader::add_fact(std::string_view fact, std::string value, std::string source) {
  plan_.facts.push_back({std::string(fact), std::move(value), std::move(source)});
}

int PlanReader::whole(std::string_view name, std::string_view fact, int fallback, int first,
                      int last) {
  const Setting* setting = find(name);
  int value = fallback;
  if (setting != nullptr) {
    const auto number = parse_whole_number(setting->text);
    if (!number || *number < first || *number > last) {
      fail(*setting, fmt::format("is not a whole number from {} to {}", first, last),
           "`lockstep run --help` lists the flags");
    }
    value = *number;
  }
  add_fact(fact, std::to_string(value), setting == nullptr ? "default" : setting->source);
  return value;
}

double PlanReader::seconds(std::string_view name, std::string_view fact, double fallback) {
  const Setting* setting = find(name);
  double value = fallback;
  if (setting != nullptr) {
    const auto number = parse_finite_number(setting->text);
    if (!number || *number < 0 || *number > kLongestSeconds) {
      fail(*setting, fmt::format("is not a number of seconds from 0 to {:.0f}", kLongestSeconds),
           "write seconds, such as 2.5");
    }
    value = *number;
  }
  add_fact(fact, fmt::format("{} s", value), setting == nullptr ? "default" : setting->source);
  return value;
}

std::string PlanReader::text(std::string_view name, std::string_view fact,
                             const std::string& fallback) {
  const Setting* setting = find(name);
  if (setting != nullptr && setting->text.empty()) fail(*setting, "is empty", "give it a value");
  const std::string value = setting == nullptr ? fallback : setting->text;
  add_fact(fact, value, setting == nullptr ? "default" : setting->source);
  return value;
}

}  // namespace lockstep
