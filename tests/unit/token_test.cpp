#include "net/secret.hpp"

#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <optional>
#include <set>
#include <vector>

#include "support.hpp"

namespace lockstep::test::token_test {
namespace {

// A home of this test's own, and no token in the variables.
class Token : public testing::Test {
 protected:
  void SetUp() override {
    for (const char* name : {"LOCKSTEP_TOKEN", "XDG_CONFIG_HOME", "HOME"}) {
      const char* value = ::getenv(name);
      before_.emplace_back(name,
                           value == nullptr ? std::nullopt : std::optional<std::string>(value));
      ::unsetenv(name);
    }
    ::setenv("HOME", scratch_.file("home").c_str(), 1);
  }

  void TearDown() override {
    for (const auto& [name, value] : before_) {
      if (value) {
        ::setenv(name, value->c_str(), 1);
      } else {
        ::unsetenv(name);
      }
    }
  }

  std::string path() const { return scratch_.file("home/.config/lockstep/token"); }

  test::ScratchFolder scratch_;
  std::vector<std::pair<const char*, std::optional<std::string>>> before_;
};

mode_t mode_of(const std::string& path) {
  struct stat status {};
  EXPECT_EQ(::stat(path.c_str(), &status), 0) << path;
  return status.st_mode & 07777;
}

TEST_F(Token, TheVariableComesFirst) {
  ::setenv("LOCKSTEP_TOKEN", "0123456789abcdef\n", 1);
  EXPECT_EQ(load_or_make_token(), "0123456789abcdef");
  EXPECT_FALSE(std::filesystem::exists(path())) << "nothing is made";
  ::setenv("LOCKSTEP_TOKEN", "short", 1);
  expect_error(Code::kRendezvous, {"LOCKSTEP_TOKEN", "5 characters", "openssl rand"},
               [] { load_or_make_token(); });
}

TEST_F(Token, AFileIsMadeForItsOwnerAlone) {
  const mode_t before = ::umask(0);
  const std::string token = load_or_make_token();
  ::umask(before);
  EXPECT_EQ(token.size(), 64U);
  EXPECT_EQ(token.find_first_not_of("0123456789abcdef"), std::string::npos);
  EXPECT_EQ(mode_of(path()), 0600U);
  EXPECT_EQ(mode_of(scratch_.file("home/.config/lockstep")), 0700U);
  EXPECT_EQ(load_or_make_token(), token) << "kept";
  EXPECT_EQ(std::distance(
                std::filesystem::directory_iterator(scratch_.file("home/.config/lockstep")), {}),
            1)
      << "nothing beside it";
}

TEST_F(Token, TheConfigurationFolderCanBeElsewhere) {
  ::setenv("XDG_CONFIG_HOME", scratch_.file("config").c_str(), 1);
  const std::string token = load_or_make_token();
  EXPECT_EQ(test::read_bytes(scratch_.file("config/lockstep/token")), token + "\n");
  ::setenv("XDG_CONFIG_HOME", "relative", 1);
  EXPECT_NE(load_or_make_token(), token) << "a relative folder does not count";
  EXPECT_TRUE(std::filesystem::exists(path()));
}

TEST_F(Token, ASessionsNameDependsOnTheSecretAndIsTheSameForAllRanks) {
  const std::string name = private_session("cafe");
  EXPECT_EQ(name.size(), 32U);
  EXPECT_EQ(name.find_first_not_of("0123456789abcdef"), std::string::npos);
  EXPECT_EQ(private_session("cafe"), name);
  EXPECT_NE(private_session("cafd"), name);
  ::setenv("LOCKSTEP_TOKEN", "another user's secret", 1);
  EXPECT_NE(private_session("cafe"), name);
  ::unsetenv("LOCKSTEP_TOKEN");
  ::setenv("HOME", "/proc/nobody", 1);
  EXPECT_EQ(private_session("cafe"), "cafe") << "without a secret ranks still connect";
}

TEST_F(Token, AFileOthersMayReadIsRefused) {
  const std::string token = load_or_make_token();
  for (const mode_t mode : {0640, 0604, 0620, 0601}) {
    ::chmod(path().c_str(), mode);
    expect_error(Code::kRendezvous, {path(), "others", "chmod 600"}, [] { load_or_make_token(); });
  }
  ::chmod(path().c_str(), 0400);
  EXPECT_EQ(load_or_make_token(), token);
}

TEST_F(Token, AFileOfAnotherUserIsRefused) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs root, to give a file away";
  load_or_make_token();
  ASSERT_EQ(::chown(path().c_str(), 65534, 65534), 0);
  expect_error(Code::kRendezvous, {path(), "user 65534"}, [] { load_or_make_token(); });
}

TEST_F(Token, ADamagedFileIsRefused) {
  load_or_make_token();
  test::write_bytes(path(), "\n");
  expect_error(Code::kRendezvous, {path(), "0 characters"}, [] { load_or_make_token(); });
  test::write_bytes(path(), std::string(5000, 'x'));
  expect_error(Code::kRendezvous, {path(), "4096"}, [] { load_or_make_token(); });
  std::filesystem::remove(path());
  std::filesystem::create_directory(path());
  expect_error(Code::kRendezvous, {path()}, [] { load_or_make_token(); });
}

TEST_F(Token, AHomeThatCannotBeWrittenIsNamed) {
  ::setenv("HOME", "/proc/nobody", 1);
  expect_error(Code::kRendezvous, {"/proc/nobody/.config", "LOCKSTEP_TOKEN"},
               [] { load_or_make_token(); });
}

TEST_F(Token, MakersAtTheSameTimeAgree) {
  for (int round = 0; round < 10; ++round) {
    std::filesystem::remove_all(scratch_.file("home"));
    std::vector<pid_t> children;
    for (int i = 0; i < 6; ++i) {
      const pid_t child = ::fork();
      if (child == 0) {
        try {
          test::write_bytes(scratch_.file("seen" + std::to_string(i)), load_or_make_token());
          ::_exit(0);
        } catch (const std::exception& error) {
          std::fprintf(stderr, "child: %s\n", error.what());
          ::_exit(1);
        }
      }
      children.push_back(child);
    }
    std::set<std::string> seen;
    for (size_t i = 0; i < children.size(); ++i) {
      int status = 0;
      ::waitpid(children[i], &status, 0);
      EXPECT_EQ(status, 0);
      seen.insert(test::read_bytes(scratch_.file("seen" + std::to_string(i))));
    }
    EXPECT_EQ(seen.size(), 1U);
    EXPECT_EQ(seen.begin()->size(), 64U);
  }
}

}  // namespace
}  // namespace lockstep::test::token_test
