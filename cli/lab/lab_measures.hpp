#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cli/lab/lab.hpp"

namespace lockstep::cli {

/// Other programs that keep at least this many cores busy are said to disturb the measurement.
inline constexpr double kDisturbingCores = 0.25;

/// Devices with cores of their own that lack them for this share of the time were disturbed.
inline constexpr double kDisturbingQueue = 0.1;

/// From this efficiency on a speed-up is called proportional to the devices.
inline constexpr double kProportional = 0.9;

/// Speed-ups this close to 1 are no difference.
inline constexpr double kSameSpeed = 0.03;

/// Busy fractions this close together are equal.
inline constexpr double kEquallyBusy = 0.10;

/// Device 0 holds more memory than the others where its peak is this many times theirs.
inline constexpr double kMoreMemory = 1.05;

/// Gradient norms and losses this close are equal except for rounding.
inline constexpr double kSameNorm = 1e-3;

/// How much other programs had of the machine while a lab measured.
struct Disturbance {
  double busy_cores = 0;  ///< that they kept busy when the lab began
  /// The largest share of its time for which a device was ready to compute but had no core. None
  /// if no run tells, as on GPUs; only devices with cores and a thread of their own count.
  std::optional<double> queued = {};

  /// Time without a core decides if it was measured: other programs may use cores that are free.
  bool disturbed() const {
    return queued ? *queued >= kDisturbingQueue : busy_cores >= kDisturbingCores;
  }
};

/// `timed`: RunKey::what of the set-ups whose times count.
Disturbance disturbance_of(const LabRuns& runs, const std::vector<std::string>& timed);

/// Mean, deviation and range over all timed steps of all repetitions, in milliseconds. Median and
/// p95 cannot be computed from summaries and stay 0.
Stats pooled_step_ms(const RunSet& set_up);

double mean_total_s(const RunSet& set_up);

/// Each device over all repetitions: mean busy and queued fraction, largest bytes.
std::vector<DeviceRecord> merged_devices(const RunSet& set_up);

/// Communication of a step, mean over all repetitions, in milliseconds.
struct Communication {
  double total_ms = 0;
  double exposed_ms = 0;  ///< that no computation hid
  double hidden_ms = 0;

  double hidden_share() const { return total_ms > 0 ? hidden_ms / total_ms : 0; }
};

Communication communication_of(const RunSet& set_up);

/// Exposed communication as a fraction of the step.
double exposed_share(const RunSet& set_up);

/// The largest number of logical devices that use the same hardware; 1: each has its own.
int sharing(const RunSet& set_up);

/// Whether its devices are made of cores, not of GPUs.
bool on_cores(const RunSet& set_up);

/// Whether all counts are the same.
bool all_equal(const std::vector<int64_t>& rows);

/// How much more device 0 has than the others have on average; 0 if there are no others.
int64_t extra_on_first(const std::vector<DeviceRecord>& devices, int64_t DeviceRecord::*bytes);

/// Mean of all devices but the first; the first's own where it is alone.
int64_t others_mean(const std::vector<DeviceRecord>& devices, int64_t DeviceRecord::*bytes);

/// Bytes that a device sends and receives in a step.
int64_t traffic(const DeviceRecord& device);

/// How far the busiest device is from the least busy one, and device 0 from the others.
struct Imbalance {
  double least_busy = 0;
  double most_busy = 0;
  double memory = 1;  ///< device 0's peak over the others' mean

  double busy_gap() const { return most_busy - least_busy; }
};

Imbalance imbalance_of(const std::vector<DeviceRecord>& devices);

/// Most bytes that one device held at once, over all devices and repetitions.
int64_t peak_of(const RunSet& set_up);

/// What rank 0's peak is made of; none if no run recorded it.
std::optional<MemorySplit> memory_of(const RunSet& set_up);

struct MemoryPart {
  const char* name;
  const char* column;  ///< its title in a table
  int64_t MemorySplit::*bytes;
};

inline constexpr MemoryPart kMemoryParts[] = {
    {"weights", "weights", &MemorySplit::weights},
    {"gradients", "gradients", &MemorySplit::gradients},
    {"optimizer state", "optimizer", &MemorySplit::optimizer_state},
    {"low-precision copies", "copies", &MemorySplit::low_precision},
    {"activations", "activations", &MemorySplit::activations}};

/// The first step's gradients; none if no run recorded them.
std::optional<GradientCheck> gradients_of(const RunSet& set_up);

/// Rows of an optimizer step, over all ranks.
int64_t rows_of(const RunSet& set_up);

/// Rows trained in a second, from the mean step time.
double rows_per_s(const RunSet& set_up);

/// Milliseconds for one row.
double ms_per_row(const RunSet& set_up);

/// One set-up against another, repetition by repetition.
struct Comparison {
  Stats speedup;          ///< over the repetitions
  double efficiency = 0;  ///< speed-up over devices; 1 is proportional
  double noise = 0;       ///< largest deviation of the run means, as a fraction of their mean
  bool unsafe = false;    ///< speed-ups or step times vary so much that nothing can be concluded

  /// Speed-ups that differ from 1 by less are no difference.
  double margin() const { return std::max(kSameSpeed, speedup.stddev); }
};

/// How much faster `other` is than `base`; the efficiency is over other's devices.
Comparison compare(const RunSet& base, const RunSet& other);

/// How much faster `other` trains a row than `base`: for steps of different numbers of rows.
Comparison compare_per_row(const RunSet& base, const RunSet& other);

/// Norm of other's first gradient over that of base's; none if it was not recorded or is 0.
std::optional<double> norm_ratio(const RunSet& base, const RunSet& other);

/// Largest distance of a loss from the reference's in the same step, relative to that. None where
/// the curves differ in length or are not finite.
std::optional<double> loss_deviation(const RunRecord& reference, const RunRecord& run);

/// The fraction by which `bytes` is more or less than `before`: -0.25 is a quarter less.
double relative_change(int64_t before, int64_t bytes);

}  // namespace lockstep::cli
