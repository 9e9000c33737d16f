// A pipelined step on an MLP of two equal stages, as JSON: the span of its actions, what the
// simulator makes of the stages' times, and the peak memory. Stages are the devices of one process,
// or, with {"ranks": true}, ranks. Its counterpart in PyTorch is bench/peers/pipeline.py.

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string>

#include "lockstep/clock.hpp"
#include "lockstep/lockstep.hpp"

namespace {

using nlohmann::json;

double median(const std::vector<double>& values) {
  return lockstep::summarize(values).median;
}

torch::nn::Sequential make_net(const json& settings) {
  const auto width = settings.at("width").get<int64_t>();
  torch::nn::Sequential net;
  for (int i = 0; i < settings.at("layers").get<int>(); ++i) {
    net->push_back(torch::nn::Linear(width, width));
    net->push_back(torch::nn::ReLU());
  }
  return net;
}

// Times of one schedule, step after step.
struct Measured {
  std::vector<double> step_ms;
  std::vector<double> span_ms;
  std::vector<double> bubble;
  std::map<std::pair<int, char>, std::vector<double>> action_ms;  // [stage, kind]

  void add(const lockstep::StepTrace& trace, int ranks, double took_ms) {
    double busy_ms = 0;
    int64_t begin_ns = INT64_MAX;
    int64_t end_ns = 0;
    for (const auto& span : trace.actions) {
      const double ms = static_cast<double>(span.end_ns - span.begin_ns) * 1e-6;
      action_ms[{span.action.stage, lockstep::letter(span.action.kind)}].push_back(ms);
      busy_ms += ms;
      begin_ns = std::min(begin_ns, span.begin_ns);
      end_ns = std::max(end_ns, span.end_ns);
    }
    span_ms.push_back(static_cast<double>(end_ns - begin_ns) * 1e-6);
    bubble.push_back(1 - busy_ms / (ranks * span_ms.back()));
    step_ms.push_back(took_ms);
  }

  // The mean, so that the simulation takes as much time as all actions did.
  double mean(int stage, char kind) const {
    const auto found = action_ms.find({stage, kind});
    if (found == action_ms.end()) return 0;
    const auto& values = found->second;
    return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
  }

  std::vector<lockstep::StageTimes> stage_times(int stages) const {
    std::vector<lockstep::StageTimes> times;
    for (int stage = 0; stage < stages; ++stage) {
      times.push_back({.forward = mean(stage, 'F'),
                       .backward_input = mean(stage, 'B') + mean(stage, 'I'),
                       .backward_weight = mean(stage, 'W')});
    }
    return times;
  }
};

json describe(const Measured& measured, const lockstep::Schedule& schedule,
              const std::vector<int64_t>& peaks) {
  const auto ideal = lockstep::simulate(schedule, measured.stage_times(schedule.stages()));
  return {{"step_ms", median(measured.step_ms)}, {"span_ms", median(measured.span_ms)},
          {"ideal_ms", ideal.makespan},          {"bubble", median(measured.bubble)},
          {"ideal_bubble", ideal.bubble},        {"peak_bytes", peaks}};
}

// Schedules take turns, so that a slow second affects all alike.
json run_local(const json& settings) {
  const lockstep::Devices devices(settings.value("devices", "cpu:2"));
  const int stages = static_cast<int>(devices.size());
  const int micro_batches = settings.at("micro_batches").get<int>();
  const auto names = settings.at("schedules").get<std::vector<std::string>>();
  const auto x =
      torch::randn({settings.at("batch").get<int64_t>(), settings.at("width").get<int64_t>()})
          .to(devices[0].torch_device());
  const auto y = torch::sin(x).to(devices[devices.size() - 1].torch_device());
  std::vector<std::unique_ptr<lockstep::Pipeline>> pipelines;
  for (const auto& name : names) {
    const auto net = make_net(settings);
    pipelines.push_back(std::make_unique<lockstep::Pipeline>(
        lockstep::split_stages(net,
                               lockstep::cut_by_count(static_cast<int64_t>(net->size()), stages)),
        devices, lockstep::make_schedule(name, stages, micro_batches),
        lockstep::PipelineOptions{
            .loss = [](const auto& out,
                       const auto& target) { return torch::mse_loss(out, target); },
            .virtual_shards = settings.value("virtual_shards", 0)}));
  }
  std::vector<Measured> measured(names.size());
  std::vector<std::vector<int64_t>> peaks(names.size(), std::vector<int64_t>(devices.size()));
  const int steps = settings.at("steps").get<int>();
  for (int step = 0; step < steps; ++step) {
    for (size_t i = 0; i < names.size(); ++i) {
      for (auto& parameter : pipelines[i]->parameters()) parameter.mutable_grad().reset();
      std::vector<int64_t> before;
      for (size_t device = 0; device < devices.size(); ++device) {
        before.push_back(devices[device].memory().live_bytes);
        devices[device].reset_peak_memory();
      }
      const int64_t begin_ns = lockstep::monotonic_ns();
      pipelines[i]->step(x, y);
      devices.synchronize();
      const double took_ms = static_cast<double>(lockstep::monotonic_ns() - begin_ns) * 1e-6;
      for (size_t device = 0; device < devices.size(); ++device) {
        peaks[i][device] = devices[device].memory().peak_bytes - before[device];
      }
      if (step >= steps / 4) measured[i].add(pipelines[i]->last_step(), stages, took_ms);
    }
  }
  json result;
  for (size_t i = 0; i < names.size(); ++i) {
    result[names[i]] = describe(measured[i], pipelines[i]->schedule(), peaks[i]);
  }
  return result;
}

// The time of a whole step, as rank 0 sees it: all ranks leave one barrier and enter the next.
json run_ranks(const json& settings) {
  const int ranks = lockstep::RankEnvironment::from_env().local_world_size;
  const auto world = lockstep::World::from_env({.devices = fmt::format("cpu:{}", ranks)});
  const lockstep::UseDevice home(world.device());
  const auto net = make_net(settings);
  const auto schedule =
      lockstep::make_schedule(settings.at("schedules").at(0).get<std::string>(), world.size(),
                              settings.at("micro_batches").get<int>());
  lockstep::Pipeline pipeline(
      lockstep::split_stages(
          net, lockstep::cut_by_count(static_cast<int64_t>(net->size()), world.size())),
      world.comm(), world.device(), schedule,
      {.loss = [](const auto& out, const auto& target) { return torch::mse_loss(out, target); }});
  const auto x =
      torch::randn({settings.at("batch").get<int64_t>(), settings.at("width").get<int64_t>()});
  const auto y = torch::sin(x);
  std::vector<double> step_ms;
  const int steps = settings.at("steps").get<int>();
  for (int step = 0; step < steps; ++step) {
    for (auto& parameter : pipeline.parameters()) parameter.mutable_grad().reset();
    world.comm().barrier();
    const int64_t begin_ns = lockstep::monotonic_ns();
    pipeline.step(x, y);
    world.comm().barrier();
    if (step >= steps / 4) {
      step_ms.push_back(static_cast<double>(lockstep::monotonic_ns() - begin_ns) * 1e-6);
    }
  }
  return world.rank() == 0 ? json{{"step_ms", median(step_ms)}} : json();
}

int run(int, char** argv) {
  const auto settings = json::parse(argv[1]);
  torch::manual_seed(0);
  const json result = settings.value("ranks", false) ? run_ranks(settings) : run_local(settings);
  if (!result.is_null()) fmt::print("{}\n", result.dump());
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return lockstep::run_program(run, argc, argv);
}
