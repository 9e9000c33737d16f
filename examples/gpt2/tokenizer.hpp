#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace gpt2 {

/// GPT-2's byte-level BPE. A text is cut into words by GPT-2's rules; a word begins as its bytes,
/// and the merge that was learned first is applied until none applies. Every text can be encoded,
/// and decoding gives its bytes back.
class Tokenizer {
 public:
  static constexpr const char* kEndOfText = "<|endoftext|>";

  /// Reads `vocab.json` and `merges.txt` of a folder, as published with GPT-2.
  static Tokenizer load(const std::string& folder);

  /// Learns merges from these texts until there are `vocabulary` tokens: 256 bytes, the merges, and
  /// kEndOfText. With 257 each token is a byte. Texts that have no more pairs give fewer tokens.
  static Tokenizer train(const std::vector<std::string>& texts, int64_t vocabulary);

  /// Writes `vocab.json` and `merges.txt`.
  void save(const std::string& folder) const;

  std::vector<int> encode(std::string_view text);
  std::string decode(const std::vector<int>& tokens) const;

  /// The bytes of a token; those of kEndOfText count as none.
  const std::string& bytes_of(int token) const { return bytes_[static_cast<size_t>(token)]; }

  int size() const { return static_cast<int>(bytes_.size()); }
  int end_of_text() const { return end_of_text_; }

 private:
  using Pair = std::pair<int, int>;
  struct PairHash {
    size_t operator()(const Pair& pair) const {
      return std::hash<uint64_t>()(static_cast<uint64_t>(pair.first) << 32 |
                                   static_cast<uint32_t>(pair.second));
    }
  };
  struct Merge {
    int rank;    // order in which merges were learned
    int merged;  // the token that both become
  };

  static Tokenizer bytes_only();
  void add_merge(const Pair& pair, int merged);
  std::vector<int> encode_word(std::string_view word) const;

  std::vector<std::string> bytes_;  // [token]
  std::vector<int> byte_token_;     // [byte] -> token
  std::vector<Pair> learned_;       // [rank]
  std::unordered_map<Pair, Merge, PairHash> merges_;
  int end_of_text_ = -1;
  std::unordered_map<std::string, std::vector<int>> words_;  // encoded before
};

/// Cuts a text into GPT-2's words: contractions, letters, numbers and other signs, each with one
/// space before it, and what is left of white space. Together they are the text.
std::vector<std::string_view> cut_words(std::string_view text);

}  // namespace gpt2
