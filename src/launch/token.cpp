#include "launch/token.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <pwd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cctype>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "base/descriptor.hpp"
#include "lockstep/error.hpp"
#include "net/secret.hpp"

namespace lockstep {
namespace {

constexpr size_t kTokenBytes = 32;      // before hex
constexpr size_t kShortestToken = 16;   // characters: shorter ones can be guessed
constexpr size_t kLongestToken = 4096;  // characters
constexpr size_t kSessionDigits = 32;   // as many as a launcher's session has

[[noreturn]] void fail(const std::string& message, const std::string& help) {
  throw Error(Code::kRendezvous, message, help);
}

[[noreturn]] void fail_file(const std::string& path, const char* act, int error) {
  fail(fmt::format("cannot {} the token file {}: {}", act, path, std::strerror(error)),
       "set LOCKSTEP_TOKEN to a secret of your own instead");
}

std::string token_path() {
  const char* config = std::getenv("XDG_CONFIG_HOME");
  // The specification says to ignore a relative one.
  if (config != nullptr && *config == '/') return std::string(config) + "/lockstep/token";
  const char* home = std::getenv("HOME");
  if (home == nullptr || *home != '/') {
    const passwd* user = ::getpwuid(::geteuid());
    home = user != nullptr ? user->pw_dir : nullptr;
  }
  if (home == nullptr || *home != '/') {
    fail("there is no home folder to keep the token in", "set LOCKSTEP_TOKEN, or HOME");
  }
  return std::string(home) + "/.config/lockstep/token";
}

std::string checked(std::string token, const std::string& from) {
  while (!token.empty() && std::isspace(static_cast<unsigned char>(token.back()))) token.pop_back();
  if (token.size() < kShortestToken || token.size() > kLongestToken) {
    fail(fmt::format("the token in {} has {} characters; {} to {} are needed", from, token.size(),
                     kShortestToken, kLongestToken),
         "use a long random one, such as `openssl rand -hex 32` prints");
  }
  return token;
}

// False where there is no such file.
bool read_token(const std::string& path, std::string& token) {
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (file.get() < 0 && errno == ENOENT) return false;
  struct stat status {};
  if (file.get() < 0 || ::fstat(file.get(), &status) != 0) fail_file(path, "read", errno);
  if (!S_ISREG(status.st_mode)) fail_file(path, "read", EINVAL);
  if (status.st_uid != ::geteuid()) {
    fail(fmt::format("the token file {} belongs to user {}, not to you", path, status.st_uid),
         "remove it, or set LOCKSTEP_TOKEN");
  }
  if ((status.st_mode & 077) != 0) {
    fail(fmt::format("the token file {} may be read or changed by others (mode {:04o})", path,
                     status.st_mode & 07777),
         fmt::format("if nobody has read it: chmod 600 {}; otherwise remove it, and a new one is "
                     "made",
                     path));
  }
  token.resize(kLongestToken + 2);
  const ssize_t count = ::read(file.get(), token.data(), token.size());
  if (count < 0) fail_file(path, "read", errno);
  token.resize(static_cast<size_t>(count));
  return true;
}

// 0, or the errno of what could not be made.
int make_folders(const std::filesystem::path& folder) {
  if (::mkdir(folder.c_str(), 0700) == 0 || errno == EEXIST) return 0;
  if (errno != ENOENT || !folder.has_relative_path()) return errno;
  if (const int error = make_folders(folder.parent_path()); error != 0) return error;
  return ::mkdir(folder.c_str(), 0700) == 0 || errno == EEXIST ? 0 : errno;
}

// Written whole beside its place, then linked there: of several makers the first wins, and nobody
// reads a part.
void make_token(const std::string& path) {
  if (const int wrong = make_folders(std::filesystem::path(path).parent_path()); wrong != 0)
    fail_file(path, "make", wrong);
  const std::string beside = fmt::format("{}.{}", path, to_hex(random_bytes(8)));
  const std::string token = to_hex(random_bytes(kTokenBytes)) + "\n";
  int error = 0;
  {
    const Descriptor file(::open(beside.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
    if (file.get() < 0) fail_file(path, "make", errno);
    const ssize_t written = ::write(file.get(), token.data(), token.size());
    if (written != static_cast<ssize_t>(token.size())) error = written < 0 ? errno : ENOSPC;
    if (error == 0 && ::fsync(file.get()) != 0) error = errno;
  }
  if (error == 0 && ::link(beside.c_str(), path.c_str()) != 0 && errno != EEXIST) error = errno;
  ::unlink(beside.c_str());
  if (error != 0) fail_file(path, "make", error);
}

}  // namespace

std::string load_or_make_token() {
  const char* given = std::getenv("LOCKSTEP_TOKEN");
  if (given != nullptr && *given != '\0') return checked(given, "LOCKSTEP_TOKEN");
  const std::string path = token_path();
  std::string token;
  if (!read_token(path, token)) {
    make_token(path);
    if (!read_token(path, token)) fail_file(path, "read", ENOENT);
  }
  return checked(std::move(token), path);
}

std::string private_session(const std::string& session) {
  std::string token;
  try {
    token = load_or_make_token();
  } catch (const Error&) {
    return session;  // no home folder, or one that cannot be written: nothing here is secret
  }
  return to_hex(hmac_sha256(token, {"lockstep session ", session})).substr(0, kSessionDigits);
}

}  // namespace lockstep
