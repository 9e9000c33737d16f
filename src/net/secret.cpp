#include "net/secret.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/params.h>
#include <pwd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cctype>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>

#include "base/file.hpp"
#include "base/random.hpp"
#include "lockstep/error.hpp"

namespace lockstep {
namespace {

const unsigned char* as_bytes(std::string_view text) {
  return reinterpret_cast<const unsigned char*>(text.data());
}

struct FreeMacContext {
  void operator()(EVP_MAC_CTX* context) const { EVP_MAC_CTX_free(context); }
};

}  // namespace

std::string hmac_sha256(std::string_view key, std::initializer_list<std::string_view> pieces) {
  // Never freed: other threads may still use it while the process exits.
  static EVP_MAC* const hmac = EVP_MAC_fetch(nullptr, "HMAC", nullptr);
  const std::unique_ptr<EVP_MAC_CTX, FreeMacContext> context(EVP_MAC_CTX_new(hmac));
  char digest[] = "SHA256";
  const std::array<OSSL_PARAM, 2> parameters = {
      OSSL_PARAM_construct_utf8_string("digest", digest, 0), OSSL_PARAM_construct_end()};
  bool good = context && EVP_MAC_init(context.get(), as_bytes(key), key.size(), parameters.data());
  for (const auto piece : pieces) {
    good = good && EVP_MAC_update(context.get(), as_bytes(piece), piece.size());
  }
  std::string code(kMacBytes, '\0');
  size_t written = 0;
  good = good && EVP_MAC_final(context.get(), reinterpret_cast<unsigned char*>(code.data()),
                               &written, code.size());
  if (!good || written != kMacBytes) {
    throw Error(Code::kInternal, "OpenSSL cannot compute HMAC-SHA256",
                "check the installed OpenSSL 3 and its configuration");
  }
  return code;
}

bool equal_secrets(std::string_view a, std::string_view b) {
  return a.size() == b.size() && CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

std::string make_token() {
  return random_hex(kTokenDigits);
}

namespace {

constexpr size_t kShortestToken = 16;   // characters; shorter tokens can be guessed
constexpr size_t kLongestToken = 4096;  // characters
constexpr size_t kSessionDigits = 32;   // the same as in a launcher's session

[[noreturn]] void fail_token(const std::string& message, const std::string& help) {
  throw Error(Code::kRendezvous, message, help);
}

[[noreturn]] void fail_file(const std::string& path, const char* act, int error) {
  fail_token(fmt::format("cannot {} the token file {}: {}", act, path, std::strerror(error)),
             "set LOCKSTEP_TOKEN to a secret of your own instead");
}

std::string token_path() {
  const char* config = std::getenv("XDG_CONFIG_HOME");
  // The XDG specification says to ignore a relative path.
  if (config != nullptr && *config == '/') return std::string(config) + "/lockstep/token";
  const char* home = std::getenv("HOME");
  if (home == nullptr || *home != '/') {
    const passwd* user = ::getpwuid(::geteuid());
    home = user != nullptr ? user->pw_dir : nullptr;
  }
  if (home == nullptr || *home != '/') {
    fail_token("there is no home folder to store the token in", "set LOCKSTEP_TOKEN, or HOME");
  }
  return std::string(home) + "/.config/lockstep/token";
}

std::string checked_token(std::string token, const std::string& from) {
  while (!token.empty() && std::isspace(static_cast<unsigned char>(token.back()))) token.pop_back();
  if (token.size() < kShortestToken || token.size() > kLongestToken) {
    fail_token(fmt::format("the token in {} has {} characters; {} to {} are needed", from,
                           token.size(), kShortestToken, kLongestToken),
               "use a long random one, such as `openssl rand -hex 32` prints");
  }
  return token;
}

// Returns false if there is no such file.
bool read_token(const std::string& path, std::string& token) {
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (file.get() < 0 && errno == ENOENT) return false;
  struct stat status {};
  if (file.get() < 0 || ::fstat(file.get(), &status) != 0) fail_file(path, "read", errno);
  if (!S_ISREG(status.st_mode)) fail_file(path, "read", EINVAL);
  if (status.st_uid != ::geteuid()) {
    fail_token(fmt::format("the token file {} belongs to user {}, not to you", path, status.st_uid),
               "remove it, or set LOCKSTEP_TOKEN");
  }
  if ((status.st_mode & 077) != 0) {
    fail_token(
        fmt::format("the token file {} can be read or changed by others (mode {:04o})", path,
                    status.st_mode & 07777),
        fmt::format("if nobody has read it: chmod 600 {}; otherwise remove it, and a new one is "
                    "created",
                    path));
  }
  token.resize(kLongestToken + 2);
  const ssize_t count = ::read(file.get(), token.data(), token.size());
  if (count < 0) fail_file(path, "read", errno);
  token.resize(static_cast<size_t>(count));
  return true;
}

// Returns 0, or the errno of the failure.
int make_folders(const std::filesystem::path& folder) {
  if (::mkdir(folder.c_str(), 0700) == 0 || errno == EEXIST) return 0;
  if (errno != ENOENT || !folder.has_relative_path()) return errno;
  if (const int error = make_folders(folder.parent_path()); error != 0) return error;
  return ::mkdir(folder.c_str(), 0700) == 0 || errno == EEXIST ? 0 : errno;
}

// Writes a complete file next to the final path, then links it there: if several processes do this
// at once the first wins, and nobody reads a partial file.
void make_token_file(const std::string& path) {
  if (const int wrong = make_folders(std::filesystem::path(path).parent_path()); wrong != 0)
    fail_file(path, "create", wrong);
  const std::string beside = fmt::format("{}.{}", path, random_hex(16));
  const std::string token = make_token() + "\n";
  int error = 0;
  {
    const Descriptor file(::open(beside.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
    if (file.get() < 0) fail_file(path, "create", errno);
    const ssize_t written = ::write(file.get(), token.data(), token.size());
    if (written != static_cast<ssize_t>(token.size())) error = written < 0 ? errno : ENOSPC;
    if (error == 0 && ::fsync(file.get()) != 0) error = errno;
  }
  if (error == 0 && ::link(beside.c_str(), path.c_str()) != 0 && errno != EEXIST) error = errno;
  ::unlink(beside.c_str());
  if (error != 0) fail_file(path, "create", error);
}

}  // namespace

std::string load_or_make_token() {
  const char* given = std::getenv("LOCKSTEP_TOKEN");
  if (given != nullptr && *given != '\0') return checked_token(given, "LOCKSTEP_TOKEN");
  const std::string path = token_path();
  std::string token;
  if (!read_token(path, token)) {
    make_token_file(path);
    if (!read_token(path, token)) fail_file(path, "read", ENOENT);
  }
  return checked_token(std::move(token), path);
}

std::string private_session(const std::string& session) {
  std::string token;
  try {
    token = load_or_make_token();
  } catch (const Error&) {
    return session;  // no home folder, or not writable: there is no secret to use
  }
  return to_hex(hmac_sha256(token, {"lockstep session ", session})).substr(0, kSessionDigits);
}

}  // namespace lockstep
