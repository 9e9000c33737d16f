#include <fmt/format.h>

#include <mutex>
#include <vector>

#include "base/running_clock.hpp"
#include "net/connection.hpp"
#include "net/store_wire.hpp"

namespace lockstep {
namespace {

// A set waits for nobody but the server.
constexpr int64_t kSetNs = 30'000'000'000;

// A get may wait long, and other threads must not wait with it: each call has a connection of its
// own while it lasts, and idle ones are kept for the next.
class StoreClient final : public Store {
 public:
  StoreClient(StoreAddress address, int64_t deadline_ns) : address_(std::move(address)) {
    idle_.push_back(open(deadline_ns, Connection::Retry::kUntilDeadline));
  }

  void set(std::string_view key, std::string_view value) override {
    const auto answer =
        ask({.verb = StoreVerb::kSet, .key = key, .value = value}, running_ns() + kSetNs);
    if (!answer) {
      throw Error(Code::kRendezvous, fmt::format("the store did not take \"{}\" within 30 s", key),
                  "its process is stopped, or the network is cut");
    }
    if ((*answer)[0] == static_cast<char>(StoreAnswer::kSetAlready)) throw_set_twice(key);
    if ((*answer)[0] == static_cast<char>(StoreAnswer::kFull)) {
      throw Error(Code::kRendezvous, fmt::format("the store has no room for \"{}\"", key),
                  "exchange addresses and small texts through the store, not data");
    }
  }

  std::string get(std::string_view key, int64_t deadline_ns) override {
    auto answer = ask({.verb = StoreVerb::kGet, .key = key}, deadline_ns);
    if (!answer) throw_never_set(key);
    return answer->substr(1);
  }

 private:
  Connection open(int64_t deadline_ns, Connection::Retry retry) const {
    return address_.unix_name.empty()
               ? Connection::open_tcp({address_.host, address_.port}, address_.token,
                                      kMaxStorePayload, deadline_ns, retry)
               : Connection::open_unix(address_.unix_name, kMaxStorePayload, deadline_ns, retry);
  }

  // nullopt at the deadline; the connection is then closed, since its answer may come late.
  std::optional<std::string> ask(const StoreRequest& request, int64_t deadline_ns) {
    const std::string payload = encode(request);
    Connection connection = take_idle(deadline_ns);
    connection.post(payload);
    // Even a deadline that has passed lets a value that is there be read.
    auto answer = connection.receive(std::max(deadline_ns, running_ns() + kAnswerNs));
    if (!answer) return std::nullopt;
    if (answer->empty()) {
      throw Error(Code::kRendezvous, "the store gave an empty answer",
                  "use the same version of lockstep on both sides");
    }
    const std::lock_guard lock(mutex_);
    idle_.push_back(std::move(connection));
    return answer;
  }

  Connection take_idle(int64_t deadline_ns) {
    {
      const std::lock_guard lock(mutex_);
      if (!idle_.empty()) {
        Connection connection = std::move(idle_.back());
        idle_.pop_back();
        return connection;
      }
    }
    return open(std::max(deadline_ns, running_ns() + kAnswerNs), Connection::Retry::kNever);
  }

  static constexpr int64_t kAnswerNs = 100'000'000;

  const StoreAddress address_;
  std::mutex mutex_;
  std::vector<Connection> idle_;
};

}  // namespace

std::shared_ptr<Store> connect_store(const StoreAddress& address, int64_t deadline_ns) {
  return std::make_shared<StoreClient>(address, deadline_ns);
}

StoreAddress parse_store_address(std::string_view text, std::string token) {
  Endpoint endpoint = parse_endpoint(text);
  return {.unix_name = "",
          .host = std::move(endpoint.host),
          .port = endpoint.port,
          .token = std::move(token)};
}

}  // namespace lockstep
