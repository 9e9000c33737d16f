// Runs all targets without libFuzzer: first the corpus, then mutations of it, the same ones every
// time. Without arguments it is a GoogleTest program with a test for each target.
//
//   fuzz_tests                                     every target, as CTest runs it
//   fuzz_tests record --runs 1000000 [--seed 7]    one target, for longer
//   fuzz_tests record crash-record                 one input
//
// The input that stopped the process is left in crash-TARGET.

#include "driver.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <new>
#include <optional>
#include <set>

#include "base/file.hpp"

// Memory that an input may make a parser ask for, however large the numbers in it are.
static std::atomic<size_t> requested_bytes = 0;

// GCC takes free() of what a replaced operator new returned for a mistake.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmismatched-new-delete"
void* operator new(size_t bytes) {
  requested_bytes.fetch_add(bytes, std::memory_order_relaxed);
  void* memory = std::malloc(bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
// The library's own would not match the operators below, as AddressSanitizer sees it.
void* operator new(size_t bytes, const std::nothrow_t& /*tag*/) noexcept {
  requested_bytes.fetch_add(bytes, std::memory_order_relaxed);
  return std::malloc(bytes);
}
void operator delete(void* memory) noexcept {
  std::free(memory);
}
void operator delete(void* memory, const std::nothrow_t& /*tag*/) noexcept {
  std::free(memory);
}
void operator delete(void* memory, size_t) noexcept {
  std::free(memory);
}
#pragma GCC diagnostic pop

// Of AddressSanitizer, which ends the process without a signal.
extern "C" __attribute__((weak)) void __sanitizer_set_death_callback(void (*callback)());

namespace lockstep::fuzz {
namespace {

constexpr size_t kLongestInput = 1 << 16;  // of mutations; files of the corpus may be longer
constexpr size_t kShortRuns = 5000;        // per target, where CTest runs it
constexpr size_t kFreeBytes = size_t{64} << 20;
constexpr size_t kBytesPerByte = 4096;

// What a signal handler needs to keep the input that stopped the process.
struct Current {
  const char* target = "";
  const char* data = nullptr;
  size_t size = 0;
};
Current current;

void keep_input() {
  if (current.data == nullptr) return;
  std::array<char, 128> path{};
  std::strncpy(path.data(), "crash-", path.size() - 1);
  std::strncat(path.data(), current.target, path.size() - 8);
  const int file = ::open(path.data(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (file < 0) return;
  [[maybe_unused]] ssize_t written = ::write(file, current.data, current.size);
  ::close(file);
  for (const char* text : {"fuzz: the input is in ", static_cast<const char*>(path.data()), "\n"}) {
    written = ::write(STDERR_FILENO, text, std::strlen(text));
  }
}

void keep_input_and_die(int signal) {
  keep_input();
  ::signal(signal, SIG_DFL);
  ::raise(signal);
}

void watch_for_crashes() {
  if (__sanitizer_set_death_callback != nullptr) __sanitizer_set_death_callback(keep_input);
  for (const int signal : {SIGABRT, SIGALRM, SIGBUS, SIGFPE, SIGILL, SIGSEGV}) {
    ::signal(signal, keep_input_and_die);
  }
}

void run_one(const Target& target, const std::string& input) {
  // A copy of exactly this size: reading past it is an error that sanitizers see.
  const std::vector<char> bytes(input.begin(), input.end());
  current = {target.name, bytes.data(), bytes.size()};
  ::alarm(60);
  requested_bytes = 0;
  target.run(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size());
  if (requested_bytes > kFreeBytes + kBytesPerByte * bytes.size()) {
    fmt::print(stderr, "fuzz: {} bytes of input made {} ask for {} bytes of memory\n", bytes.size(),
               target.name, requested_bytes.load());
    std::abort();
  }
  ::alarm(0);
  current = {};
}

// splitmix64: the same numbers on every machine.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  uint64_t next() {
    state_ += 0x9e3779b97f4a7c15;
    uint64_t value = state_;
    value = (value ^ value >> 30U) * 0xbf58476d1ce4e5b9;
    value = (value ^ value >> 27U) * 0x94d049bb133111eb;
    return value ^ value >> 31U;
  }

  size_t below(size_t bound) { return bound == 0 ? 0 : static_cast<size_t>(next() % bound); }

 private:
  uint64_t state_;
};

// Numbers at the edges of their types, and what parsers trip over.
const std::vector<std::string>& common_tokens() {
  static const std::vector<std::string> tokens = {"0",
                                                  "-1",
                                                  "1",
                                                  "127",
                                                  "255",
                                                  "256",
                                                  "32768",
                                                  "65535",
                                                  "65536",
                                                  "2147483647",
                                                  "2147483648",
                                                  "-2147483648",
                                                  "4294967295",
                                                  "4294967296",
                                                  "9223372036854775807",
                                                  "9223372036854775808",
                                                  "-9223372036854775808",
                                                  "18446744073709551615",
                                                  "18446744073709551616",
                                                  "1e308",
                                                  "1e999",
                                                  "-0.0",
                                                  "1.5",
                                                  "0x10",
                                                  "nan",
                                                  "inf",
                                                  "\"nan\"",
                                                  "null",
                                                  "true",
                                                  "false",
                                                  "{}",
                                                  "[]",
                                                  "\"\"",
                                                  "{\"",
                                                  "\":",
                                                  "\",\"",
                                                  "[[[[[[[[",
                                                  "]]]]]]]]",
                                                  "{{{{",
                                                  "}}}}",
                                                  ",",
                                                  ":",
                                                  "=",
                                                  ";",
                                                  "@",
                                                  "*",
                                                  "-",
                                                  "--",
                                                  "/",
                                                  "../",
                                                  "\\u0000",
                                                  "\\ud800",
                                                  "\n",
                                                  "\r\n",
                                                  "\t",
                                                  " ",
                                                  "## ",
                                                  "<!--",
                                                  "-->",
                                                  std::string(1, '\0'),
                                                  std::string(8, '\0'),
                                                  std::string(8, '\xFF'),
                                                  "\x80",
                                                  "\xC0\x80",
                                                  "\xED\xA0\x80",
                                                  "\xF4\x90\x80\x80",
                                                  "µ",
                                                  "…",
                                                  "\x1b[31m",
                                                  "\x7F",
                                                  "%s%n",
                                                  std::string("\xFF\xFF\xFF\x7F", 4),
                                                  std::string("\x00\x00\x00\x80", 4),
                                                  std::string(7, '\xFF') + "\x7F",
                                                  std::string(200, 'A')};
  return tokens;
}

// Words of the corpus: names of fields, flags and variables.
std::vector<std::string> words_of(const std::vector<std::string>& corpus) {
  std::set<std::string> words;
  for (const auto& input : corpus) {
    std::string word;
    for (const char c : input + '\0') {
      const bool part = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
                        (c >= '0' && c <= '9') || c == '_' || c == '-';
      if (part) word += c;
      if (!part && word.size() > 2 && word.size() < 40 && words.size() < 400) words.insert(word);
      if (!part) word.clear();
    }
  }
  return {words.begin(), words.end()};
}

class Mutator {
 public:
  Mutator(std::vector<std::string> corpus, uint64_t seed)
      : corpus_(std::move(corpus)), words_(words_of(corpus_)), random_(seed) {
    if (corpus_.empty()) corpus_.emplace_back();
  }

  std::string next() {
    std::string input = corpus_[random_.below(corpus_.size())];
    for (size_t changes = 1 + random_.below(4); changes > 0; --changes) change(input);
    if (input.size() > kLongestInput) input.resize(kLongestInput);
    return input;
  }

 private:
  void change(std::string& input) {
    const size_t at = random_.below(input.size() + 1);
    const size_t left = input.size() - at;
    switch (random_.below(10)) {
      case 0:  // a bit
        if (left > 0) input[at] = static_cast<char>(input[at] ^ (1U << random_.below(8)));
        break;
      case 1:  // a byte
        if (left > 0) input[at] = static_cast<char>(random_.next());
        break;
      case 2:
        input.resize(at);
        break;
      case 3:
        input.erase(at, 1 + random_.below(std::min<size_t>(left, 32)));
        break;
      case 4:  // a part of itself again
        input.insert(at, input.substr(random_.below(input.size() + 1), 1 + random_.below(64)));
        break;
      case 5: {  // the end of another one
        const std::string& other = corpus_[random_.below(corpus_.size())];
        input = input.substr(0, at) + other.substr(random_.below(other.size() + 1));
        break;
      }
      case 6:
        input.insert(at, token());
        break;
      case 7: {
        const std::string text = token();
        input.replace(at, std::min(text.size(), left), text);
        break;
      }
      case 8:
        replace_number(input, at);
        break;
      default:  // a small change to a byte, as of a length
        if (left > 0) input[at] = static_cast<char>(input[at] + (random_.below(2) == 0 ? 1 : -1));
    }
  }

  // The next decimal number becomes one at an edge.
  void replace_number(std::string& input, size_t at) {
    const size_t begin = input.find_first_of("0123456789", at);
    if (begin == std::string::npos) return;
    const size_t end = std::min(input.find_first_not_of("0123456789.", begin), input.size());
    input.replace(begin, end - begin, common_tokens()[random_.below(28)]);
  }

  std::string token() {
    if (!words_.empty() && random_.below(2) == 0) return words_[random_.below(words_.size())];
    return common_tokens()[random_.below(common_tokens().size())];
  }

  std::vector<std::string> corpus_;
  std::vector<std::string> words_;
  Random random_;
};

std::vector<std::string> corpus_of(const Target& target) {
  std::vector<std::filesystem::path> paths;
  const std::filesystem::path folder = std::filesystem::path(LOCKSTEP_FUZZ_CORPUS) / target.name;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    paths.push_back(entry.path());
  }
  std::sort(paths.begin(), paths.end());
  std::vector<std::string> inputs;
  for (const auto& path : paths) inputs.push_back(read_text_file(path.string()));
  return inputs;
}

void run_target(const Target& target, size_t runs, uint64_t seed) {
  const auto corpus = corpus_of(target);
  run_one(target, "");
  for (const auto& input : corpus) run_one(target, input);
  Mutator mutator(corpus, seed);
  for (size_t i = 0; i < runs; ++i) run_one(target, mutator.next());
}

class FuzzTest : public testing::Test {
 public:
  explicit FuzzTest(const Target& target) : target_(target) {}

  // A broken promise ends the process: what it would do next says nothing.
  void TestBody() override {
    ASSERT_FALSE(corpus_of(target_).empty()) << "no file in tests/fuzz/corpus/" << target_.name;
    run_target(target_, kShortRuns, 1);
  }

 private:
  const Target& target_;
};

const Target* target_named(std::string_view name) {
  for (const Target& target : targets()) {
    if (name == target.name) return &target;
  }
  return nullptr;
}

std::optional<uint64_t> number_in(std::string_view text) {
  uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

int fail_usage(std::string_view message) {
  std::string names;
  for (const Target& target : targets()) names += fmt::format(" {}", target.name);
  fmt::print(stderr,
             "fuzz_tests: {}\nhelp: fuzz_tests TARGET [--runs N] [--seed N] [FILE...]; "
             "targets are{}\n",
             message, names);
  return 2;
}

// One target, as its arguments say.
int run_by_hand(const std::vector<std::string>& words) {
  const Target* target = target_named(words[0]);
  if (target == nullptr) return fail_usage(fmt::format("there is no target \"{}\"", words[0]));
  uint64_t runs = 100'000;
  uint64_t seed = 1;
  std::vector<std::string> files;
  for (size_t i = 1; i < words.size(); ++i) {
    if (words[i] != "--runs" && words[i] != "--seed") {
      files.push_back(words[i]);
      continue;
    }
    const auto value = i + 1 < words.size() ? number_in(words[i + 1]) : std::nullopt;
    if (!value) return fail_usage(fmt::format("{} needs a whole number", words[i]));
    (words[i] == "--runs" ? runs : seed) = *value;
    ++i;
  }
  for (const auto& file : files) run_one(*target, read_text_file(file));
  if (files.empty()) run_target(*target, runs, seed);
  return 0;
}

}  // namespace
}  // namespace lockstep::fuzz

int main(int argc, char** argv) {
  using namespace lockstep::fuzz;
  testing::InitGoogleTest(&argc, argv);
  watch_for_crashes();
  if (argc > 1) return run_by_hand({argv + 1, argv + argc});
  for (const Target& target : targets()) {
    testing::RegisterTest("Fuzz", target.name, nullptr, nullptr, __FILE__, __LINE__,
                          [&target]() -> testing::Test* { return new FuzzTest(target); });
  }
  return RUN_ALL_TESTS();
}
