#include "net/secret.hpp"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/params.h>
#include <sys/random.h>

#include <array>
#include <cerrno>
#include <memory>

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

std::string random_bytes(size_t count) {
  std::string bytes(count, '\0');
  for (size_t done = 0; done < count;) {
    const ssize_t got = ::getrandom(bytes.data() + done, count - done, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw Error(Code::kInternal, "the system gives no random bytes");
    done += static_cast<size_t>(got);
  }
  return bytes;
}

std::string hmac_sha256(std::string_view key, std::initializer_list<std::string_view> pieces) {
  // Never freed: threads may still use it while the process ends.
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

std::string to_hex(std::string_view bytes) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  text.reserve(2 * bytes.size());
  for (const char byte : bytes) {
    text += kDigits[static_cast<unsigned char>(byte) >> 4];
    text += kDigits[static_cast<unsigned char>(byte) & 15];
  }
  return text;
}

}  // namespace lockstep
