#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <iterator>
#include <string>

#include "lockstep/error.hpp"

namespace lockstep::test {

/// A folder of this test's own, removed at the end.
class ScratchFolder {
 public:
  ScratchFolder() {
    std::string name = (std::filesystem::temp_directory_path() / "lockstep-test-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("cannot make " + name);
    path_ = name;
  }
  ~ScratchFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  ScratchFolder(const ScratchFolder&) = delete;
  ScratchFolder& operator=(const ScratchFolder&) = delete;

  std::string file(const std::string& name) const { return (path_ / name).string(); }

  size_t count() const {
    return static_cast<size_t>(std::distance(std::filesystem::directory_iterator(path_),
                                             std::filesystem::directory_iterator()));
  }

 private:
  std::filesystem::path path_;
};

inline void write_bytes(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary)
      .write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

inline std::string read_bytes(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

/// `action` must throw an Error with this code, a remedy, and all of these fragments in its block.
template <class Action>
void expect_error(Code code, std::initializer_list<std::string> fragments, Action&& action) {
  try {
    action();
  } catch (const Error& error) {
    EXPECT_EQ(code_name(error.code()), code_name(code)) << error.block();
    EXPECT_FALSE(error.help().empty()) << "no remedy in: " << error.block();
    for (const auto& fragment : fragments) {
      EXPECT_NE(error.block().find(fragment), std::string::npos)
          << "no \"" << fragment << "\" in: " << error.block();
    }
    return;
  }
  ADD_FAILURE() << "no error; expected " << code_name(code);
}

}  // namespace lockstep::test
