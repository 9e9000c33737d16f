#include "tokenizer.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <span>

#include "lockstep/error.hpp"
#include "unicode_ranges.hpp"

namespace gpt2 {
namespace {

using lockstep::Code;
using lockstep::Error;

enum class Kind { kSpace, kLetter, kNumber, kOther };

bool is_in(std::span<const CodePointRange> ranges, uint32_t point) {
  const auto after =
      std::upper_bound(ranges.begin(), ranges.end(), point,
                       [](uint32_t p, const auto& range) { return p < range.first; });
  return after != ranges.begin() && point <= (after - 1)->last;
}

bool is_space(uint32_t point) {
  return (point >= 9 && point <= 13) || point == 32 || point == 0x85 || point == 0xa0 ||
         point == 0x1680 || (point >= 0x2000 && point <= 0x200a) || point == 0x2028 ||
         point == 0x2029 || point == 0x202f || point == 0x205f || point == 0x3000;
}

Kind kind_of(uint32_t point) {
  if (is_space(point)) return Kind::kSpace;
  if (point < 0x80) {
    const bool letter = (point | 32) >= 'a' && (point | 32) <= 'z';
    const bool digit = point >= '0' && point <= '9';
    return letter ? Kind::kLetter : digit ? Kind::kNumber : Kind::kOther;
  }
  if (is_in(kLetters, point)) return Kind::kLetter;
  return is_in(kNumbers, point) ? Kind::kNumber : Kind::kOther;
}

// One character of a text. A byte that is not UTF-8 is a character of kind kOther.
struct Character {
  size_t begin;
  Kind kind;
};

std::vector<Character> read_characters(std::string_view text) {
  std::vector<Character> characters;
  size_t at = 0;
  while (at < text.size()) {
    const auto byte = static_cast<unsigned char>(text[at]);
    size_t length = byte < 0x80       ? 1
                    : byte >> 5 == 6  ? 2
                    : byte >> 4 == 14 ? 3
                    : byte >> 3 == 30 ? 4
                                      : 0;
    uint32_t point = length <= 1 ? byte : byte & (0x7fU >> length);
    for (size_t i = 1; i < length; ++i) {
      if (at + i >= text.size() || (static_cast<unsigned char>(text[at + i]) & 0xc0) != 0x80) {
        length = 0;
        break;
      }
      point = point << 6 | (static_cast<unsigned char>(text[at + i]) & 0x3f);
    }
    characters.push_back({at, length == 0 ? Kind::kOther : kind_of(point)});
    at += std::max<size_t>(1, length);
  }
  return characters;
}

// The end of the run of one kind that begins at character `at`.
size_t run_end(const std::vector<Character>& characters, size_t at) {
  const Kind kind = characters[at].kind;
  while (at < characters.size() && characters[at].kind == kind) ++at;
  return at;
}

size_t contraction_length(std::string_view rest) {
  for (const std::string_view each : {"'s", "'t", "'re", "'ve", "'m", "'ll", "'d"}) {
    if (rest.substr(0, each.size()) == each) return each.size();
  }
  return 0;
}

// The character that GPT-2's files write for a byte: itself where it can be printed, else one of
// those from U+0100 on.
std::vector<std::string> printed_bytes() {
  std::vector<std::string> printed(256);
  const auto utf8 = [](uint32_t point) {
    if (point < 0x80) return std::string(1, static_cast<char>(point));
    return std::string{static_cast<char>(0xc0 | point >> 6),
                       static_cast<char>(0x80 | (point & 63))};
  };
  uint32_t next = 0x100;
  for (uint32_t byte = 0; byte < 256; ++byte) {
    const bool visible = (byte >= 33 && byte <= 126) || (byte >= 161 && byte != 173);
    printed[byte] = utf8(visible ? byte : next++);
  }
  return printed;
}

std::string print(const std::string& bytes) {
  static const auto printed = printed_bytes();
  std::string text;
  for (const char byte : bytes) text += printed[static_cast<unsigned char>(byte)];
  return text;
}

std::string unprint(const std::string& text) {
  static const auto byte_of = [] {
    std::map<std::string, char> map;
    const auto printed = printed_bytes();
    for (size_t i = 0; i < printed.size(); ++i) map[printed[i]] = static_cast<char>(i);
    return map;
  }();
  std::string bytes;
  for (size_t at = 0; at < text.size();) {
    const size_t length = static_cast<unsigned char>(text[at]) < 0x80 ? 1 : 2;
    const auto found = byte_of.find(text.substr(at, length));
    if (found == byte_of.end()) return text;  // a special token, which is written as it is
    bytes += found->second;
    at += length;
  }
  return bytes;
}

std::ifstream open_file(const std::string& path) {
  std::ifstream file(path);
  if (!file) {
    throw Error(Code::kFileRead, fmt::format("{} cannot be read", path),
                "give the folder that holds vocab.json and merges.txt");
  }
  return file;
}

}  // namespace

std::vector<std::string_view> cut_words(std::string_view text) {
  const auto characters = read_characters(text);
  const size_t count = characters.size();
  const auto byte_at = [&](size_t i) { return i < count ? characters[i].begin : text.size(); };
  std::vector<std::string_view> words;
  size_t at = 0;
  while (at < count) {
    size_t end = at + 1;
    const size_t begin = characters[at].begin;
    if (const size_t length = contraction_length(text.substr(begin)); length > 0) {
      end = at + length;
    } else if (characters[at].kind != Kind::kSpace) {
      end = run_end(characters, at);
    } else if (text[begin] == ' ' && at + 1 < count && characters[at + 1].kind != Kind::kSpace) {
      end = run_end(characters, at + 1);
    } else {
      // The last white space before a word belongs to the word, or stands alone.
      const size_t all = run_end(characters, at);
      end = all == count || all == at + 1 ? all : all - 1;
    }
    words.push_back(text.substr(begin, byte_at(end) - begin));
    at = end;
  }
  return words;
}

// In the order of GPT-2's vocabulary: bytes that can be printed come first.
Tokenizer Tokenizer::bytes_only() {
  Tokenizer tokenizer;
  tokenizer.byte_token_.resize(256);
  const auto printed = printed_bytes();
  for (const bool visible : {true, false}) {
    for (int byte = 0; byte < 256; ++byte) {
      const auto& text = printed[static_cast<size_t>(byte)];
      const bool is_visible = !(text.size() == 2 && static_cast<unsigned char>(text[0]) >= 0xc4);
      if (is_visible != visible) continue;
      tokenizer.byte_token_[static_cast<size_t>(byte)] = tokenizer.size();
      tokenizer.bytes_.emplace_back(1, static_cast<char>(byte));
    }
  }
  return tokenizer;
}

void Tokenizer::add_merge(const Pair& pair, int merged) {
  merges_.emplace(pair, Merge{static_cast<int>(learned_.size()), merged});
  learned_.push_back(pair);
}

Tokenizer Tokenizer::load(const std::string& folder) {
  const auto vocabulary = nlohmann::json::parse(open_file(folder + "/vocab.json"), nullptr, false);
  const auto fail = [&](const std::string& what) {
    return Error(Code::kFileFormat, fmt::format("{}: {}", folder, what),
                 "give vocab.json and merges.txt as published with GPT-2");
  };
  if (!vocabulary.is_object()) throw fail("vocab.json is not a JSON object");
  Tokenizer tokenizer;
  tokenizer.bytes_.resize(vocabulary.size());
  tokenizer.byte_token_.assign(256, -1);
  std::unordered_map<std::string, int> token_of;
  std::vector<bool> taken(vocabulary.size());
  for (const auto& [text, number] : vocabulary.items()) {
    const int64_t token = number.is_number_integer() ? number.get<int64_t>() : -1;
    if (token < 0 || token >= static_cast<int64_t>(vocabulary.size())) {
      throw fail(fmt::format("token {} of vocab.json has no number from 0 to {}", text,
                             vocabulary.size() - 1));
    }
    const auto id = static_cast<int>(token);
    if (taken[static_cast<size_t>(id)]) {
      throw fail(fmt::format("vocab.json gives the number {} to two tokens", id));
    }
    taken[static_cast<size_t>(id)] = true;
    if (text == kEndOfText) {
      tokenizer.end_of_text_ = id;
      continue;
    }
    const std::string bytes = unprint(text);
    tokenizer.bytes_[static_cast<size_t>(id)] = bytes;
    token_of[bytes] = id;
    if (bytes.size() == 1) tokenizer.byte_token_[static_cast<unsigned char>(bytes[0])] = id;
  }
  if (std::count(tokenizer.byte_token_.begin(), tokenizer.byte_token_.end(), -1) > 0) {
    throw fail("vocab.json does not have all 256 bytes");
  }
  auto merges = open_file(folder + "/merges.txt");
  for (std::string line; std::getline(merges, line);) {
    if (line.empty() || line.starts_with("#version")) continue;
    const size_t space = line.find(' ');
    if (space == std::string::npos) throw fail("a line of merges.txt is not two tokens");
    const std::string left = unprint(line.substr(0, space));
    const std::string right = unprint(line.substr(space + 1));
    if (!token_of.contains(left) || !token_of.contains(right) || !token_of.contains(left + right)) {
      throw fail(fmt::format("merges.txt has \"{}\", which vocab.json lacks", line));
    }
    tokenizer.add_merge({token_of[left], token_of[right]}, token_of[left + right]);
  }
  return tokenizer;
}

void Tokenizer::save(const std::string& folder) const {
  nlohmann::ordered_json vocabulary;
  for (int token = 0; token < size(); ++token) {
    vocabulary[token == end_of_text_ ? kEndOfText : print(bytes_of(token))] = token;
  }
  std::ofstream(folder + "/vocab.json") << vocabulary.dump() << "\n";
  std::ofstream merges(folder + "/merges.txt");
  merges << "#version: 0.2\n";
  for (const auto& [left, right] : learned_) {
    merges << print(bytes_of(left)) << " " << print(bytes_of(right)) << "\n";
  }
  merges.close();
  if (!merges) {
    throw Error(Code::kFileWrite, fmt::format("{}/merges.txt cannot be written", folder),
                "give a folder that can be written to");
  }
}

Tokenizer Tokenizer::train(const std::vector<std::string>& texts, int64_t vocabulary) {
  Tokenizer tokenizer = bytes_only();
  if (vocabulary < tokenizer.size() + 1 || vocabulary > 65536) {
    throw Error(Code::kUsage, fmt::format("--vocabulary {} is not possible", vocabulary),
                "give a number from 257, bytes only, to 65536");
  }
  std::map<std::string_view, int64_t> counts;
  for (const auto& text : texts) {
    for (const auto word : cut_words(text)) counts[word] += 1;
  }
  struct Word {
    std::vector<int> tokens;
    int64_t count;
  };
  std::vector<Word> words;
  std::unordered_map<Pair, int64_t, PairHash> pair_counts;
  std::unordered_map<Pair, std::set<size_t>, PairHash> words_with;
  for (const auto& [text, count] : counts) {
    Word word{{}, count};
    for (const char byte : text) {
      word.tokens.push_back(tokenizer.byte_token_[static_cast<unsigned char>(byte)]);
    }
    for (size_t i = 0; i + 1 < word.tokens.size(); ++i) {
      const Pair pair{word.tokens[i], word.tokens[i + 1]};
      pair_counts[pair] += count;
      words_with[pair].insert(words.size());
    }
    words.push_back(std::move(word));
  }
  while (tokenizer.size() + 1 < vocabulary) {
    // The most frequent pair; of several the one with the smallest numbers.
    const std::pair<const Pair, int64_t>* best = nullptr;
    for (const auto& each : pair_counts) {
      if (each.second < 2) continue;
      if (best == nullptr || each.second > best->second ||
          (each.second == best->second && each.first < best->first)) {
        best = &each;
      }
    }
    if (best == nullptr) break;
    const Pair pair = best->first;
    const int merged = tokenizer.size();
    tokenizer.bytes_.push_back(tokenizer.bytes_of(pair.first) + tokenizer.bytes_of(pair.second));
    tokenizer.add_merge(pair, merged);
    for (const size_t index : std::set<size_t>(std::move(words_with[pair]))) {
      Word& word = words[index];
      const auto count_pairs = [&](int64_t sign) {
        for (size_t i = 0; i + 1 < word.tokens.size(); ++i) {
          const Pair each{word.tokens[i], word.tokens[i + 1]};
          pair_counts[each] += sign * word.count;
          if (sign > 0) words_with[each].insert(index);
        }
      };
      count_pairs(-1);
      std::vector<int> tokens;
      for (size_t i = 0; i < word.tokens.size(); ++i) {
        const bool merges = i + 1 < word.tokens.size() && word.tokens[i] == pair.first &&
                            word.tokens[i + 1] == pair.second;
        tokens.push_back(merges ? merged : word.tokens[i]);
        if (merges) ++i;
      }
      word.tokens = std::move(tokens);
      count_pairs(+1);
    }
    pair_counts.erase(pair);
    words_with.erase(pair);
  }
  tokenizer.end_of_text_ = tokenizer.size();
  tokenizer.bytes_.emplace_back();
  return tokenizer;
}

std::vector<int> Tokenizer::encode_word(std::string_view word) const {
  std::vector<int> tokens;
  for (const char byte : word) tokens.push_back(byte_token_[static_cast<unsigned char>(byte)]);
  while (tokens.size() > 1) {
    const Merge* first = nullptr;
    Pair pair;
    for (size_t i = 0; i + 1 < tokens.size(); ++i) {
      const auto found = merges_.find({tokens[i], tokens[i + 1]});
      if (found == merges_.end() || (first != nullptr && found->second.rank >= first->rank)) {
        continue;
      }
      first = &found->second;
      pair = found->first;
    }
    if (first == nullptr) break;
    size_t kept = 0;
    for (size_t i = 0; i < tokens.size(); ++i, ++kept) {
      const bool merges =
          i + 1 < tokens.size() && tokens[i] == pair.first && tokens[i + 1] == pair.second;
      tokens[kept] = merges ? first->merged : tokens[i];
      if (merges) ++i;
    }
    tokens.resize(kept);
  }
  return tokens;
}

std::vector<int> Tokenizer::encode(std::string_view text) {
  std::vector<int> tokens;
  for (const auto word : cut_words(text)) {
    auto [found, is_new] = words_.try_emplace(std::string(word));
    if (is_new) found->second = encode_word(word);
    tokens.insert(tokens.end(), found->second.begin(), found->second.end());
  }
  return tokens;
}

std::string Tokenizer::decode(const std::vector<int>& tokens) const {
  std::string text;
  for (const int token : tokens) text += bytes_of(token);
  return text;
}

}  // namespace gpt2
