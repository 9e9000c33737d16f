// A training step of an MLP on one device, in the variant that the settings name: eager or
// captured, with float32 weights or master weights, layer by layer or fused, bare or as a rank of
// DDP. Its counterpart in PyTorch is bench/peers/step.py; both take the same JSON of settings and
// draw the same weights and rows. Only builds with CUDA have it; with {"device": "cpu"} it runs
// anywhere.

#include <c10/cuda/CUDACachingAllocator.h>
#include <unistd.h>

#include <cmath>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "lockstep/captured_step.hpp"
#include "lockstep/clock.hpp"
#include "lockstep/fused_layers.hpp"
#include "lockstep/lockstep.hpp"
#include "lockstep/master_weights.hpp"
#include "serve.hpp"

namespace {

using nlohmann::json;
namespace allocator = c10::cuda::CUDACachingAllocator;

torch::nn::Sequential make_layers(const json& settings) {
  const auto dim = settings.at("dim").get<int64_t>();
  const auto hidden = settings.at("hidden").get<int64_t>();
  torch::nn::Sequential layers(torch::nn::Linear(dim, hidden), torch::nn::ReLU());
  for (int i = 0; i < settings.at("depth").get<int>(); ++i) {
    layers->push_back(torch::nn::Linear(hidden, hidden));
    layers->push_back(torch::nn::ReLU());
  }
  layers->push_back(torch::nn::Linear(hidden, dim));
  return layers;
}

struct Net : torch::nn::Module {
  explicit Net(const json& settings)
      : layers(register_module("layers", make_layers(settings))),
        fused(settings.value("fused", false)) {
    lockstep::tune_layers(settings.value("tuned", false));
  }

  torch::Tensor forward(const torch::Tensor& x) {
    if (!fused) return layers->forward(x);
    std::vector<torch::Tensor> weights;
    std::vector<torch::Tensor> biases;
    for (const auto& layer : layers->children()) {
      if (const auto* linear = layer->as<torch::nn::Linear>()) {
        weights.push_back(linear->weight);
        biases.push_back(linear->bias);
      }
    }
    return lockstep::multi_layer(x, weights, biases, lockstep::Activation::kRelu);
  }

  torch::nn::Sequential layers;
  bool fused;
};

// The same numbers as in PyTorch on the same kind of device: the generator's order counts.
void set_weights(Net& net, const json& settings) {
  if (settings.contains("init")) return lockstep::load_weights(net, settings.at("init"));
  const torch::NoGradGuard no_grad;
  for (auto& parameter : net.parameters()) {
    const double scale =
        parameter.dim() == 2 ? std::sqrt(2.0 / static_cast<double>(parameter.size(1))) : 0.01;
    parameter.copy_(torch::randn(parameter.sizes(), parameter.options()) * scale);
  }
}

struct Rows {
  torch::Tensor x;
  torch::Tensor y;
};

// Of all micro-steps of one step.
Rows make_rows(const json& settings, torch::Device device, int ranks) {
  if (settings.contains("data")) {
    const auto tensors = lockstep::load_tensors(settings.at("data"));
    return {tensors.at("x").to(device), tensors.at("y").to(device)};
  }
  const int64_t rows =
      settings.at("batch").get<int64_t>() / ranks * settings.value("accumulate", 1);
  const auto x = torch::randn({rows, settings.at("dim").get<int64_t>()}, device);
  return {x, torch::sin(x)};
}

torch::ScalarType dtype_of(const std::string& precision) {
  return precision == "fp16" ? torch::kHalf : torch::kBFloat16;
}

/// One variant of the step, with all it needs.
class Trainer {
 public:
  Trainer(const json& settings, torch::Device device,
          const std::optional<lockstep::Communicator>& comm)
      : device_(device),
        precision_(settings.value("precision", "fp16")),
        micro_steps_(settings.value("accumulate", 1)),
        net_(std::make_shared<Net>(settings)) {
    torch::manual_seed(0);
    net_->to(device);
    set_weights(*net_, settings);
    rows_ = make_rows(settings, device, comm ? comm->size() : 1);
    lockstep::SgdOptions sgd{.lr = settings.at("lr")};
    if (settings.value("masters", false)) {
      masters_.emplace(*net_, lockstep::MasterWeightsOptions{.dtype = dtype_of(precision_)});
      sgd.masters = *masters_;
    }
    if (comm) ddp_.emplace(net_, *comm);
    optimizer_ = std::make_unique<lockstep::Sgd>(net_->parameters(), sgd);
    scaler_ = lockstep::GradScaler({.enabled = precision_ == "fp16"});
    step_.emplace([this](const torch::Tensor& x, const torch::Tensor& y) { return train(x, y); },
                  lockstep::CaptureOptions{.enabled = settings.value("capture", false)});
  }

  torch::Tensor step() { return (*step_)(rows_.x, rows_.y); }

