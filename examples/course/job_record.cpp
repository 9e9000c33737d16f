#include "course/job_record.hpp"

#include <fmt/format.h>
#include <torch/torch.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string>

namespace course {
namespace {

using lockstep::Communicator;
using lockstep::TraceSpan;
using nlohmann::json;

json span_to_json(const TraceSpan& span) {
  return json::array({span.rank, span.device, span.name, span.begin_ns, span.end_ns, span.args});
}

TraceSpan span_from_json(const json& value) {
  return {.rank = value.at(0).get<int>(),
          .device = value.at(1).get<int>(),
          .name = value.at(2).get<std::string>(),
          .begin_ns = value.at(3).get<int64_t>(),
          .end_ns = value.at(4).get<int64_t>(),
          .args = value.at(5).get<std::map<std::string, std::string>>()};
}

json pipeline_to_json(const std::optional<PipelineReport>& report) {
  if (!report) return nullptr;
  json calls = json::array();
  for (const auto& call : report->calls) {
    calls.push_back(json::array({call.begin_ns, call.end_ns, call.busy_ns}));
  }
  return {{"pipeline", report->pipeline}, {"places", report->places}, {"calls", std::move(calls)}};
}

std::optional<PipelineReport> pipeline_from_json(const json& value) {
  if (value.is_null()) return std::nullopt;
  PipelineReport report{.pipeline = value.at("pipeline").get<int>(),
                        .places = value.at("places").get<int>()};
  for (const auto& call : value.at("calls")) {
    report.calls.push_back({.begin_ns = call.at(0).get<int64_t>(),
                            .end_ns = call.at(1).get<int64_t>(),
                            .busy_ns = call.at(2).get<int64_t>()});
  }
  return report;
}

std::string to_text(const RankReport& report) {
  json spans = json::array();
  for (const auto& span : report.spans) spans.push_back(span_to_json(span));
  const json value = {{"record", lockstep::to_json(report.record)},
                      {"step_ms", report.step_ms},
                      {"spans", std::move(spans)},
                      {"clock_ns", report.clock_ns},
                      {"pipeline", pipeline_to_json(report.pipeline)}};
  return value.dump(-1, ' ', false, json::error_handler_t::replace);
}

RankReport from_text(const std::string& text) {
  const json value = json::parse(text);
  RankReport report{.record = lockstep::record_from_json(value.at("record")),
                    .step_ms = value.at("step_ms").get<std::vector<double>>(),
                    .spans = {},
                    .clock_ns = value.at("clock_ns").get<int64_t>(),
                    .pipeline = pipeline_from_json(value.at("pipeline"))};
  for (const auto& span : value.at("spans")) report.spans.push_back(span_from_json(span));
  return report;
}

void send_text(const Communicator& comm, std::string text, int to) {
  const auto bytes = torch::from_blob(text.data(), {static_cast<int64_t>(text.size())},
                                      torch::TensorOptions(torch::kUInt8));
  comm.send(torch::tensor({bytes.numel()}, torch::kInt64), to, {.label = "size of a report"});
  comm.send(bytes, to, {.label = "report"});
}

std::string receive_text(const Communicator& comm, int from) {
  const auto size = torch::zeros({1}, torch::kInt64);
  comm.recv(size, from, {.label = "size of a report"});
  std::string text(static_cast<size_t>(size.item<int64_t>()), '\0');
  comm.recv(torch::from_blob(text.data(), {static_cast<int64_t>(text.size())},
                             torch::TensorOptions(torch::kUInt8)),
            from, {.label = "report"});
  return text;
}

double rows_of(const RankReport& report) {
  const auto& split = report.record.split;
  return static_cast<double>(std::accumulate(split.begin(), split.end(), int64_t{0}));
}

// A step of the job ends when its last rank has ended it.
std::vector<double> slowest_steps(const std::vector<RankReport>& reports) {
  std::vector<double> slowest = reports.front().step_ms;
  for (const auto& report : reports) {
    for (size_t i = 0; i < slowest.size(); ++i) {
      slowest[i] = std::max(slowest[i], report.step_ms.at(i));
    }
  }
  return slowest;
}

// Each rank's loss is a mean over its rows, so it counts by their number.
std::vector<double> mean_losses(const std::vector<RankReport>& reports) {
  std::vector<double> losses(reports.front().record.losses.size(), 0.0);
  double rows = 0;
  for (const auto& report : reports) {
    rows += rows_of(report);
    for (size_t i = 0; i < losses.size(); ++i) {
      losses[i] += rows_of(report) * report.record.losses.at(i);
    }
  }
  for (double& loss : losses) loss /= rows;
  return losses;
}

}  // namespace

std::vector<RankReport> gather_reports(const Communicator& comm, const RankReport& mine) {
  std::vector<RankReport> reports;
  if (comm.rank() == 0) {
    reports.push_back(mine);
    for (int rank = 1; rank < comm.size(); ++rank) {
      reports.push_back(from_text(receive_text(comm, rank)));
    }
  } else {
    send_text(comm, to_text(mine), 0);
  }
  comm.barrier({.label = "reports"});  // nobody leaves before all has arrived
  return reports;
}

lockstep::RunRecord job_record(const std::vector<RankReport>& reports) {
  lockstep::RunRecord job = reports.front().record;
  const auto ranks = static_cast<double>(reports.size());
  job.world_size = static_cast<int>(reports.size());
  job.devices.clear();
  job.split.clear();
  job.comm_ms = 0;
  job.exposed_comm_ms = 0;
  for (const auto& report : reports) {
    const auto& record = report.record;
    job.devices.insert(job.devices.end(), record.devices.begin(), record.devices.end());
    job.split.insert(job.split.end(), record.split.begin(), record.split.end());
    job.total_s = std::max(job.total_s, record.total_s);
    job.comm_ms += record.comm_ms / ranks;
    job.exposed_comm_ms += record.exposed_comm_ms / ranks;
    job.ranks.push_back({.host = record.host.at("name"), .step_ms = record.step_ms.mean});
  }
  const auto steps = slowest_steps(reports);
  job.step_ms = lockstep::summarize(steps);
  job.losses = mean_losses(reports);
  const double seconds = std::accumulate(steps.begin(), steps.end(), 0.0) * 1e-3;
  job.samples_per_s =
      seconds > 0 ? static_cast<double>(job.effective_batch * job.step_ms.n) / seconds : 0;
  return job;
}

void fill_job_trace(const std::vector<RankReport>& reports, lockstep::Trace& trace) {
  trace.enable();
  for (size_t place = 0; place < reports.size(); ++place) {
    const auto& report = reports[place];
    const int rank = static_cast<int>(place);
    const auto& devices = report.record.devices;
    trace.name_rank(rank, fmt::format("rank {} on {}", rank, report.record.host.at("name")));
    for (size_t i = 0; i < devices.size(); ++i) {
      trace.name_device(rank, static_cast<int>(i), devices[i].name);
    }
    trace.name_device(rank, static_cast<int>(devices.size()), "communication");
    const int64_t ahead_ns = report.clock_ns - reports.front().clock_ns;
    for (TraceSpan span : report.spans) {
      span.begin_ns -= ahead_ns;
      span.end_ns -= ahead_ns;
      trace.add(std::move(span));
    }
  }
}

}  // namespace course
