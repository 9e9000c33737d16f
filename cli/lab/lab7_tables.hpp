#pragma once

#include "cli/lab/lab7_results.hpp"
#include "lockstep/table.hpp"

namespace lockstep::cli {

/// Goal, memory, speed and communication of accumulation and of lower precision.
Table techniques_table(const Lab7Results& results);

/// Step time, communication, gradient and memory of every way to make a large batch.
Table accumulation_table(const Lab7Results& results);

/// Step time and stability in fp32 and in lower precision, with and without a scaler.
Table precision_table(const Lab7Results& results);

/// What the peak memory of each technique is made of.
Table memory_split_table(const Lab7Results& results);

/// How many gradient values fp16 would lose, unscaled and scaled.
Table gradients_table(const Lab7Results& results);

}  // namespace lockstep::cli
