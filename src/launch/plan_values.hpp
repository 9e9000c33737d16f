#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "launch/flags.hpp"
#include "launch/plan.hpp"

namespace lockstep {

/// Reads settings one by one into values, and keeps what it read as facts of the plan. Every
/// refusal names the flag or variable, its text and the remedy.
class PlanReader {
 public:
  PlanReader(const Settings& settings, LaunchPlan& plan) : settings_(settings), plan_(plan) {}

  const Setting* find(std::string_view name) const;
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

/// "host", "host:29400", "[::1]:29400", "::1".
struct MeetingPlace {
  std::string host;
  int port = 0;
};
MeetingPlace parse_meeting_place(const Setting& setting, int default_port);

/// torchrun's stream numbers: "3" for every rank, or "0:1,1:2" by local rank: [local rank].
std::vector<int> parse_stream_bits(const Setting& setting, int local_world_size);

/// "SIGTERM,USR1": signals that the launcher handles, each once.
std::vector<int> parse_signals(const Setting& setting);

/// The number of `key` in "a=1,b=2"; `fallback` where it is not named.
double rendezvous_number(const Setting& conf, std::string_view key, double fallback);

}  // namespace lockstep
