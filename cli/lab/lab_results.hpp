#pragma once

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "cli/lab/lab_plan.hpp"
#include "lockstep/record.hpp"

namespace lockstep::cli {

/// Every experiment of a lab with its record.
using Finished = std::vector<std::pair<Experiment, RunRecord>>;

/// The repeated runs of one program on one set of devices.
struct RunSet {
  int devices = 1;
  std::vector<RunRecord> runs;  // [repetition]
};

/// The element with this key, made where it is missing; elements stay ascending by key.
template <class Element, class Key>
Element& place_for(std::vector<Element>& all, Key Element::*key, Key value) {
  auto place = std::find_if(all.begin(), all.end(),
                            [&](const Element& element) { return element.*key >= value; });
  if (place == all.end() || (*place).*key != value) {
    place = all.emplace(place);
    (*place).*key = value;
  }
  return *place;
}

/// Every record to the set-up that `set_for` names for its variant.
template <class SetFor>
void collect_runs(const Finished& finished, const SetFor& set_for) {
  for (const auto& [experiment, record] : finished) {
    RunSet& set_up = set_for(experiment.variant);
    set_up.devices = experiment.devices;
    set_up.runs.push_back(record);
  }
}

/// Adds a run to the set of that many devices; sets stay ascending.
void add_run(std::vector<RunSet>& sets, int devices, const RunRecord& record);

/// Mean, deviation and range over all timed steps of all repetitions, in milliseconds. Median and
/// p95 cannot be had from summaries and stay 0.
Stats pooled_step_ms(const RunSet& set_up);

double mean_total_s(const RunSet& set_up);

/// Each device over all repetitions: mean busy fraction, largest bytes.
std::vector<DeviceRecord> merged_devices(const RunSet& set_up);

/// Communication of a step, over all repetitions, in milliseconds.
struct Communication {
  double total_ms = 0;
  double exposed_ms = 0;  ///< that no computation hid
  double hidden_ms = 0;

  double hidden_share() const { return total_ms > 0 ? hidden_ms / total_ms : 0; }
};

Communication communication_of(const RunSet& set_up);

/// How many logical devices use the same hardware, at most; 1: each has its own.
int sharing(const RunSet& set_up);

/// How much more device 0 has than the others have on average; 0 where there are no others.
int64_t extra_on_first(const std::vector<DeviceRecord>& devices, int64_t DeviceRecord::*bytes);

/// Bytes a device sends and receives in a step.
int64_t traffic(const DeviceRecord& device);

/// From this many cores on, other programs are said to disturb the measurement.
inline constexpr double kDisturbingCores = 0.25;

/// From this efficiency on a speed-up is called proportional to the devices.
inline constexpr double kProportional = 0.9;

/// Speed-ups this close to 1 are no difference.
inline constexpr double kSameSpeed = 0.03;

/// Busy fractions this close together are equal.
inline constexpr double kEquallyBusy = 0.10;

/// A set-up against another, repetition by repetition.
struct Comparison {
  Stats speedup;          ///< over the repetitions
  double efficiency = 0;  ///< speed-up over devices; 1 is proportional
  double noise = 0;       ///< largest deviation of the run means, as a fraction of their mean
  bool unsafe = false;    ///< the noise is so large that the comparison proves little

  /// Speed-ups that differ from 1 by less are no difference.
  double margin() const { return std::max(kSameSpeed, speedup.stddev); }
};

/// How much faster `other` is than `base`; the efficiency is over other's devices.
Comparison compare(const RunSet& base, const RunSet& other);

}  // namespace lockstep::cli
