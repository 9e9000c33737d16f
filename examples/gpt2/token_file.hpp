#pragma once

#include <torch/types.h>

#include <cstdint>
#include <string>
#include <vector>

namespace gpt2 {

/// Tokens of a `.bin` file: uint16, little-endian, alone (nanoGPT) or behind llm.c's header of
/// 1,024 bytes. The file is mapped, not read.
class TokenFile {
 public:
  /// `vocabulary`: tokens must be smaller; those that are looked at are checked.
  TokenFile(const std::string& path, int64_t vocabulary);

  int64_t size() const { return tokens_.size(0); }
  int64_t vocabulary() const { return vocabulary_; }

  /// int64 tokens from `first` on.
  torch::Tensor read(int64_t first, int64_t count) const;

 private:
  std::string path_;
  int64_t vocabulary_;
  torch::Tensor tokens_;  // int16, to be read as uint16
};

/// Rows of tokens and what follows each token.
struct Batch {
  torch::Tensor x;  // int64 [rows, positions]
  torch::Tensor y;  // likewise; kIgnored if there is nothing to predict
};

inline constexpr int64_t kIgnored = -100;

/// The rows of one step of training, drawn at random places. They depend on the seed and the step
/// only, so that every layout and every resumed run sees the same.
Batch draw_batch(const TokenFile& file, int64_t rows, int64_t context, uint64_t seed, int64_t step);

/// A file is cut into windows of `context` tokens, of which the last may be shorter. These are rows
/// `first` to `first + count`, which have one length.
Batch read_windows(const TokenFile& file, int64_t first, int64_t count, int64_t context);
int64_t count_windows(const TokenFile& file, int64_t context);

/// Adds rows and positions, whose targets are ignored, until there are at least `rows` rows and a
/// multiple of `multiple` positions.
Batch pad_batch(Batch batch, int64_t rows, int64_t multiple);

void write_tokens(const std::string& path, const std::vector<int>& tokens);

}  // namespace gpt2
