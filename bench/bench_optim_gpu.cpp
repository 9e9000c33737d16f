// Steps of an optimizer over given tensors on a GPU. Its counterpart in PyTorch is
// bench/peers/optim_gpu.py; both take the same JSON of settings. Only builds with CUDA have it;
// with
// {"device": "cpu"} it runs anywhere.

#include <fmt/format.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "lockstep/clock.hpp"
#include "lockstep/lockstep.hpp"
#include "lockstep/master_weights.hpp"
#include "serve.hpp"

namespace {

using nlohmann::json;

/// Tensors as parameters of one module, so that MasterWeights can hold them.
struct Weights : torch::nn::Module {
  Weights(const json& shapes, torch::Device device) {
    torch::manual_seed(0);
    for (size_t i = 0; i < shapes.size(); ++i) {
      const auto shape = shapes[i].get<std::vector<int64_t>>();
      register_parameter(fmt::format("p{}", i), torch::randn(shape, device) * 0.02);
    }
  }
};

void draw_gradients(const std::vector<torch::Tensor>& parameters) {
  for (const auto& parameter : parameters) {
    auto changed = parameter;
    // In float32 first: the same numbers whatever the weights' dtype.
    const auto options = parameter.options().dtype(torch::kFloat);
    changed.mutable_grad() = torch::randn(parameter.sizes(), options).to(parameter.scalar_type());
  }
}

struct Updates {
  std::shared_ptr<Weights> weights;
  std::shared_ptr<torch::optim::Optimizer> optimizer;
  std::shared_ptr<lockstep::GradScaler> scaler;

  void step() const {
    if (!scaler) {
      optimizer->step();
      return;
    }
    scaler->step(*optimizer);
    scaler->update();
  }
};

std::shared_ptr<torch::optim::Optimizer> make_optimizer(
    const json& settings, const std::vector<torch::Tensor>& parameters,
    const std::optional<lockstep::MasterWeights>& masters) {
  const bool adamw = settings.at("optimizer") == "adamw";
  const double momentum = settings.value("momentum", 0.0);
  if (settings.at("whose") == "torch") {
    if (adamw) return std::make_shared<torch::optim::AdamW>(parameters);
    return std::make_shared<torch::optim::SGD>(parameters,
                                               torch::optim::SGDOptions(1e-3).momentum(momentum));
  }
  if (adamw) {
    lockstep::AdamWOptions options;
    if (masters) options.masters = *masters;
    return std::make_shared<lockstep::AdamW>(parameters, options);
  }
  lockstep::SgdOptions options{.lr = 1e-3, .momentum = momentum};
  if (masters) options.masters = *masters;
  return std::make_shared<lockstep::Sgd>(parameters, options);
}

Updates make_updates(const json& settings, torch::Device device) {
  Updates updates;
  updates.weights = std::make_shared<Weights>(settings.at("shapes"), device);
  std::optional<lockstep::MasterWeights> masters;
  if (settings.value("masters", false)) {
    lockstep::MasterWeightsOptions options{.dtype = torch::kHalf};
    options.which = [](const std::string&, const torch::Tensor&) { return true; };
    masters.emplace(*updates.weights, options);
  }
  const auto parameters = updates.weights->parameters();
  draw_gradients(parameters);
  updates.optimizer = make_optimizer(settings, parameters, masters);
  if (settings.value("scaler", false)) {
    updates.scaler = std::make_shared<lockstep::GradScaler>();
    updates.scaler->scale(torch::ones({}, device));  // its tensors are made with the first loss
  }
  return updates;
}

// The weights' sum after a few updates, to compare with PyTorch's.
double checksum(const Updates& updates) {
  const torch::NoGradGuard no_grad;
  double sum = 0;
  for (const auto& parameter : updates.weights->parameters()) {
    sum += parameter.to(torch::kDouble).abs().sum().item<double>();
  }
  return sum;
}

int run(int, char** argv) {
  const auto settings = json::parse(argv[1]);
  const torch::Device device(settings.value("device", "cuda:0"));
  const auto synchronize = [device] {
    if (device.is_cuda()) torch::cuda::synchronize();
  };
  const auto updates = make_updates(settings, device);
  for (int i = 0; i < settings.value("check_steps", 5); ++i) updates.step();
  bench::serve(settings, 0, {{"checksum", checksum(updates)}}, [&](int64_t steps) -> json {
    synchronize();
    const int64_t begin_ns = lockstep::monotonic_ns();
    for (int64_t i = 0; i < steps; ++i) updates.step();
    synchronize();
    const auto ns = static_cast<double>(lockstep::monotonic_ns() - begin_ns);
    return {{"ms", ns * 1e-6 / static_cast<double>(steps)}};
  });
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return lockstep::run_program(run, argc, argv);
}
