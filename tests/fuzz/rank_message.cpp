// A message between ranks of one host, on a Unix socket.

#include <sys/socket.h>

#include "comm/shm/shm_rendezvous.hpp"
#include "fuzz.hpp"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace lockstep;
  using namespace lockstep::fuzz;
  static const auto ends = make_socket_pair();
  if (size == 0 || ::send(ends.first->get(), data, size, MSG_NOSIGNAL) < 0) return 0;
  SocketMessage message;
  if (receive_message(ends.second->get(), message) != Received::kMessage) return 0;
  require(message.numbers.size() * sizeof(int64_t) + message.text.size() <= size,
          "a message comes from bytes that arrived");
  require(send_message(ends.first->get(), message.kind, message.numbers, message.text),
          "a message that was read can be sent");
  SocketMessage again;
  require(receive_message(ends.second->get(), again) == Received::kMessage &&
              again.kind == message.kind && again.numbers == message.numbers &&
              again.text == message.text,
          "a message survives sending");
  return 0;
}
