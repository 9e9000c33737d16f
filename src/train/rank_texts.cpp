#include "train/rank_texts.hpp"

#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstring>

namespace lockstep {
namespace {

// A rank may take long to write its files. One that has died is noticed without a deadline.
constexpr std::chrono::hours kWriteTimeout{2};

CallOptions call_options() {
  return {.label = "checkpoint", .timeout = kWriteTimeout};
}

// Sizes first, then blocks of equal size.
std::vector<std::vector<int64_t>> gather_words(const Communicator& ranks,
                                               const std::vector<int64_t>& mine) {
  const auto size = torch::full({1}, static_cast<int64_t>(mine.size()), torch::kInt64);
  const auto sizes = torch::zeros({ranks.size()}, torch::kInt64);
  ranks.all_gather(sizes, size, call_options());
  const int64_t longest = sizes.max().item<int64_t>();
  const auto count = [&](int rank) { return static_cast<size_t>(sizes[rank].item<int64_t>()); };
  std::vector<std::vector<int64_t>> all(static_cast<size_t>(ranks.size()));
  if (longest == 0) return all;
  const auto block = torch::zeros({longest}, torch::kInt64);
  std::copy(mine.begin(), mine.end(), block.data_ptr<int64_t>());
  const auto blocks = torch::zeros({ranks.size() * longest}, torch::kInt64);
  ranks.all_gather(blocks, block, call_options());
  for (int rank = 0; rank < ranks.size(); ++rank) {
    const int64_t* first = blocks.data_ptr<int64_t>() + rank * longest;
    all[static_cast<size_t>(rank)].assign(first, first + count(rank));
  }
  return all;
}

std::vector<int64_t> packed(const std::string& text) {
  std::vector<int64_t> words(1 + (text.size() + 7) / 8);
  words[0] = static_cast<int64_t>(text.size());
  if (!text.empty()) std::memcpy(words.data() + 1, text.data(), text.size());
  return words;
}

std::string unpacked(const std::vector<int64_t>& words) {
  std::string text(words.empty() ? 0 : static_cast<size_t>(words[0]), '\0');
  if (!text.empty()) std::memcpy(text.data(), words.data() + 1, text.size());
  return text;
}

}  // namespace

std::vector<std::vector<int64_t>> all_gather_numbers(const Communicator& ranks,
                                                     const std::vector<int64_t>& mine) {
  if (ranks.size() == 1) return {mine};
  return gather_words(ranks, mine);
}

std::vector<std::string> all_gather_texts(const Communicator& ranks, const std::string& mine) {
  if (ranks.size() == 1) return {mine};
  std::vector<std::string> texts;
  for (const auto& words : gather_words(ranks, packed(mine))) texts.push_back(unpacked(words));
  return texts;
}

std::string broadcast_text(const Communicator& ranks, const std::string& mine) {
  return all_gather_texts(ranks, ranks.rank() == 0 ? mine : "").front();
}

}  // namespace lockstep
