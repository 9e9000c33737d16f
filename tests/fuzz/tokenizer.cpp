// A folder of GPT-2's tokenizer, made by anybody: vocab.json, a NUL, merges.txt, a NUL, and a text
// to encode. The merges are read beside a good vocabulary too.

#include "examples/gpt2/tokenizer.hpp"

#include "fuzz.hpp"

namespace lockstep::fuzz {
namespace {

std::string good_vocabulary() {
  const Scratch scratch;
  gpt2::Tokenizer::train({"the cat sat on the mat, and the other cat that sat there"}, 280)
      .save(scratch.file(""));
  return read_bytes(scratch.file("vocab.json"));
}

void load_and_encode(std::string_view vocabulary, std::string_view merges, std::string_view text,
                     const Scratch& scratch) {
  scratch.write("vocab.json", vocabulary);
  scratch.write("merges.txt", merges);
  accepts([&] {
    auto tokenizer = gpt2::Tokenizer::load(scratch.file(""));
    const auto tokens = tokenizer.encode(text);
    for (const int token : tokens) {
      require(token >= 0 && token < tokenizer.size(), "a token is one of the vocabulary");
    }
    require_equal(tokenizer.decode(tokens), text, "decoding gives the text back");
  });
}

}  // namespace
}  // namespace lockstep::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace lockstep;
  static const fuzz::Scratch scratch;
  static const std::string good = fuzz::good_vocabulary();
  fuzz::Input input(data, size);
  const auto vocabulary = input.until('\0');
  const auto merges = input.until('\0');
  fuzz::load_and_encode(vocabulary, merges, input.rest(), scratch);
  fuzz::load_and_encode(good, merges, input.rest(), scratch);
  return 0;
}
