#pragma once

#include <cstdint>
#include <string>

#include "model.hpp"
#include "parallel_model.hpp"

namespace gpt2 {

struct TrainOptions {
  std::string data;        // folder with train.bin, val.bin and maybe a tokenizer
  std::string init;        // folder of a published model to go on from; empty: new weights
  std::string out;         // folder for the trained model; empty: none
  std::string checkpoint;  // folder; empty: none
  int64_t save_every = 100;
  Config config;
  Layout layout;
  int64_t steps = 100;
  int64_t batch = 8;       // rows of an update, over all ranks and parts
  int64_t accumulate = 1;  // parts of an update
  double lr = 6e-4;
  double min_lr = 6e-5;
  int64_t warmup = 10;
  double weight_decay = 0.1;
  double max_norm = 1;
  bool bf16 = false;
  uint64_t seed = 0;
  int64_t log_every = 10;
  int64_t validate_every = 0;    // 0: at the end only
  int64_t validate_windows = 0;  // 0: all of val.bin
};

/// Trains a GPT-2 on this rank, with all others. Returns the program's exit code.
int train(const TrainOptions& options);

/// The learning rate of an update, counted from 1: up in a line, then down along a cosine.
double rate_at(const TrainOptions& options, int64_t step);

}  // namespace gpt2
