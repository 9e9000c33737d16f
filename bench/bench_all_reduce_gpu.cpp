// How long an all_reduce of a GPU's tensors takes between ranks that share it: from registered
// memory, which peers can read, and from any other. Its counterpart in PyTorch is
// bench/peers/all_reduce_gpu.py. Only builds with CUDA have it; with {"devices": "cpu:2"} it runs
// anywhere.

#include <functional>
#include <nlohmann/json.hpp>
#include <vector>

#include "lockstep/clock.hpp"
#include "lockstep/lockstep.hpp"
#include "serve.hpp"

namespace {

using nlohmann::json;

class Reductions {
 public:
  explicit Reductions(const lockstep::World& world)
      : comm_(world.comm()), device_(world.device().torch_device()) {}

  torch::Tensor make(int64_t bytes, bool registered) const {
    const auto options = torch::TensorOptions(torch::kFloat).device(device_);
    return registered ? comm_.allocate(bytes / 4, options) : torch::zeros({bytes / 4}, options);
  }

  /// Whether every element is the sum over the ranks of what each wrote there.
  bool correct(const torch::Tensor& tensor) const {
    const auto index = torch::arange(tensor.numel(), tensor.options()).remainder(1000);
    tensor.copy_(index * (comm_.rank() + 1));
    comm_.all_reduce(tensor);
    const int ranks = comm_.size();
    return torch::equal(tensor, index * (ranks * (ranks + 1) / 2));
  }

  /// One number for each repetition.
  std::vector<double> microseconds(const torch::Tensor& tensor, int64_t repetitions) const {
    const int64_t calls = tensor.numel() >= 1 << 22 ? 4 : 8;  // sums must stay finite
    std::vector<double> times;
    for (int64_t i = 0; i < repetitions; ++i) {
      tensor.normal_();
      synchronize();
      comm_.barrier();
      const int64_t begin_ns = lockstep::monotonic_ns();
      for (int64_t call = 0; call < calls; ++call) comm_.all_reduce(tensor);
      synchronize();
      times.push_back(static_cast<double>(lockstep::monotonic_ns() - begin_ns) * 1e-3 /
                      static_cast<double>(calls));
    }
    return times;
  }

 private:
  void synchronize() const {
    if (device_.is_cuda()) torch::cuda::synchronize();
  }

  lockstep::Communicator comm_;
  torch::Device device_;
};

int run(int, char** argv) {
  const auto settings = json::parse(argv[1]);
  const auto world = lockstep::World::from_env(
      {.devices = settings.at("devices"), .backend = settings.at("backend")});
  const lockstep::UseDevice home(world.device());
  const Reductions reductions(world);
  const bool registered = settings.value("registered", false);
  std::vector<torch::Tensor> tensors;
  bool correct = true;
  for (const auto& bytes : settings.at("sizes")) {
    tensors.push_back(reductions.make(bytes, registered));
    correct = reductions.correct(tensors.back()) && correct;
    reductions.microseconds(tensors.back(), 2);  // warm-up
  }
  const json ready = {{"backend", world.comm().backend()}, {"correct", correct}};
  bench::serve(settings, world.rank(), ready, [&](int64_t repetitions) -> json {
    json times = json::object();
    for (const auto& tensor : tensors) {
      times[std::to_string(tensor.nbytes())] = reductions.microseconds(tensor, repetitions);
    }
    return {{"us", times}};
  });
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return lockstep::run_program(run, argc, argv);
}
