#include "course/run_checkpoint.hpp"

#include <fmt/format.h>

#include <array>
#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "lockstep/error.hpp"

namespace course {
namespace {

using lockstep::Code;
using lockstep::Error;

// Flags that decide what is computed. A run that goes on with another value of one of them would
// not be the run that was saved. The others only divide the work, or watch it.
constexpr std::array kSameFlags = {
    "batch", "dim",       "hidden",         "depth",       "lr",          "seed",
    "model", "data",      "optimizer",      "init",        "accum-steps", "no-divide",
    "amp",   "no-scaler", "master-weights", "overflow-at", "compress"};

nlohmann::json flags_of(const Options& options) {
  const auto all = options.as_text();
  nlohmann::json same = {{"program", options.program}};
  for (const char* flag : kSameFlags) {
    if (const auto found = all.find(flag); found != all.end()) same[flag] = found->second;
  }
  return same;
}

void require_same_flags(const Options& options, const nlohmann::json& saved) {
  const nlohmann::json ours = flags_of(options);
  for (const auto& [flag, value] : ours.items()) {
    const std::string before = saved.value(flag, "");
    if (value == before) continue;
    throw Error(Code::kUsage,
                fmt::format("--checkpoint {} was saved with {} \"{}\", and this run has \"{}\"",
                            *options.checkpoint, flag, before, value.get<std::string>()),
                "give the flags of the run that was saved, or another folder");
  }
}

}  // namespace

RunCheckpoint::RunCheckpoint(const Options& options, const lockstep::World* world)
    : options_(options),
      prints_(!options.quiet && (world == nullptr || world->rank() == 0)),
      checkpoint_(
          options.checkpoint.value(),
          world != nullptr ? world->comm() : lockstep::Communicator::self(),
          {.every = options.checkpoint_every, .keep = static_cast<int>(options.checkpoint_keep)}) {
  // First, so that nothing has been loaded when flags differ.
  checkpoint_.add(
      "flags", [this] { return flags_of(options_); },
      [this](const nlohmann::json& saved) { require_same_flags(options_, saved); });
}

int64_t RunCheckpoint::resume() {
  resumed_after_ = checkpoint_.resume();
  if (resumed_after_ > options_.steps) {
    throw Error(Code::kUsage,
                fmt::format("--steps {}, but --checkpoint {} has step {}", options_.steps,
                            *options_.checkpoint, resumed_after_),
                fmt::format("give --steps {} or more, or another folder", resumed_after_));
  }
  if (resumed_after_ > 0 && prints_) {
    fmt::print(options_.out(), "resumed after step {} of {} from {}{}\n", resumed_after_,
               options_.steps, *options_.checkpoint,
               resumed_after_ == options_.steps ? ": nothing is left to train" : "");
  }
  return resumed_after_;
}

void RunCheckpoint::save_last(int64_t steps_done) {
  if (steps_done > 0) checkpoint_.save(steps_done);
}

}  // namespace course
