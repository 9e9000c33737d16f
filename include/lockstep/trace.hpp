#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/clock.hpp"

namespace lockstep {

/// Something that a logical device did. Times are those of monotonic_ns().
struct TraceSpan {
  int rank = 0;
  int device = 0;  ///< logical device
  std::string name;
  int64_t begin_ns = 0;
  int64_t end_ns = 0;
  std::map<std::string, std::string> args = {};
};

/// Collects spans from many threads. While it is off, a span costs one relaxed load.
class Trace {
 public:
  void enable() { enabled_.store(true, std::memory_order_relaxed); }
  bool enabled() const { return enabled_.load(std::memory_order_relaxed); }

  /// Set the titles of the timeline's groups and rows.
  void name_rank(int rank, std::string name);
  void name_device(int rank, int device, std::string name);

  /// Adds a span, unless the trace is off. A span that ends before it begins is an Error.
  void add(TraceSpan span);

  /// Spans by rank, device and time; an outer span comes before those inside it.
  std::vector<TraceSpan> spans() const;

  /// Writes Chrome trace-event JSON, which Perfetto opens. pid is the rank, tid the logical device;
  /// times are in microseconds since the first span.
  void write(const std::string& path) const;

 private:
  std::atomic<bool> enabled_ = false;
  mutable std::mutex mutex_;  // guards all below
  std::vector<TraceSpan> spans_;
  std::map<int, std::string> rank_names_;
  std::map<std::pair<int, int>, std::string> device_names_;  // [rank, device]
};

/// Guard: adds a span from construction to destruction, unless the trace is null or off.
class TraceScope {
 public:
  TraceScope(Trace* trace, int rank, int device, std::string_view name);
  ~TraceScope();
  TraceScope(const TraceScope&) = delete;
  TraceScope& operator=(const TraceScope&) = delete;

  /// Adds a fact that is shown when the span is selected.
  void arg(std::string_view key, std::string_view value);

 private:
  Trace* trace_;  // null if nothing is recorded
  TraceSpan span_;
};

}  // namespace lockstep
