#include "train/rank_texts.hpp"

#include <torch/torch.h>

#include <algorithm>
#include <cstring>

#include "lockstep/memory.hpp"

namespace lockstep {
namespace {

constexpr int64_t kBlockWords = 1 << 17;  // of one rank at a time: long texts need little memory

// Every rank's words, of which each may have a different count: [rank]. Sizes first, then blocks of
// equal size. `keep`: false drops them, on ranks that only take part.
std::vector<std::vector<int64_t>> gather_words(const Communicator& ranks,
                                               const std::vector<int64_t>& mine,
                                               const CallOptions& call, bool keep) {
  const ChargeHost host;
  const auto count_of_mine = static_cast<int64_t>(mine.size());
  const auto sizes = torch::zeros({ranks.size()}, torch::kInt64);
  ranks.all_gather(sizes, torch::full({1}, count_of_mine, torch::kInt64), call);
  const int64_t longest = sizes.max().item<int64_t>();
  std::vector<std::vector<int64_t>> all(static_cast<size_t>(ranks.size()));
  for (int64_t first = 0; first < longest; first += kBlockWords) {
    const int64_t words = std::min(kBlockWords, longest - first);
    const auto block = torch::zeros({words}, torch::kInt64);
    if (first < count_of_mine) {
      std::copy_n(mine.begin() + first, std::min(words, count_of_mine - first),
                  block.data_ptr<int64_t>());
    }
    const auto blocks = torch::empty({ranks.size() * words}, torch::kInt64);
    ranks.all_gather(blocks, block, call);
    for (int rank = 0; keep && rank < ranks.size(); ++rank) {
      const int64_t theirs = std::clamp<int64_t>(sizes[rank].item<int64_t>() - first, 0, words);
      const int64_t* begin = blocks.data_ptr<int64_t>() + rank * words;
      auto& taken = all[static_cast<size_t>(rank)];
      taken.insert(taken.end(), begin, begin + theirs);
    }
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
                                                     const std::vector<int64_t>& mine,
                                                     const CallOptions& call) {
  if (ranks.size() == 1) return {mine};
  return gather_words(ranks, mine, call, /*keep=*/true);
}

std::vector<std::string> all_gather_texts(const Communicator& ranks, const std::string& mine,
                                          const CallOptions& call) {
  if (ranks.size() == 1) return {mine};
  std::vector<std::string> texts;
  for (const auto& words : gather_words(ranks, packed(mine), call, /*keep=*/true)) {
    texts.push_back(unpacked(words));
  }
  return texts;
}

std::vector<std::string> gather_texts(const Communicator& ranks, const std::string& mine,
                                      const CallOptions& call) {
  if (ranks.rank() == 0) return all_gather_texts(ranks, mine, call);
  gather_words(ranks, packed(mine), call, /*keep=*/false);
  return {};
}

std::string broadcast_text(const Communicator& ranks, const std::string& mine,
                           const CallOptions& call) {
  return all_gather_texts(ranks, ranks.rank() == 0 ? mine : "", call).front();
}

}  // namespace lockstep
