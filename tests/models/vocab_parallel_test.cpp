// An embedding and a cross entropy whose vocabulary is divided compute the numbers of the whole
// ones.

#include "lockstep/vocab_parallel.hpp"

#include "device/parameter_notes.hpp"
#include "lockstep/optim.hpp"
#include "models/model_support.hpp"

namespace lockstep::test::vocab_parallel_test {
namespace {

namespace F = torch::nn::functional;

constexpr int64_t kRows = 11;  // not a multiple of 2, 3 or 5
constexpr int64_t kWidth = 4;
constexpr int64_t kPositions = 30;

torch::nn::Embedding whole_embedding(const torch::nn::EmbeddingOptions& options) {
  torch::nn::Embedding embedding(options);
  const torch::NoGradGuard no_grad;
  embedding->to(torch::kFloat64);
  embedding->weight.copy_(values({kRows, kWidth}));
  return embedding;
}

torch::nn::Embedding whole_embedding() {
  return whole_embedding(torch::nn::EmbeddingOptions(kRows, kWidth));
}

torch::Tensor some_ids(torch::IntArrayRef sizes, uint64_t seed = 3) {
  return torch::randint(kRows, sizes, at::detail::createCPUGenerator(seed), torch::kInt64);
}

torch::Tensor own_rows(const torch::Tensor& whole, const Communicator& axis, int64_t dim = 0) {
  return torch::tensor_split(whole, axis.size(), dim)[static_cast<size_t>(axis.rank())];
}

TEST(VocabParallelEmbedding, OutputAndGradientsAreThoseOfTheWhole) {
  auto whole = whole_embedding();
  const auto ids = some_ids({2, kPositions});
  const auto coefficients = values({2, kPositions, kWidth}, 9);
  const auto expected = whole(ids);
  (expected * coefficients).sum().backward();
  for (const int ranks : {1, 2, 3, 5}) {
    for (const bool slices : {false, true}) {
      run_ranks(ranks, [&](const Communicator& axis) {
        VocabParallelEmbedding wte(whole, axis, {.sequence_parallel = slices});
        const auto part = [&](const torch::Tensor& all) {
          return slices ? own_slice(all, axis, 1) : all;
        };
        const auto found = wte(ids);
        EXPECT_TRUE(torch::equal(found.detach(), part(expected).detach()));
        (found * part(coefficients)).sum().backward();
        expect_close(wte->weight.grad(), own_rows(whole->weight.grad(), axis), "gradient");
        EXPECT_TRUE(torch::equal(wte->whole_weight(), whole->weight));
        EXPECT_EQ(wte->rows(), kRows);
        if (ranks > 1) {
          EXPECT_EQ(slice_of(wte->weight).whole, (Shape{kRows, kWidth}));
        }
      });
    }
  }
}

TEST(VocabParallelEmbedding, PaddingGetsNoGradient) {
  for (const int64_t padding : {0, 7, 10}) {
    auto whole = whole_embedding(torch::nn::EmbeddingOptions(kRows, kWidth).padding_idx(padding));
    const auto ids = torch::arange(kRows);
    whole(ids).sum().backward();
    run_ranks(3, [&](const Communicator& axis) {
      VocabParallelEmbedding wte(whole, axis);
      wte(ids).sum().backward();
      expect_close(wte->weight.grad(), own_rows(whole->weight.grad(), axis), "gradient");
    });
  }
}

TEST(VocabParallelEmbedding, RefusesWhatItCannotDo) {
  run_ranks(2, [](const Communicator& axis) {
    VocabParallelEmbedding wte(whole_embedding(), axis);
    expect_error(Code::kTensorMismatch, {"11 rows", "from 0 to 11"}, [&] {
      wte(torch::tensor({0, 11}, torch::kInt64));
    });
    using torch::nn::EmbeddingOptions;
    const EmbeddingOptions sizes(kRows, kWidth);
    for (const auto& [name, options] :
         {std::pair{"max_norm", EmbeddingOptions(sizes).max_norm(1)},
          std::pair{"sparse", EmbeddingOptions(sizes).sparse(true)},
          std::pair{"scale_grad_by_freq", EmbeddingOptions(sizes).scale_grad_by_freq(true)}}) {
      expect_error(Code::kUsage, {name},
                   [&] { VocabParallelEmbedding(torch::nn::Embedding(options), axis); });
    }
    EXPECT_EQ(axis.stats().calls, 0);
  });
}

struct LossCase {
  F::CrossEntropyFuncOptions options;
  bool ignores = false;
};

std::vector<LossCase> loss_cases() {
  using Options = F::CrossEntropyFuncOptions;
  return {{Options(), false},
          {Options().reduction(torch::kSum), false},
          {Options().reduction(torch::kNone), false},
          {Options().ignore_index(4), true},
          {Options().ignore_index(-1).reduction(torch::kSum), true},
          {Options().label_smoothing(0.1), false},
          {Options().label_smoothing(0.2).ignore_index(4), true}};
}

TEST(VocabParallelCrossEntropy, LossAndGradientsAreThoseOfTheWhole) {
  const auto given = values({2, 15, kRows}) * 5;
  for (const auto& [options, ignores] : loss_cases()) {
    auto targets = some_ids({2, 15}, 4);
    if (ignores) targets[0].slice(0, 0, 5).fill_(options.ignore_index());
    const auto logits = leaf(given);
    const auto expected = F::cross_entropy(logits.view({-1, kRows}), targets.view({-1}), options);
    expected.sum().backward();
    for (const int ranks : {1, 2, 3, 5}) {
      run_ranks(ranks, [&](const Communicator& axis) {
        const auto own = leaf(own_rows(given, axis, -1));
        const auto loss = vocab_parallel_cross_entropy(own, targets, kRows, axis, options);
        expect_close(loss.detach().flatten(), expected.detach().flatten(), "loss");
        expect_same_on_all(axis, loss.detach().flatten(), "loss");
        EXPECT_LE(axis.stats().all_reduce_bytes, ranks == 1 ? 0 : 4 * 30 * 8) << "no logits";
        loss.sum().backward();
        expect_close(own.grad(), own_rows(logits.grad(), axis, -1), "gradient");
      });
    }
  }
}

// Rows whose logits are far apart need the maximum over all ranks.
TEST(VocabParallelCrossEntropy, LargeLogitsDoNotOverflow) {
  const auto given = values({6, kRows}).to(torch::kFloat32) * 1000;
  const auto targets = some_ids({6});
  const auto expected = F::cross_entropy(given, targets);
  run_ranks(3, [&](const Communicator& axis) {
    const auto own = own_rows(given, axis, -1);
    expect_close(vocab_parallel_cross_entropy(own, targets, kRows, axis), expected, "float32");
    const auto low = vocab_parallel_cross_entropy(own.to(torch::kBFloat16), targets, kRows, axis);
    EXPECT_EQ(low.scalar_type(), torch::kFloat32);
    EXPECT_TRUE(torch::allclose(low, expected, 0.02, 0.02));
  });
}

TEST(VocabParallelCrossEntropy, RefusesWhatItCannotDo) {
  const auto given = values({3, kRows});
  run_ranks(2, [&](const Communicator& axis) {
    const auto own = own_rows(given, axis, -1);
    const auto targets = some_ids({3});
    expect_error(Code::kTensorMismatch, {"of 11 classes", "[3, 11]"},
                 [&] { vocab_parallel_cross_entropy(given, targets, kRows, axis); });
    expect_error(Code::kTensorMismatch, {"Int"}, [&] {
      vocab_parallel_cross_entropy(own, targets.to(torch::kInt32), kRows, axis);
    });
    expect_error(Code::kTensorMismatch, {"neither one of 11 classes nor ignore_index"},
                 [&] { vocab_parallel_cross_entropy(own, targets + kRows, kRows, axis); });
    expect_error(Code::kUsage, {"class weights"}, [&] {
      vocab_parallel_cross_entropy(own, targets, kRows, axis,
                                   F::CrossEntropyFuncOptions().weight(torch::ones({kRows})));
    });
    EXPECT_EQ(axis.stats().calls, 0);
    const auto trained = leaf(own);
    const auto loss = vocab_parallel_cross_entropy(trained, targets, kRows, axis);
    expect_error(Code::kEngine, {"differentiated twice"}, [&] {
      torch::autograd::grad({loss}, {trained}, {}, true, /*create_graph=*/true);
    });
  });
}

// Embedding and output layer with one weight, trained and clipped as on one device.
TEST(VocabParallel, TiedWeightsTrainAsOneDevice) {
  const auto ids = some_ids({2, kPositions});
  const auto targets = some_ids({2, kPositions}, 5);
  auto whole = whole_embedding();
  const auto untouched = whole_embedding();
  AdamW single(whole->parameters(), {.lr = 0.05});
  std::vector<double> losses, norms;
  for (int step = 0; step < 5; ++step) {
    const auto logits = F::linear(torch::tanh(whole(ids)), whole->weight);
    const auto loss = F::cross_entropy(logits.view({-1, kRows}), targets.view({-1}));
    loss.backward();
    losses.push_back(loss.item<double>());
    norms.push_back(single.step({.max_norm = 0.1, .zero_grad = true}).item<double>());
  }
  EXPECT_LT(losses.back(), losses.front());
  for (const int ranks : {1, 2, 3, 5}) {
    for (const bool slices : {false, true}) {
      run_ranks(ranks, [&](const Communicator& axis) {
        VocabParallelEmbedding wte(untouched, axis, {.sequence_parallel = slices});
        AdamW optimizer(wte->parameters(), {.lr = 0.05});
        for (size_t step = 0; step < losses.size(); ++step) {
          const auto loss = vocab_parallel_cross_entropy(wte->logits(torch::tanh(wte(ids))),
                                                         targets, kRows, axis);
          loss.backward();
          EXPECT_NEAR(loss.item<double>(), losses[step], 1e-12);
          const auto norm = optimizer.step({.max_norm = 0.1, .zero_grad = true});
          EXPECT_NEAR(norm.item<double>(), norms[step], 1e-12);
        }
        expect_close(wte->whole_weight(), whole->weight.detach(), "weight");
      });
    }
  }
}

}  // namespace
}  // namespace lockstep::test::vocab_parallel_test
