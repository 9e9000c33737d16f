// Steps of an optimizer over given tensors, as JSON: the median step. Its counterpart in PyTorch is
// bench/peers/optim.py; both take the same JSON of settings.

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <nlohmann/json.hpp>

#include "lockstep/clock.hpp"
#include "lockstep/error.hpp"
#include "lockstep/optim.hpp"
#include "optim/step_items.hpp"

namespace {

using Tensors = std::vector<torch::Tensor>;

Tensors make_parameters(const nlohmann::json& settings) {
  torch::manual_seed(0);
  Tensors parameters;
  for (const auto& count : settings.at("counts")) {
    parameters.push_back(torch::randn({count.get<int64_t>()}).requires_grad_(true));
    parameters.back().mutable_grad() = torch::randn({count.get<int64_t>()});
  }
  return parameters;
}

// What memory allows: reads and writes as many arrays as AdamW needs, or SGD with momentum, with
// one addition for each.
std::function<void()> make_floor(const Tensors& parameters, bool adamw) {
  std::vector<lockstep::UpdatePiece> pieces;
  Tensors kept;
  for (const auto& parameter : parameters) {
    const auto state = torch::zeros({2, parameter.numel()});
    kept.push_back(state);
    pieces.push_back({parameter.data_ptr(), parameter.grad().data_ptr(), state[0].data_ptr(),
                      adamw ? state[1].data_ptr() : nullptr, parameter.numel()});
  }
  return [pieces, kept] {
    const std::vector<lockstep::Dtype> dtypes(pieces.size(), lockstep::Dtype::kF32);
    lockstep::for_each_part(pieces, dtypes, [](size_t, const lockstep::UpdatePiece& part) {
      auto* weight = static_cast<float*>(part.weight);
      const auto* gradient = static_cast<const float*>(part.gradient);
      auto* momentum = static_cast<float*>(part.momentum);
      auto* variance = static_cast<float*>(part.variance);
      if (variance == nullptr) {
#pragma GCC ivdep
        for (int64_t i = 0; i < part.count; ++i) {
          momentum[i] += gradient[i];
          weight[i] += gradient[i];
        }
        return;
      }
#pragma GCC ivdep
      for (int64_t i = 0; i < part.count; ++i) {
        momentum[i] += gradient[i];
        variance[i] += gradient[i];
        weight[i] += gradient[i];
      }
    });
  };
}

std::function<void()> make_step(const nlohmann::json& settings, const Tensors& parameters) {
  const bool adamw = settings.at("optimizer") == "adamw";
  const auto whose = settings.at("whose").get<std::string>();
  if (whose == "floor") return make_floor(parameters, adamw);
  std::shared_ptr<torch::optim::Optimizer> optimizer;
  if (whose == "lockstep") {
    if (adamw) {
      optimizer = std::make_shared<lockstep::AdamW>(parameters);
    } else {
      optimizer = std::make_shared<lockstep::Sgd>(
          parameters, lockstep::SgdOptions{.lr = 1e-3, .momentum = 0.9, .weight_decay = 1e-2});
    }
    if (settings.value("clip", false)) {
      return [optimizer] {
        dynamic_cast<lockstep::FusedOptimizer&>(*optimizer).step_fused({}, {.max_norm = 1.0});
      };
    }
  } else if (adamw) {
    optimizer = std::make_shared<torch::optim::AdamW>(parameters);
  } else {
    optimizer = std::make_shared<torch::optim::SGD>(
        parameters, torch::optim::SGDOptions(1e-3).momentum(0.9).weight_decay(1e-2));
  }
  const bool clip = settings.value("clip", false);
  return [=] {
    if (clip) torch::nn::utils::clip_grad_norm_(parameters, 1.0);
    optimizer->step();
  };
}

int measure(int, char** argv) {
  const auto settings = nlohmann::json::parse(argv[1]);
  at::set_num_threads(settings.at("threads").get<int>());
  const Tensors parameters = make_parameters(settings);
  const auto step = make_step(settings, parameters);
  std::vector<double> times;
  for (int i = 0; i < settings.at("steps").get<int>(); ++i) {
    const int64_t begin_ns = lockstep::monotonic_ns();
    step();
    times.push_back(static_cast<double>(lockstep::monotonic_ns() - begin_ns) * 1e-6);
  }
  times.erase(times.begin(), times.begin() + static_cast<std::ptrdiff_t>(times.size() / 4));
  std::sort(times.begin(), times.end());
  fmt::print("{}\n", nlohmann::json{{"ms", times[times.size() / 2]}}.dump());
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return lockstep::run_program(measure, argc, argv);
}
