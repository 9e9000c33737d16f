#include "lockstep/trace.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <tuple>

#include "base/file.hpp"
#include "lockstep/error.hpp"

namespace lockstep {
namespace {

using nlohmann::json;

json name_event(const char* what, int rank, const std::string& name) {
  return {{"ph", "M"}, {"name", what}, {"pid", rank}, {"args", {{"name", name}}}};
}

json span_event(const TraceSpan& span, int64_t origin_ns) {
  const auto microseconds = [](int64_t ns) { return static_cast<double>(ns) / 1000.0; };
  json event = {{"ph", "X"},
                {"name", span.name},
                {"pid", span.rank},
                {"tid", span.device},
                {"ts", microseconds(span.begin_ns - origin_ns)},
                {"dur", microseconds(span.end_ns - span.begin_ns)}};
  if (!span.args.empty()) event["args"] = span.args;
  return event;
}

}  // namespace

void Trace::name_rank(int rank, std::string name) {
  const std::lock_guard lock(mutex_);
  rank_names_.insert_or_assign(rank, std::move(name));
}

void Trace::name_device(int rank, int device, std::string name) {
  const std::lock_guard lock(mutex_);
  device_names_.insert_or_assign({rank, device}, std::move(name));
}

void Trace::add(TraceSpan span) {
  if (!enabled()) return;
  if (span.end_ns < span.begin_ns) {
    throw Error(Code::kInternal, fmt::format("trace span \"{}\" ends {} ns before it begins",
                                             span.name, span.begin_ns - span.end_ns));
  }
  const std::lock_guard lock(mutex_);
  spans_.push_back(std::move(span));
}

std::vector<TraceSpan> Trace::spans() const {
  std::vector<TraceSpan> sorted;
  {
    const std::lock_guard lock(mutex_);
    sorted = spans_;
  }
  std::stable_sort(sorted.begin(), sorted.end(), [](const TraceSpan& a, const TraceSpan& b) {
    return std::tie(a.rank, a.device, a.begin_ns, b.end_ns) <
           std::tie(b.rank, b.device, b.begin_ns, a.end_ns);
  });
  return sorted;
}

void Trace::write(const std::string& path) const {
  std::vector<json> events;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [rank, name] : rank_names_) {
      events.push_back(name_event("process_name", rank, name));
      events.push_back({{"ph", "M"},
                        {"name", "process_sort_index"},
                        {"pid", rank},
                        {"args", {{"sort_index", rank}}}});
    }
    for (const auto& [key, name] : device_names_) {
      const auto& [rank, device] = key;
      events.push_back(name_event("thread_name", rank, name));
      events.back()["tid"] = device;
    }
  }
  const auto sorted = spans();
  int64_t origin_ns = sorted.empty() ? 0 : sorted.front().begin_ns;
  for (const auto& span : sorted) origin_ns = std::min(origin_ns, span.begin_ns);
  for (const auto& span : sorted) events.push_back(span_event(span, origin_ns));

  // One event per line, so that ordinary tools can read and compare the file.
  std::string text = "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[";
  for (size_t i = 0; i < events.size(); ++i) {
    text += i == 0 ? "\n" : ",\n";
    text += events[i].dump(-1, ' ', false, json::error_handler_t::replace);
  }
  text += "\n]}\n";
  write_file_atomically(path, text);
}

TraceScope::TraceScope(Trace* trace, int rank, int device, std::string_view name)
    : trace_(trace != nullptr && trace->enabled() ? trace : nullptr) {
  if (trace_ == nullptr) return;
  span_.rank = rank;
  span_.device = device;
  span_.name = name;
  span_.begin_ns = monotonic_ns();
}

TraceScope::~TraceScope() {
  if (trace_ == nullptr) return;
  try {
    span_.end_ns = monotonic_ns();
    trace_->add(std::move(span_));
  } catch (const std::exception&) {
    // Out of memory: losing a span is better than ending the run.
  }
}

void TraceScope::arg(std::string_view key, std::string_view value) {
  if (trace_ != nullptr) span_.args.insert_or_assign(std::string(key), std::string(value));
}

}  // namespace lockstep
