// One rank of a DDP step on an MLP. Rank 0 prints JSON: the median step, memory, and bytes sent.
// With {"only_start": true} it ends after the first all_reduce. Its counterpart in PyTorch is
// bench/peers/ddp.py; both take the same JSON of settings.

#include <fmt/format.h>
#include <sys/resource.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "lockstep/clock.hpp"
#include "lockstep/lockstep.hpp"

namespace {

using lockstep::monotonic_ns;

// Memory of this process; shared pages are divided among the processes that map them.
double resident_mib() {
  std::ifstream file("/proc/self/smaps_rollup");
  for (std::string word; file >> word;) {
    if (word == "Pss:") {
      double kib = 0;
      file >> kib;
      return kib / 1024;
    }
  }
  return 0;
}

template <class Linear>
torch::nn::Sequential make_net(const nlohmann::json& settings) {
  const auto dim = settings.at("dim").get<int64_t>();
  const auto hidden = settings.at("hidden").get<int64_t>();
  torch::nn::Sequential net(Linear(dim, hidden), torch::nn::ReLU());
  for (int i = 0; i < settings.at("depth").get<int>(); ++i) {
    net->push_back(Linear(hidden, hidden));
    net->push_back(torch::nn::ReLU());
  }
  net->push_back(Linear(hidden, dim));
  return net;
}

// A wrapper of Sequential, whose own forward is a template that DDP cannot name.
struct Net : torch::nn::Module {
  explicit Net(const nlohmann::json& settings)
      : layers(register_module("layers", settings.value("kernels", true)
                                             ? make_net<lockstep::Linear>(settings)
                                             : make_net<torch::nn::Linear>(settings))) {}
  torch::Tensor forward(const torch::Tensor& x) { return layers->forward(x); }
  torch::nn::Sequential layers;
};

// The median without the first quarter, in which caches and allocators warm up.
double settled_median(std::vector<double> times) {
  times.erase(times.begin(), times.begin() + static_cast<std::ptrdiff_t>(times.size() / 4));
  return lockstep::summarize(times).median;
}

int train(int, char** argv) {
  const auto settings = nlohmann::json::parse(argv[1]);
  const int ranks = lockstep::RankEnvironment::from_env().local_world_size;
  const auto world = lockstep::World::from_env({.devices = fmt::format("cpu:{}", ranks)});
  const lockstep::UseDevice home(world.device());
  const torch::Tensor one = torch::ones({1});
  world.comm().all_reduce(one);
  if (settings.value("only_start", false)) return 0;

  const double before_mib = resident_mib();
  torch::manual_seed(0);
  const auto net = std::make_shared<Net>(settings);
  std::optional<lockstep::DistributedDataParallel<Net>> ddp;
  std::optional<lockstep::FullyShardedDataParallel<Net>> shared;  // one copy of the weights
  if (settings.value("shared", false)) {
    shared.emplace(net, world.comm(),
                   lockstep::ShardOptions{.stage = lockstep::ShardStage::kOptimizer});
  } else if (!settings.value("bare", false)) {
    ddp.emplace(net, world.comm(),
                lockstep::DdpOptions{.virtual_shards = settings.value("virtual_shards", 0),
                                     .part_threads = settings.value("part_threads", 1)});
  }
  const bool in_parts = settings.value("virtual_shards", 0) > 0;
  const auto forward = [&](const torch::Tensor& rows) {
    return shared ? shared->forward(rows) : ddp ? ddp->forward(rows) : net->forward(rows);
  };
  lockstep::Sgd optimizer(shared ? shared->parameters() : net->parameters(), {.lr = 1e-2});
  const int64_t rows = settings.at("batch").get<int64_t>() / world.size();
  const auto x = torch::randn({rows, settings.at("dim").get<int64_t>()});
  const auto y = torch::sin(x);
  const bool bf16 = settings.value("bf16", false);

  std::vector<double> times;
  double peak_mib = 0;
  const bool weigh = settings.value("memory", false);
  const auto look = [&] {
    if (weigh) peak_mib = std::max(peak_mib, resident_mib());
  };
  const int accumulate = settings.value("accumulate", 1);
  std::vector<double> off_times;  // of micro-steps that are not synchronised
  for (int step = 0; step < settings.at("steps").get<int>(); ++step) {
    world.comm().barrier();
    const int64_t begin_ns = monotonic_ns();
    optimizer.zero_grad();
    for (int micro = 0; micro < accumulate; ++micro) {
      const int64_t micro_begin_ns = monotonic_ns();
      std::optional<lockstep::NoSync> no_sync;
      if (ddp && micro + 1 < accumulate) no_sync.emplace(*ddp);
      const auto loss_of = [&](const torch::Tensor& input, const torch::Tensor& target) {
        const lockstep::Autocast amp(torch::kCPU, torch::kBFloat16, bf16);
        return torch::mse_loss(forward(input), target);
      };
      if (in_parts) {
        ddp->backward_parts(x, y, loss_of);
      } else {
        const torch::Tensor loss = loss_of(x, y);
        look();
        loss.backward();
      }
      look();
      if (micro + 1 < accumulate) {
        off_times.push_back(static_cast<double>(monotonic_ns() - micro_begin_ns) * 1e-6);
      }
    }
    optimizer.step();
    look();
    times.push_back(static_cast<double>(monotonic_ns() - begin_ns) * 1e-6);
  }
  if (world.rank() == 0) {
    fmt::print("{}\n", nlohmann::json{{"ms", settled_median(times)},
                                      {"off_ms", settled_median(off_times)},
                                      {"mib", peak_mib - before_mib},
                                      {"bytes", ddp ? ddp->stats().bytes : 0},
                                      {"version", std::string("lockstep, libtorch ") +
                                                      lockstep::describe_versions().at("libtorch")}}
                           .dump());
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return lockstep::run_program(train, argc, argv);
}
