// The store through which ranks find each other, and a client that sends it the input. Another
// client must be served as if nothing had happened.

#include "net/store.hpp"

#include <fmt/format.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>

#include "fuzz.hpp"
#include "lockstep/clock.hpp"
#include "net/socket.hpp"

namespace lockstep::fuzz {
namespace {

constexpr int64_t kDeadlineNs = 20'000'000'000;

// Sends everything, then waits until the store has hung up.
void send_all(const std::string& name, std::string_view bytes) {
  int error = 0;
  const Socket socket = start_connect_unix(name, error);
  require(error == 0, "the store takes connections");
  pollfd event{socket.get(), POLLIN | POLLOUT, 0};
  bool sending = true;
  for (;;) {
    event.events = static_cast<short>(sending ? POLLIN | POLLOUT : POLLIN);
    const int ready = ::poll(&event, 1, 20'000);
    if (ready < 0 && errno == EINTR) continue;  // libFuzzer's clock
    require(ready > 0, "the store serves a client");
    char answer[4096];
    if ((event.revents & (POLLIN | POLLHUP | POLLERR)) != 0 &&
        ::recv(socket.get(), answer, sizeof answer, 0) <= 0) {
      return;
    }
    if (!sending || (event.revents & POLLOUT) == 0) continue;
    const ssize_t count = ::send(socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (count > 0) bytes.remove_prefix(static_cast<size_t>(count));
    if (count < 0 || bytes.empty()) {
      ::shutdown(socket.get(), SHUT_WR);
      sending = false;
    }
  }
}

}  // namespace
}  // namespace lockstep::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace lockstep;
  using namespace lockstep::fuzz;
  static int count = 0;
  const std::string name = fmt::format("lockstep-fuzz-{}-{}", ::getpid(), count++);
  StoreAddress address;
  address.unix_name = name;
  const StoreServer server(address);
  const auto store = connect_store(address, monotonic_ns() + kDeadlineNs);
  store->set("before the attack", "a value");
  send_all(name, {reinterpret_cast<const char*>(data), size});
  store->set("after the attack", "another");
  require(store->get("before the attack", monotonic_ns() + kDeadlineNs) == "a value" &&
              store->get("after the attack", monotonic_ns() + kDeadlineNs) == "another",
          "a bad client does not change what others stored");
  return 0;
}
