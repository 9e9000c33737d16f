#include "course/pipeline_meter.hpp"

#include <torch/torch.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <span>
#include <string>
#include <utility>

#include "lockstep/clock.hpp"
#include "lockstep/split.hpp"

namespace course {
namespace {

using lockstep::ActionKind;
using lockstep::ActionSpan;
using lockstep::Communicator;
using lockstep::StepTrace;

constexpr int64_t kSmallBytes = 4 << 10;
constexpr int64_t kMessageBytes = 1 << 20;    // an activation
constexpr int64_t kGradientBytes = 16 << 20;  // more than caches hold
constexpr int kTries = 9;

// The median time in which `exchange` passes that many bytes.
double median_ms(int64_t bytes, const std::function<void(int64_t bytes)>& exchange) {
  exchange(bytes);  // the first call also pays for touching the memory
  std::vector<double> times_ms;
  for (int i = 0; i < kTries; ++i) {
    const int64_t begun_ns = lockstep::monotonic_ns();
    exchange(bytes);
    times_ms.push_back(static_cast<double>(lockstep::monotonic_ns() - begun_ns) * 1e-6);
  }
  return lockstep::summarize(times_ms).median;
}

// A line through two measurements. `sent_share`: bytes that a rank sends for each byte exchanged.
Link fit(const std::function<void(int64_t bytes)>& exchange, int64_t large_bytes,
         double sent_share) {
  const double small_ms = median_ms(kSmallBytes, exchange);
  const double large_ms = median_ms(large_bytes, exchange);
  const double byte_ms =
      std::max(0.0, large_ms - small_ms) / static_cast<double>(large_bytes - kSmallBytes);
  return {.call_ms = std::max(0.0, small_ms - byte_ms * static_cast<double>(kSmallBytes)),
          .byte_ms = byte_ms / sent_share};
}

Link measure_all_reduce(const Communicator& comm, torch::Device device, int64_t large_bytes) {
  if (comm.size() == 1) return {};
  const auto buffer = comm.allocate(large_bytes / 4, torch::TensorOptions(device));
  const double ranks = comm.size();
  return fit(
      [&](int64_t bytes) {
        comm.all_reduce(buffer.narrow(0, 0, bytes / 4), lockstep::ReduceOp::kSum,
                        {.label = "measuring a link"});
      },
      large_bytes, 2 * (ranks - 1) / ranks);
}

// The first two ranks send a tensor back and forth. All ranks get their result.
Link measure_messages(const Communicator& comm, torch::Device device) {
  if (comm.size() == 1) return {};
  Link link;
  if (comm.rank() < 2) {
    const auto tensor = torch::zeros({kMessageBytes / 4}, torch::TensorOptions(device));
    const int other = 1 - comm.rank();
    link = fit(
        [&](int64_t bytes) {
          const auto part = tensor.narrow(0, 0, bytes / 4);
          const auto send = [&] { comm.send(part, other, {.label = "measuring a link"}); };
          const auto receive = [&] { comm.recv(part, other, {.label = "measuring a link"}); };
          if (comm.rank() == 0) send();
          receive();
          if (comm.rank() == 1) send();
        },
        kMessageBytes, 1);
  }
  const auto found = torch::tensor({link.call_ms / 2, link.byte_ms / 2}, torch::kDouble);
  comm.broadcast(found, 0, {.label = "what a link costs"});
  return {.call_ms = found[0].item<double>(), .byte_ms = found[1].item<double>()};
}

// From one device of this process to the next, whose worker copies the tensor.
Link measure_handover(const lockstep::Devices& devices) {
  const auto tensor = torch::zeros(
      {kMessageBytes}, torch::TensorOptions(torch::kUInt8).device(devices[0].torch_device()));
  return fit(
      [&](int64_t bytes) {
        devices[1].run("measuring a link", [&] {
          const auto taken = tensor.narrow(0, 0, bytes)
                                 .to(devices[1].torch_device(), torch::kUInt8,
                                     /*non_blocking=*/true, /*copy=*/true);
          devices[1].synchronize();
        });
      },
      kMessageBytes, 1);
}

int64_t first_layer(int stage, std::span<const int64_t> layers_per_stage) {
  return std::accumulate(layers_per_stage.begin(), layers_per_stage.begin() + stage, int64_t{0});
}

// For one row. In backward the gradient of the input is summed as often as the output was in
// forward; the model's own input needs none.
int64_t tensor_bytes_of(const LayerShape& layer, bool first, int ranks, bool recompute) {
  const int64_t backward =
      first ? 0 : layer.tensor_calls * layer.input_bytes * 2 * (ranks - 1) / ranks;
  return (recompute ? 2 : 1) * layer.tensor_bytes + backward;
}

// Bytes of one row that stage `stage` passes to the next; 0 for the last.
int64_t output_bytes_of(int stage, std::span<const LayerShape> layers,
                        std::span<const int64_t> layers_per_stage) {
  if (stage + 1 == static_cast<int>(layers_per_stage.size())) return 0;
  return layers[static_cast<size_t>(first_layer(stage + 1, layers_per_stage) - 1)].output_bytes;
}

// What a rank with these stages sends to others in one call of Pipeline::step, from shapes alone.
struct ExpectedTraffic {
  int64_t messages = 0;       // to other pipeline ranks
  int64_t message_bytes = 0;  // of them all: activations forward, gradients backward
  int64_t tensor_bytes = 0;
};

ExpectedTraffic expected_traffic(const HybridPlan& plan, std::span<const LayerShape> layers,
                                 std::span<const int64_t> layers_per_stage,
                                 std::span<const int> local_stages, int64_t rows, bool recompute) {
  ExpectedTraffic expected;
  const auto& rank = plan.schedule.rank_of_stage;
  const auto message = [&](int from, int to, int64_t row_bytes) {
    if (rank[static_cast<size_t>(from)] == rank[static_cast<size_t>(to)]) return;
    expected.messages += plan.schedule.micro_batches;
    expected.message_bytes += rows * row_bytes;
  };
  for (const int stage : local_stages) {
    const bool last = stage + 1 == plan.schedule.stages();
    if (!last) message(stage, stage + 1, output_bytes_of(stage, layers, layers_per_stage));
    if (stage > 0) message(stage, stage - 1, output_bytes_of(stage - 1, layers, layers_per_stage));
    const int64_t first = first_layer(stage, layers_per_stage);
    for (int64_t i = first; i < first + layers_per_stage[static_cast<size_t>(stage)]; ++i) {
      expected.tensor_bytes +=
          rows * tensor_bytes_of(layers[static_cast<size_t>(i)], i == 0, plan.tensor, recompute);
    }
  }
  return expected;
}

double ms(int64_t ns) {
  return static_cast<double>(ns) * 1e-6;
}

double mean_ms(int64_t sum_ns, int64_t count) {
  return count > 0 ? ms(sum_ns) / static_cast<double>(count) : 0;
}

PipelineCall call_of(const StepTrace& trace) {
  PipelineCall call{.begin_ns = std::numeric_limits<int64_t>::max()};
  for (const auto& span : trace.actions) {
    call.begin_ns = std::min(call.begin_ns, span.begin_ns);
    call.end_ns = std::max(call.end_ns, span.end_ns);
    call.busy_ns += span.end_ns - span.begin_ns;
  }
  return call;
}

// Activations live from the begin of a forward to the end of the last backward that needs them.
int64_t peak_micro_batches(const StepTrace& trace, int stage) {
  std::vector<std::pair<int64_t, int>> changes;  // time, +1 or -1: an end comes before a begin
  for (const auto& span : trace.actions) {
    if (span.action.stage != stage) continue;
    if (span.action.kind == ActionKind::kForward) changes.emplace_back(span.begin_ns, +1);
    if (span.action.kind == ActionKind::kBackward ||
        span.action.kind == ActionKind::kBackwardWeight) {
      changes.emplace_back(span.end_ns, -1);
    }
  }
  std::sort(changes.begin(), changes.end());
  int64_t held = 0;
  int64_t peak = 0;
  for (const auto& change : changes) {
    held += change.second;
    peak = std::max(peak, held);
  }
  return peak;
}

}  // namespace

Links measure_links(const HybridPlan& plan, const lockstep::World& world,
                    const lockstep::Mesh& mesh) {
  const auto device = world.device().torch_device();
  Links links{.data = measure_all_reduce(mesh.axis("dp"), device, kGradientBytes),
              .pipeline = measure_messages(mesh.axis("pp"), device),
              .tensor = measure_all_reduce(mesh.axis("tp"), device, kMessageBytes)};
  if (!plan.over_ranks && plan.schedule.ranks() > 1) {
    links.pipeline = measure_handover(world.devices());
  }
  return links;
}

PipelineMeter::PipelineMeter(const lockstep::Pipeline& pipeline, HybridFacts facts,
                             const Options& options, int rank)
    : pipeline_(pipeline),
      facts_(std::move(facts)),
      options_(options),
      rank_(rank),
      stages_(facts_.plan.schedule.rank_of_stage.size()),
      traffic_before_(read_traffic()) {}

PipelineMeter::TrafficSums PipelineMeter::read_traffic() const {
  const auto tensor = facts_.tensor_traffic();
  return {.links = pipeline_.links(),
          .tensor_calls = tensor.calls,
          .tensor_bytes = tensor.sent_bytes,
          .tensor_ns = tensor.inside_ns};
}

void PipelineMeter::end_step(bool timed) {
  const TrafficSums now = read_traffic();
  if (timed) {
    ++timed_steps_;
    for (const auto& trace : pending_) count(trace);
    traffic_.links.messages += now.links.messages - traffic_before_.links.messages;
    traffic_.links.bytes += now.links.bytes - traffic_before_.links.bytes;
    traffic_.tensor_calls += now.tensor_calls - traffic_before_.tensor_calls;
    traffic_.tensor_bytes += now.tensor_bytes - traffic_before_.tensor_bytes;
    traffic_.tensor_ns += now.tensor_ns - traffic_before_.tensor_ns;
    last_ = std::move(pending_.back());
  }
  traffic_before_ = now;
  pending_.clear();
}

void PipelineMeter::count(const StepTrace& trace) {
  calls_.push_back(call_of(trace));
  for (const auto& span : trace.actions) {
    StageSums& sums = stages_[static_cast<size_t>(span.action.stage)];
    const int64_t ns = span.end_ns - span.begin_ns;
    switch (span.action.kind) {
      case ActionKind::kForward:
        sums.forward_ns += ns;
        ++sums.forwards;
        break;
      case ActionKind::kBackward:
      case ActionKind::kBackwardInput:
        sums.backward_ns += ns;
        ++sums.backwards;
        break;
      case ActionKind::kBackwardWeight:
        sums.weight_ns += ns;
        ++sums.weights;
        break;
    }
  }
  for (const int stage : pipeline_.local_stages()) {
    StageSums& sums = stages_[static_cast<size_t>(stage)];
    sums.peak_micro_batches = std::max(sums.peak_micro_batches, peak_micro_batches(trace, stage));
  }
  count_sync(trace);
}

void PipelineMeter::count_sync(const StepTrace& trace) {
  auto syncs = trace.syncs;
  std::sort(syncs.begin(), syncs.end(),
            [](const auto& a, const auto& b) { return a.begin_ns < b.begin_ns; });
  const int64_t computed_ns = calls_.back().end_ns;
  int64_t covered_ns = 0;  // up to here earlier synchronisations were counted
  for (const auto& sync : syncs) {
    sync_.all_reduces += sync.all_reduces;
    sync_.bytes += sync.bytes;
    const int64_t begin_ns = std::max(sync.begin_ns, covered_ns);
    sync_.communication_ns += std::max<int64_t>(0, sync.end_ns - begin_ns);
    sync_.exposed_ns += std::max<int64_t>(0, sync.end_ns - std::max(begin_ns, computed_ns));
    covered_ns = std::max(covered_ns, sync.end_ns);
  }
}

void PipelineMeter::fill(lockstep::RunRecord& record) const {
  const auto& schedule = facts_.plan.schedule;
  lockstep::PipelineRecord& pipeline = record.pipeline.emplace();
  pipeline.schedule = schedule.name;
  pipeline.place = options_.place;
  pipeline.micro_batches = schedule.micro_batches;
  pipeline.rows = lockstep::tensor_split_rows(facts_.rows, schedule.micro_batches);
  pipeline.stages = stage_records();
  pipeline.actions = last_actions();
  pipeline.axes = axis_records();
  if (timed_steps_ == 0) return;
  record.all_reduces = {
      .count = static_cast<double>(sync_.all_reduces) / static_cast<double>(timed_steps_),
      .bytes = sync_.bytes / timed_steps_};
  record.comm_ms = mean_ms(sync_.communication_ns, timed_steps_);
  record.exposed_comm_ms = mean_ms(sync_.exposed_ns, timed_steps_);
}

PipelineReport PipelineMeter::report() const {
  return {.pipeline = facts_.mesh.coordinate("dp"),
          .ranks = facts_.plan.devices_per_rank(),
          .calls = calls_};
}

std::vector<lockstep::StageRecord> PipelineMeter::stage_records() const {
  const auto rows =
      lockstep::tensor_split_rows(facts_.rows, facts_.plan.schedule.micro_batches).front();
  std::vector<lockstep::StageRecord> records;
  for (const int stage : pipeline_.local_stages()) {
    const StageSums& sums = stages_[static_cast<size_t>(stage)];
    int64_t parameters = 0;
    for (const auto& parameter : pipeline_.stage(stage)->parameters())
      parameters += parameter.numel();
    records.push_back({.rank = rank_,
                       .stage = stage,
                       .device = pipeline_.device_of(stage).name(),
                       .layers = facts_.cut.layers_per_stage[static_cast<size_t>(stage)],
                       .parameters = parameters,
                       .forward_ms = mean_ms(sums.forward_ns, sums.forwards),
                       .backward_ms = mean_ms(sums.backward_ns, sums.backwards),
                       .weight_ms = mean_ms(sums.weight_ns, sums.weights),
                       .peak_micro_batches = sums.peak_micro_batches,
                       .message_bytes = rows * output_bytes_of(stage, facts_.cut.layers,
                                                               facts_.cut.layers_per_stage)});
  }
  return records;
}

// Times start with this rank's first action.
std::vector<lockstep::ActionRecord> PipelineMeter::last_actions() const {
  std::vector<lockstep::ActionRecord> records;
  const int64_t begin_ns = call_of(last_).begin_ns;
  const auto add = [&](char kind, int stage, int micro_batch, const auto& span) {
    records.push_back({.kind = std::string(1, kind),
                       .rank = rank_,
                       .stage = stage,
                       .micro_batch = micro_batch,
                       .device = pipeline_.device_of(stage).name(),
                       .begin_ms = ms(span.begin_ns - begin_ns),
                       .end_ms = ms(span.end_ns - begin_ns)});
  };
  for (const auto& span : last_.actions) {
    add(letter(span.action.kind), span.action.stage, span.action.micro_batch, span);
  }
  for (const auto& sync : last_.syncs) add('S', sync.stage, 0, sync);
  return records;
}

int64_t PipelineMeter::gradient_bytes() const {
  int64_t bytes = 0;
  for (const auto& parameter : pipeline_.parameters()) {
    if (parameter.requires_grad()) bytes += static_cast<int64_t>(parameter.nbytes());
  }
  return bytes;
}

std::vector<lockstep::AxisRecord> PipelineMeter::axis_records() const {
  const auto& plan = facts_.plan;
  const auto expected = expected_traffic(plan, facts_.cut.layers, facts_.cut.layers_per_stage,
                                         pipeline_.local_stages(), facts_.rows, options_.recompute);
  const auto steps = std::max<int64_t>(1, timed_steps_);
  const auto per_step = [&](int64_t sum) {
    return static_cast<double>(sum) / static_cast<double>(steps);
  };
  const auto sent_in_all_reduce = [](int64_t bytes, int ranks) {
    return bytes * 2 * (ranks - 1) / ranks;
  };
  lockstep::AxisRecord data{.name = "data",
                            .size = plan.data,
                            .calls = per_step(sync_.all_reduces),
                            .predicted_bytes = sent_in_all_reduce(gradient_bytes(), plan.data),
                            .bytes = sent_in_all_reduce(sync_.bytes / steps, plan.data),
                            .ms = mean_ms(sync_.communication_ns, steps)};
  data.predicted_ms = facts_.links.data.ms(data.calls, data.predicted_bytes);
  lockstep::AxisRecord pipeline{.name = "pipeline",
                                .size = plan.schedule.ranks(),
                                .calls = per_step(traffic_.links.messages),
                                .predicted_bytes = expected.message_bytes * options_.accum_steps,
                                .bytes = traffic_.links.bytes / steps};
  const int64_t messages = expected.messages * options_.accum_steps;
  pipeline.predicted_ms =
      facts_.links.pipeline.ms(static_cast<double>(messages), pipeline.predicted_bytes);
  lockstep::AxisRecord tensor{.name = "tensor",
                              .size = plan.tensor,
                              .calls = per_step(traffic_.tensor_calls),
                              .predicted_bytes = expected.tensor_bytes * options_.accum_steps,
                              .bytes = traffic_.tensor_bytes / steps,
                              .ms = mean_ms(traffic_.tensor_ns, steps)};
  tensor.predicted_ms = facts_.links.tensor.ms(tensor.calls, tensor.predicted_bytes);
  return {data, pipeline, tensor};
}

}  // namespace course
