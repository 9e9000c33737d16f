#pragma once

// Names that snippets of the pages use without declaring them. docs_test.py only checks the
// snippets' syntax and types, so nothing here is defined.

#include <torch/torch.h>

#include <chrono>
#include <cstdio>
#include <functional>
#include <iostream>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "lockstep/lockstep.hpp"

struct NetImpl : torch::nn::Module {
  torch::Tensor forward(const torch::Tensor& x);
};
TORCH_MODULE(Net);

struct CloneableNetImpl : torch::nn::Cloneable<CloneableNetImpl> {
  void reset() override;
  torch::Tensor forward(const torch::Tensor& x);
};
TORCH_MODULE(CloneableNet);

extern const lockstep::World world;
extern const lockstep::Communicator comm;
extern const lockstep::Mesh mesh;
extern const lockstep::Devices devices;
extern const lockstep::Schedule schedule;

extern Net net;
extern torch::nn::Sequential model;
extern torch::nn::Linear up, down, qkv;
extern torch::nn::LayerNorm ln;
extern Net discriminator, generator;
extern std::vector<torch::nn::Sequential> stages;
extern lockstep::DistributedDataParallel<NetImpl> ddp, d, g;
extern lockstep::Sgd optimizer, d_optimizer, g_optimizer;
extern torch::optim::SGD torch_optimizer;
extern lockstep::GradScaler scaler;

extern torch::Tensor tokens, next_tokens, copy;
extern torch::Tensor x, y, z, real, branch, loss, my_rows, my_targets;
extern const int64_t heads, k, accum_steps, dataset_size, epochs, steps;
extern std::vector<std::pair<torch::Tensor, torch::Tensor>> batches;
extern std::vector<torch::data::Example<>>* loader;
struct Points : torch::data::datasets::BatchDataset<Points, torch::data::Example<>> {
  torch::data::Example<> get_batch(torch::ArrayRef<size_t> rows) override;
  torch::optional<size_t> size() const override;
};
extern Points dataset;
extern std::vector<torch::nn::Sequential> blocks;
extern lockstep::Checkpoint checkpoint;
extern const int64_t start;

torch::Tensor rows(int64_t micro);
torch::Tensor targets(int64_t micro);
torch::Tensor d_loss(const torch::Tensor& out);
torch::Tensor g_loss(const torch::Tensor& out);
torch::Tensor criterion(const torch::Tensor& out, const torch::Tensor& target);
void step(const torch::data::Example<>& batch);
void use(int64_t row);
double accuracy_of(Net& trained);
