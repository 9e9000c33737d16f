#include "base/random.hpp"

#include <sys/random.h>

#include <cerrno>

#include "lockstep/error.hpp"

namespace lockstep {

std::string random_bytes(size_t count) {
  std::string bytes(count, '\0');
  for (size_t done = 0; done < count;) {
    const ssize_t got = ::getrandom(bytes.data() + done, count - done, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw Error(Code::kInternal, "the system provides no random bytes");
    done += static_cast<size_t>(got);
  }
  return bytes;
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

std::string random_hex(size_t digits) {
  return to_hex(random_bytes((digits + 1) / 2)).substr(0, digits);
}

}  // namespace lockstep
