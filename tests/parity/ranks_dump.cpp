// For tests/parity/ranks_parity.py: what three ranks have after collectives and messages, after
// steps with a sparse embedding, and after steps with SyncBatchNorm, as safetensors.
#include <torch/torch.h>

#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/lockstep.hpp"
#include "wave.hpp"

namespace {

using lockstep::Communicator;
using lockstep::TensorMap;

constexpr int kRanks = 3;

// [rank][peer]: rows that go from one to the other.
constexpr int64_t kRows[kRanks][kRanks] = {{2, 0, 1}, {1, 3, 0}, {0, 2, 2}};

TensorMap collectives(const Communicator& comm) {
  const int rank = comm.rank();
  const auto mine = wave({2, 3}, rank);
  TensorMap out;
  const auto blocks = [&] { return torch::full({kRanks * 2, 3}, -1.0, torch::kDouble); };

  out["sum_at_1"] = mine.clone();
  comm.reduce(out["sum_at_1"], 1);
  out["max_at_2"] = mine.clone();
  comm.reduce(out["max_at_2"], 2, lockstep::ReduceOp::kMax);
  if (rank != 1) out.erase("sum_at_1");  // PyTorch leaves parts of sums there
  if (rank != 2) out.erase("max_at_2");
  out["broadcast"] = mine.clone();
  comm.broadcast(out["broadcast"], 2);
  if (rank == 2) out["gathered"] = blocks();
  comm.gather(rank == 2 ? out["gathered"] : torch::Tensor(), mine, 2);
  out["scattered"] = torch::zeros_like(mine);
  comm.scatter(out["scattered"], wave({kRanks * 2, 3}, rank), 1);
  out["all_gathered"] = blocks();
  comm.all_gather(out["all_gathered"], mine);
  out["exchanged"] = blocks();
  comm.all_to_all(out["exchanged"], wave({kRanks * 2, 3}, rank));

  std::vector<int64_t> to, from;
  for (int peer = 0; peer < kRanks; ++peer) {
    to.push_back(kRows[rank][peer]);
    from.push_back(kRows[peer][rank]);
  }
  const auto total = [](const std::vector<int64_t>& rows) {
    int64_t sum = 0;
    for (const int64_t each : rows) sum += each;
    return sum;
  };
  out["exchanged_rows"] = torch::zeros({total(from), 3}, torch::kDouble);
  comm.all_to_all(out["exchanged_rows"], wave({total(to), 3}, rank), from, to);

  out["received"] = torch::zeros_like(mine);
  auto sending = comm.begin_send(mine, (rank + 1) % kRanks, {.tag = 7});
  auto receiving = comm.begin_recv(out["received"], (rank + kRanks - 1) % kRanks, {.tag = 7});
  sending.wait();
  receiving.wait();
  return out;
}

// Each rank looks up other rows, some of them twice.
TensorMap sparse(const Communicator& comm) {
  torch::nn::Embedding table(torch::nn::EmbeddingOptions(10, 4).sparse(true));
  table->to(torch::kDouble);
  table->weight.set_data(wave({10, 4}, 0.5));
  lockstep::DistributedDataParallel ddp(table, comm);
  torch::optim::SGD optimizer(ddp.parameters(), 0.3);
  for (int step = 0; step < 4; ++step) {
    const auto ids = torch::tensor({comm.rank(), 2 * comm.rank() + step, 5, 5}, torch::kInt64);
    optimizer.zero_grad();
    ddp(ids).pow(2).sum().backward();
    optimizer.step();
  }
  return {{"weight", table->weight.detach()}};
}

// Ranks have 2, 3 and 4 of nine rows; gradients count by them.
TensorMap normed(const Communicator& comm) {
  torch::nn::Sequential net(torch::nn::Linear(5, 6), torch::nn::BatchNorm1d(6),
                            torch::nn::Linear(6, 2));
  net->to(torch::kDouble);
  {
    const torch::NoGradGuard no_grad;
    double phase = 0;
    for (auto& each : net->parameters()) each.copy_(wave(each.sizes(), phase += 0.7));
  }
  lockstep::convert_sync_batchnorm(*net, comm);
  lockstep::DistributedDataParallel ddp(net, comm, {.broadcast_buffers = false});
  lockstep::Sgd optimizer(ddp.parameters(), {.lr = 0.1, .momentum = 0.9});
  const int64_t rows = comm.rank() + 2;
  const int64_t first = comm.rank() * 2 + comm.rank() * (comm.rank() - 1) / 2;
  ddp.set_weight(static_cast<double>(rows));
  for (int step = 0; step < 4; ++step) {
    const auto x = wave({9, 5}, step).narrow(0, first, rows);
    ddp(x).pow(2).mean().backward();
    optimizer.step(lockstep::StepExtras{.max_norm = 0.5, .zero_grad = true});
  }
  TensorMap out;
  for (const auto& item : net->named_parameters()) out[item.key()] = item.value().detach();
  for (const auto& item : net->named_buffers()) out[item.key()] = item.value();
  return out;
}

int dump(int count, char** words) {
  if (count != 3) return 2;
  const std::string what = words[1];
  const auto run = what == "collectives" ? collectives : what == "sparse" ? sparse : normed;
  auto comms = Communicator::threads(kRanks);
  std::mutex mutex;
  TensorMap all;
  std::vector<std::thread> ranks;
  for (const auto& comm : comms) {
    ranks.emplace_back([&] {
      const auto found = run(comm);
      const std::lock_guard lock(mutex);
      for (const auto& [name, tensor] : found) {
        all["rank" + std::to_string(comm.rank()) + "." + name] = tensor.clone();
      }
    });
  }
  for (auto& rank : ranks) rank.join();
  lockstep::save_tensors(words[2], all);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return lockstep::run_program(dump, argc, argv);
}