  /// Rows stay where the captured step reads them: they are its peer's tensors too, not copies.
  void settle() {
    if (const auto own = step_->inputs(); !own.empty()) rows_ = {own.at(0), own.at(1)};
  }
  const lockstep::CapturedStep& captured() const { return *step_; }

 private:
  torch::Tensor train(const torch::Tensor& x, const torch::Tensor& y) {
    const int64_t rows = x.size(0) / micro_steps_;
    torch::Tensor sum;
    for (int64_t micro = 0; micro < micro_steps_; ++micro) {
      std::optional<lockstep::NoSync> no_sync;
      if (ddp_ && micro + 1 < micro_steps_) no_sync.emplace(*ddp_);
      torch::Tensor loss;
      {
        const lockstep::Autocast amp(device_, dtype_of(precision_), precision_ != "fp32");
        const auto part = x.narrow(0, micro * rows, rows);
        const auto out = ddp_ ? ddp_->forward(part) : net_->forward(part);
        const auto wanted = y.narrow(0, micro * rows, rows);
        loss =
            net_->fused ? lockstep::mean_squared_error(out, wanted) : torch::mse_loss(out, wanted);
      }
      if (micro_steps_ > 1) loss = loss / micro_steps_;
      scaler_.scale(loss).backward();
      sum = sum.defined() ? sum + loss.detach() : loss.detach();
    }
    scaler_.step(*optimizer_, {.zero_grad = true});
    scaler_.update();
    return sum;
  }

  torch::Device device_;
  std::string precision_;
  int64_t micro_steps_;
  std::shared_ptr<Net> net_;
  Rows rows_;
  std::optional<lockstep::MasterWeights> masters_;
  std::optional<lockstep::DistributedDataParallel<Net>> ddp_;
  std::unique_ptr<lockstep::Sgd> optimizer_;
  lockstep::GradScaler scaler_;
  std::optional<lockstep::CapturedStep> step_;
};

void synchronize(torch::Device device) {
  if (device.is_cuda()) torch::cuda::synchronize();
}

double mib(int64_t bytes) {
  return static_cast<double>(bytes) / (1024 * 1024);
}

// The allocator's own peak. What backends allocate without it is in lockstep's account only.
json gpu_memory(torch::Device device) {
  if (!device.is_cuda()) return nullptr;
  const auto stats = allocator::getDeviceStats(device.index());
  return {{"allocated_mib", mib(stats.allocated_bytes[0].peak)},
          {"reserved_mib", mib(stats.reserved_bytes[0].peak)}};
}

json checked_losses(Trainer& trainer, int64_t steps) {
  json losses = json::array();
  for (int64_t i = 0; i < steps; ++i) losses.push_back(trainer.step().item<double>());
  return losses;
}

int run(int, char** argv) {
  const auto settings = json::parse(argv[1]);
  std::optional<lockstep::World> world;
  std::optional<lockstep::Devices> own;
  std::optional<lockstep::UseDevice> home;
  std::optional<lockstep::Communicator> comm;
  torch::Device device(settings.value("device", "cuda:0"));
  if (settings.value("world", false)) {  // a rank of several
    world.emplace(lockstep::World::from_env({.devices = settings.at("devices")}));
    home.emplace(world->device());
    device = world->device().torch_device();
    comm = world->comm();
    world->device().reset_peak_memory();
  } else {
    if (device.is_cuda()) {  // on the device's stream, as programs are: a step changes none then
      own.emplace(device.str());
      home.emplace((*own)[0]);
    }
    if (settings.value("ddp", false)) comm = lockstep::Communicator::self();
  }
  Trainer trainer(settings, device, comm);
  json ready = {{"pid", ::getpid()},
                {"losses", checked_losses(trainer, settings.value("check_steps", 20))},
                {"replayed", trainer.captured().replayed()},
                {"why_not", trainer.captured().why_not()},
                {"graphs", trainer.captured().stats().graphs},
                {"graph_mib", mib(trainer.captured().stats().memory_bytes)}};
  trainer.settle();
  if (comm) ready["backend"] = comm->backend();
  bench::serve(settings, world ? world->rank() : 0, ready, [&](int64_t steps) -> json {
    if (comm) comm->barrier();
    synchronize(device);
    const int64_t begin_ns = lockstep::monotonic_ns();
    torch::Tensor loss;
    for (int64_t i = 0; i < steps; ++i) loss = trainer.step();
    synchronize(device);
    const auto ns = static_cast<double>(lockstep::monotonic_ns() - begin_ns);
    json answer = {{"ms", ns * 1e-6 / static_cast<double>(steps)},
                   {"loss", loss.item<double>()},
                   {"memory", gpu_memory(device)}};
    if (world) answer["account_mib"] = mib(world->device().memory().peak_bytes);
    return answer;
  });
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return lockstep::run_program(run, argc, argv);
}
