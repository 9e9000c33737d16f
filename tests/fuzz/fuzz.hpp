#pragma once

// What fuzz targets share. A target is a file of this folder with one function,
// LLVMFuzzerTestOneInput: it gives its bytes to a parser and stops the process where the parser
// breaks a promise. What a parser refuses, it must refuse by an Error with a code and a remedy.

#include <stdlib.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/error.hpp"

namespace lockstep::fuzz {

/// Stops the process, naming the promise that was broken.
inline void require(bool kept, std::string_view promise) {
  if (kept) return;
  std::fprintf(stderr, "fuzz: broken promise: %.*s\n", static_cast<int>(promise.size()),
               promise.data());
  std::abort();
}

inline void require_equal(std::string_view a, std::string_view b, std::string_view promise) {
  if (a == b) return;
  std::fprintf(stderr, "fuzz: \"%.*s\" became \"%.*s\"\n", static_cast<int>(a.size()), a.data(),
               static_cast<int>(b.size()), b.data());
  require(false, promise);
}

/// Runs `action`. Returns false if it refused its input by an Error; that Error must have a code of
/// lockstep's list, say something, and give a remedy. Other exceptions escape and stop the process.
template <class Action>
bool accepts(Action&& action) {
  try {
    action();
    return true;
  } catch (const Error& error) {
    bool known = false;
    for (const auto& info : all_codes()) known = known || info.code == error.code();
    require(known, "an Error has a code of the list");
    require(!error.message().empty(), "an Error says what happened");
    if (error.help().empty()) std::fprintf(stderr, "fuzz: %s\n", error.what());
    require(!error.help().empty(), "an Error has a remedy");
    require(error.code() != Code::kInternal, "bad input is no internal error");
    return false;
  }
}

/// Takes an input apart.
class Input {
 public:
  Input(const uint8_t* bytes, size_t size) : rest_(reinterpret_cast<const char*>(bytes), size) {}

  bool empty() const { return rest_.empty(); }

  /// 0 at the end.
  uint8_t byte() {
    if (rest_.empty()) return 0;
    const auto value = static_cast<uint8_t>(rest_.front());
    rest_.remove_prefix(1);
    return value;
  }

  uint32_t number16() {
    const uint32_t low = byte();
    return low | static_cast<uint32_t>(byte()) << 8U;
  }

  std::string_view take(size_t count) {
    const std::string_view taken = rest_.substr(0, count);
    rest_.remove_prefix(taken.size());
    return taken;
  }

  /// Up to the next `end`, which is left out.
  std::string_view until(char end) {
    const std::string_view taken = rest_.substr(0, rest_.find(end));
    rest_.remove_prefix(std::min(taken.size() + 1, rest_.size()));
    return taken;
  }

  std::string_view rest() const { return rest_; }

 private:
  std::string_view rest_;
};

/// "NAME=VALUE" lines as environment variables; std::getenv's convention.
class Variables {
 public:
  explicit Variables(std::string_view lines) {
    while (!lines.empty()) {
      const std::string_view line = lines.substr(0, lines.find('\n'));
      lines.remove_prefix(std::min(line.size() + 1, lines.size()));
      const size_t equals = line.find('=');
      if (equals == std::string_view::npos) continue;
      // An environment variable ends at its first NUL.
      const std::string_view value = line.substr(equals + 1);
      entries_.push_back(
          {std::string(line.substr(0, equals)), std::string(value.substr(0, value.find('\0')))});
    }
  }

  const char* find(std::string_view name) const {
    for (const auto& [key, value] : entries_) {
      if (key == name) return value.c_str();
    }
    return nullptr;
  }

 private:
  std::vector<std::pair<std::string, std::string>> entries_;
};

/// A folder of this process, removed when it ends.
class Scratch {
 public:
  Scratch() {
    // Shared memory where there is some: a target may write thousands of files a second.
    const char* parent = std::filesystem::is_directory("/dev/shm") ? "/dev/shm" : "/tmp";
    std::string name = std::string(parent) + "/fuzz-lockstep-XXXXXX";
    require(::mkdtemp(name.data()) != nullptr, "there is a folder for temporary files");
    path_ = name;
  }
  ~Scratch() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  std::string file(const std::string& name) const { return (path_ / name).string(); }

  std::string write(const std::string& name, std::string_view bytes) const {
    const std::string path = file(name);
    std::ofstream(path, std::ios::binary | std::ios::trunc)
        .write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    return path;
  }

 private:
  std::filesystem::path path_;
};

inline std::string read_bytes(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

}  // namespace lockstep::fuzz
