#include "launch/plan_values.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "launch/number_list.hpp"
#include "launch/signal_watch.hpp"
#include "lockstep/error.hpp"

namespace lockstep {
namespace {

constexpr double kLongestSeconds = 1e7;

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(separator, begin), text.size());
    parts.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

}  // namespace

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

MeetingPlace parse_meeting_place(const Setting& setting, int default_port) {
  const std::string& text = setting.text;
  const char* help = "write HOST:PORT, such as node0:29400";
  MeetingPlace place{text, default_port};
  std::string port;
  if (text.starts_with('[')) {
    const size_t close = text.find(']');
    if (close == std::string::npos) PlanReader::fail(setting, "lacks its ]", help);
    place.host = text.substr(1, close - 1);
    const std::string rest = text.substr(close + 1);
    if (!rest.empty() && rest[0] != ':') PlanReader::fail(setting, "is not HOST:PORT", help);
    if (!rest.empty()) port = rest.substr(1);
  } else if (const size_t colon = text.find(':');
             colon != std::string::npos && text.rfind(':') == colon) {
    place.host = text.substr(0, colon);
    port = text.substr(colon + 1);
    if (port.empty()) PlanReader::fail(setting, "ends where a port should stand", help);
  }
  if (place.host.empty()) PlanReader::fail(setting, "names no host", help);
  if (port.empty()) return place;
  const auto number = parse_whole_number(port);
  if (!number || *number < 1 || *number > 65535) {
    PlanReader::fail(setting, fmt::format("has no port from 1 to 65535: \"{}\"", port), help);
  }
  place.port = *number;
  return place;
}

std::vector<int> parse_stream_bits(const Setting& setting, int local_world_size) {
  const char* help = "write 0, 1 (output), 2 (errors) or 3 (both), or by local rank: 0:1,1:3";
  std::vector<int> bits(static_cast<size_t>(local_world_size), 0);
  const auto parse_bits = [&](std::string_view text) {
    const auto number = parse_whole_number(text);
    if (!number || *number < 0 || *number > 3) {
      PlanReader::fail(setting, fmt::format("has \"{}\" where 0, 1, 2 or 3 belongs", text), help);
    }
    return *number;
  };
  if (setting.text.find(':') == std::string::npos) {
    bits.assign(bits.size(), parse_bits(setting.text));
    return bits;
  }
  for (const std::string_view item : split(setting.text, ',')) {
    const size_t colon = item.find(':');
    const auto rank = parse_whole_number(item.substr(0, colon));
    if (colon == std::string_view::npos || !rank || *rank < 0 || *rank >= local_world_size) {
      PlanReader::fail(setting,
                       fmt::format("has \"{}\", which names no local rank from 0 to {}", item,
                                   local_world_size - 1),
                       help);
    }
    bits[static_cast<size_t>(*rank)] = parse_bits(item.substr(colon + 1));
  }
  return bits;
}

std::vector<int> parse_signals(const Setting& setting) {
  std::vector<int> signals;
  for (const std::string_view item : split(setting.text, ',')) {
    const auto& known = known_signals();
    const auto found = std::find_if(known.begin(), known.end(), [item](const SignalInfo& info) {
      return item == info.name || item == info.name.substr(3);
    });
    if (found == known.end()) {
      std::string names;
      for (const SignalInfo& info : known) names += fmt::format(" {}", info.name);
      PlanReader::fail(setting, fmt::format("has \"{}\", which lockstep cannot handle", item),
                       "write names with commas between them, of these:" + names);
    }
    if (std::find(signals.begin(), signals.end(), found->number) == signals.end()) {
      signals.push_back(found->number);
    }
  }
  return signals;
}

double rendezvous_number(const Setting& conf, std::string_view key, double fallback) {
  for (const std::string_view item : split(conf.text, ',')) {
    const size_t equals = item.find('=');
    if (equals == std::string_view::npos) {
      PlanReader::fail(conf, fmt::format("has \"{}\" where KEY=VALUE belongs", item),
                       "write join_timeout=300");
    }
    if (item.substr(0, equals) != key) continue;
    const auto number = parse_finite_number(item.substr(equals + 1));
    if (!number || *number <= 0 || *number > kLongestSeconds) {
      PlanReader::fail(conf, fmt::format("has no number of seconds for {}", key),
                       fmt::format("write {}=300", key));
    }
    return *number;
  }
  return fallback;
}

}  // namespace lockstep
