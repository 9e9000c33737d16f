// DDP with gradients of Embedding(sparse), and with Embedding(max_norm).

#include <ATen/CPUGeneratorImpl.h>
#include <torch/torch.h>

#include "ddp_nets.hpp"
#include "lockstep/distributed_data_parallel.hpp"
#include "lockstep/grad_scaler.hpp"
#include "lockstep/optim.hpp"
#include "rank_threads.hpp"

namespace lockstep::test::sparse_gradients_test {
namespace {

constexpr int64_t kWords = 11;
constexpr int64_t kWidth = 4;

struct WordsImpl : torch::nn::Module {
  explicit WordsImpl(bool sparse)
      : table(register_module(
            "table",
            torch::nn::Embedding(torch::nn::EmbeddingOptions(kWords, kWidth).sparse(sparse)))),
        bag(register_module(
            "bag",
            torch::nn::EmbeddingBag(
                torch::nn::EmbeddingBagOptions(kWords, kWidth).sparse(sparse).mode(torch::kSum)))),
        head(register_module("head", torch::nn::Linear(kWidth, 1))) {
    // Ranks are threads here, which would share the process's generator.
    const auto generator = at::detail::createCPUGenerator(7);
    for (const auto& parameter : parameters()) {
      torch::NoGradGuard no_grad;
      parameter.normal_(0, 1, generator);
    }
    to(torch::kFloat64);
  }
  torch::Tensor forward(const torch::Tensor& words) {
    return head(table(words).sum(1) + bag(words)).squeeze(1);
  }
  torch::nn::Embedding table;
  torch::nn::EmbeddingBag bag;
  torch::nn::Linear head;
};
TORCH_MODULE(Words);

// Sentences of a rank: rows of different numbers of words, some twice, and for rank 2 all the same.
torch::Tensor sentences(int rank, int step) {
  if (rank == 2) return torch::full({3, 2}, 5, torch::kInt64);
  return torch::arange(3 * (rank + 1), torch::kInt64)
      .mul_(2 + step)
      .add_(rank)
      .remainder_(kWords)
      .view({3, -1});
}

torch::Tensor target(int rank) {
  return torch::full({3}, static_cast<double>(rank) - 0.5, torch::kFloat64);
}

// The same training with dense gradients in one process: the mean of the ranks' losses.
std::vector<torch::Tensor> trained_in_one_process(int size, int steps, int micro_steps) {
  Words net(false);
  torch::optim::SGD optimizer(net->parameters(), 0.05);
  for (int step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    for (int part = 0; part < micro_steps; ++part) {
      for (int rank = 0; rank < size; ++rank) {
        (torch::mse_loss(net(sentences(rank, step + part)), target(rank)) / size).backward();
      }
    }
    optimizer.step();
  }
  return net->parameters();
}

void expect_equal_parameters(const std::vector<torch::Tensor>& got,
                             const std::vector<torch::Tensor>& wanted) {
  ASSERT_EQ(got.size(), wanted.size());
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_TRUE(torch::allclose(got[i], wanted[i], /*rtol=*/1e-12, /*atol=*/1e-12))
        << "parameter " << i;
  }
}

TEST(SparseGradients, AreAveragedAsDenseOnesAre) {
  for (const int size : {1, 2, 3, 5}) {
    for (const int micro_steps : {1, 3}) {
      SCOPED_TRACE(size);
      const auto wanted = trained_in_one_process(size, 4, micro_steps);
      run_ranks(size, [&](const Communicator& comm) {
        Words net(true);
        DistributedDataParallel ddp(net, comm);
        torch::optim::SGD optimizer(net->parameters(), 0.05);
        for (int step = 0; step < 4; ++step) {
          ddp.zero_grad();
          for (int part = 0; part < micro_steps; ++part) {
            std::optional<NoSync> accumulate;
            if (part + 1 < micro_steps) accumulate.emplace(ddp);
            torch::mse_loss(ddp(sentences(comm.rank(), step + part)), target(comm.rank()))
                .backward();
          }
          EXPECT_TRUE(net->table->weight.grad().is_sparse());
          if (size > 1) {
            EXPECT_TRUE(net->table->weight.grad().is_coalesced());
          }
          expect_same_on_all(comm, net->table->weight.grad().to_dense(), "sparse gradient");
          optimizer.step();
        }
        expect_equal_parameters(net->parameters(), wanted);
        expect_same_on_all(comm, flat_weights(net->parameters()), "weights");
      });
    }
  }
}

TEST(SparseGradients, OfAModelThatHasNoOthers) {
  run_ranks(3, [](const Communicator& comm) {
    torch::nn::Embedding table(torch::nn::EmbeddingOptions(6, 2).sparse(true));
    DistributedDataParallel ddp(table, comm);
    for (int step = 0; step < 3; ++step) {
      ddp.zero_grad();
      // Rank 2 looks nothing up.
      const auto words = comm.rank() == 2 ? torch::empty({0}, torch::kInt64)
                                          : torch::tensor({comm.rank(), 3}, torch::kInt64);
      ddp(words).sum().backward();
      const auto gradient = table->weight.grad().to_dense();
      EXPECT_FLOAT_EQ(gradient[0][0].item<float>(), 1.0F / 3);
      EXPECT_FLOAT_EQ(gradient[1][1].item<float>(), 1.0F / 3);
      EXPECT_FLOAT_EQ(gradient[3][0].item<float>(), 2.0F / 3);
      EXPECT_FLOAT_EQ(gradient[5][0].item<float>(), 0.0F);
    }
  });
}

TEST(SparseGradients, CountByTheWeightsOfTheRanks) {
  run_ranks(2, [](const Communicator& comm) {
    torch::nn::Embedding table(torch::nn::EmbeddingOptions(4, 1).sparse(true));
    DistributedDataParallel ddp(table, comm);
    ddp.set_weight(comm.rank() == 0 ? 3 : 1);
    ddp(torch::tensor({comm.rank()}, torch::kInt64)).sum().backward();
    const auto gradient = table->weight.grad().to_dense();
    EXPECT_FLOAT_EQ(gradient[0][0].item<float>(), 0.75F);
    EXPECT_FLOAT_EQ(gradient[1][0].item<float>(), 0.25F);
  });
}

TEST(SparseGradients, AreUnscaledAndSkippedByTheScaler) {
  run_ranks(2, [](const Communicator& comm) {
    torch::nn::Embedding table(torch::nn::EmbeddingOptions(4, 2).sparse(true));
    DistributedDataParallel ddp(table, comm);
    torch::optim::SGD optimizer(table->parameters(), 0.5);
    GradScaler scaler({.init_scale = 8});
    const auto before = table->weight.detach().clone();
    ddp.zero_grad();
    scaler.scale(ddp(torch::tensor({comm.rank()}, torch::kInt64)).sum()).backward();
    scaler.unscale_(optimizer);
    EXPECT_FLOAT_EQ(table->weight.grad().to_dense()[0][0].item<float>(), 0.5F);
    table->weight.grad()._values().mul_(0.1);  // as clipping by hand does
    EXPECT_NEAR(table->weight.grad().to_dense().norm().item<double>(), 0.1, 1e-6);
    scaler.step(optimizer);
    scaler.update();
    EXPECT_GT((table->weight.detach() - before).abs().max().item<double>(), 0.01);
    const auto kept = table->weight.detach().clone();
    ddp.zero_grad();
    const double loss_scale = comm.rank() == 1 ? std::numeric_limits<double>::infinity() : 1.0;
    scaler.scale(ddp(torch::tensor({comm.rank()}, torch::kInt64)).sum() * loss_scale).backward();
    scaler.step(optimizer);
    scaler.update();
    EXPECT_TRUE(torch::equal(table->weight.detach(), kept)) << "a step with infinite gradients";
    expect_same_on_all(comm, table->weight.detach(), "table");
  });
}

// On one rank a gradient has a row for each lookup; those of one word are one row in the norm.
TEST(SparseGradients, AreClippedAsDenseOnesAre) {
  const auto words = torch::tensor({1, 1, 1, 2}, torch::kInt64);
  const auto clipped = [&](bool sparse, const Communicator& comm) {
    Words net(sparse);
    DistributedDataParallel ddp(net, comm);
    ddp(words.view({2, 2})).square().sum().backward();
    const auto norm = clip_grad_norm_(net->parameters(), 0.5);
    std::vector<torch::Tensor> found = {norm};
    for (const auto& parameter : net->parameters()) {
      const auto gradient = parameter.grad();
      found.push_back((gradient.is_sparse() ? gradient.to_dense() : gradient).clone());
    }
    return found;
  };
  for (const int size : {1, 2}) {
    run_ranks(size, [&](const Communicator& comm) {
      expect_equal_parameters(clipped(true, comm), clipped(false, comm));
    });
  }
}

TEST(SparseGradients, RanksThatRunOutOfDataFollow) {
  run_ranks(2, [](const Communicator& comm) {
    Words net(true);
    DistributedDataParallel ddp(net, comm);
    torch::optim::SGD optimizer(net->parameters(), 0.05);
    join(ddp, [&] {
      for (int step = 0; step < 2 + comm.rank(); ++step) {
        ddp.zero_grad();
        torch::mse_loss(ddp(sentences(comm.rank(), step)), target(comm.rank())).backward();
        optimizer.step();
      }
    });
    expect_same_on_all(comm, flat_weights(net->parameters()), "weights");
  });
}

TEST(SparseGradients, ATableThatIsAlsoUsedDenselyIsRefusedByName) {
  const auto outcomes = outcomes_of_ranks(2, [](const Communicator& comm) {
    torch::nn::Embedding table(torch::nn::EmbeddingOptions(4, 2).sparse(true));
    DistributedDataParallel ddp(table, comm);
    (ddp(torch::tensor({1}, torch::kInt64)).sum() + table->weight.sum()).backward();
  });
  EXPECT_EQ(outcomes[0].code(), Code::kTensorMismatch) << outcomes[0].text();
  EXPECT_NE(outcomes[0].text().find("weight"), std::string::npos) << outcomes[0].text();
}

// Each rank looks up other rows, which PyTorch shortens on that rank only.
TEST(LimitedEmbeddings, StayTheSameOnAllRanks) {
  for (const int size : {2, 3}) {
    torch::manual_seed(2);
    const auto start = torch::randn({6, 3}, torch::kFloat64) * 3;
    const auto make = [&] {
      torch::nn::Embedding table(torch::nn::EmbeddingOptions(6, 3).max_norm(1.0));
      table->to(torch::kFloat64);
      const torch::NoGradGuard no_grad;
      table->weight.copy_(start);
      return table;
    };
    const auto words_of = [](int rank, int step) {
      return torch::tensor({rank, (rank + step + 1) % 6}, torch::kInt64);
    };
    auto one = make();
    torch::optim::SGD one_optimizer(one->parameters(), 0.8);
    for (int step = 0; step < 6; ++step) {
      one_optimizer.zero_grad();
      std::vector<torch::Tensor> words;
      for (int rank = 0; rank < size; ++rank) words.push_back(words_of(rank, step));
      (one(torch::cat(words)).square().sum() / size * -1).backward();
      one_optimizer.step();
    }
    // All rows as they are when they are looked up. A lookup writes, so the ranks' threads must not
    // share one.
    const auto all = torch::arange(6, torch::kInt64);
    const auto expected = one(all).detach();
    run_ranks(size, [&](const Communicator& comm) {
      auto table = make();
      DistributedDataParallel ddp(table, comm);
      torch::optim::SGD optimizer(table->parameters(), 0.8);
      for (int step = 0; step < 6; ++step) {
        ddp.zero_grad();
        (ddp(words_of(comm.rank(), step)).square().sum() * -1).backward();
        optimizer.step();
        expect_same_on_all(comm, table->weight.detach(), "table");
      }
      ddp.check_replicas();
      const torch::NoGradGuard no_grad;
      EXPECT_LE((table(all) - expected).abs().max().item<double>(), 1e-12);
    });
  }
}

}  // namespace
}  // namespace lockstep::test::sparse_gradients_test
