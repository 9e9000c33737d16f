#include <fmt/format.h>

#include "launch/plan.hpp"
#include "lockstep/table.hpp"
#include "lockstep/version.hpp"

namespace lockstep {
namespace {

std::string plural(int count, const char* noun) {
  return fmt::format("{} {}{}", count, noun, count == 1 ? "" : "s");
}

// "1 thread and 1 core each", "2 threads each, cores shared".
std::string share_of_each(const LaunchPlan& plan) {
  const std::string threads = plural(plan.threads, "thread");
  const auto& cores = plan.slots[0].cores;
  if (!cores.empty()) {
    return fmt::format("{} and {} each", threads, plural(static_cast<int>(cores.size()), "core"));
  }
  return fmt::format("{} each, {} {}", threads,
                     plural(static_cast<int>(plan.host_cores.size()), "core"),
                     plan.pin ? "shared" : "not pinned");
}

}  // namespace

std::string describe_plan(const LaunchPlan& plan) {
  Table table("What lockstep run would do", {{"what"}, {"value"}, {"from"}});
  for (const auto& fact : plan.facts) table.add_row({fact.name, fact.value, fact.source});
  for (const auto& note : plan.notes) table.add_note(note);
  return table.terminal(false);
}

std::string start_line(const LaunchPlan& plan) {
  const std::string hosts =
      plan.nnodes == 1 ? "" : fmt::format(" on each of {} hosts", plan.nnodes);
  return fmt::format("lockstep {}: {}{}, {}, backend {}, {} {}", kVersion,
                     plural(plan.local_world_size, "rank"), hosts, share_of_each(plan),
                     plan.backend.empty() ? "auto" : plan.backend,
                     plan.keep_logs ? "logs in" : "logs after a failure in", plan.log_folder);
}

}  // namespace lockstep
