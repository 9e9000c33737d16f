#include "net/store.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>
#include <vector>

#include "base/running_clock.hpp"
#include "lockstep/error.hpp"
#include "net/connection.hpp"
#include "net/hub.hpp"

namespace lockstep {
namespace {

void check_sizes(std::string_view key, std::string_view value) {
  if (key.empty() || key.size() > kMaxKeyBytes) {
    throw Error(Code::kRendezvous,
                fmt::format("a key of the store has {} bytes; 1 to {} are allowed", key.size(),
                            kMaxKeyBytes),
                "use a shorter name");
  }
  if (value.size() > kMaxValueBytes) {
    throw Error(Code::kRendezvous,
                fmt::format("the store's value \"{}\" has {} bytes; at most {} are allowed", key,
                            value.size(), kMaxValueBytes),
                "exchange addresses and small texts through the store, not data");
  }
}

[[noreturn]] void throw_set_twice(std::string_view key) {
  throw Error(Code::kRendezvous, fmt::format("the store's value \"{}\" is already set", key),
              "two ranks have the same number, or two jobs share one store: give each job its "
              "own endpoint");
}

[[noreturn]] void throw_never_set(std::string_view key) {
  throw Error(Code::kRendezvous,
              fmt::format("\"{}\" was not set in the store before the deadline", key),
              "the rank that should have set it did not start, failed early, or is slow: read its "
              "log, or allow more time");
}

class LocalStore final : public Store {
 public:
  void set(std::string_view key, std::string_view value) override {
    check_sizes(key, value);
    const std::lock_guard lock(mutex_);
    if (!values_.emplace(key, value).second) throw_set_twice(key);
    changed_.notify_all();
  }

  std::string get(std::string_view key, int64_t deadline_ns) override {
    check_sizes(key, {});
    std::unique_lock lock(mutex_);
    for (;;) {
      const auto found = values_.find(key);
      if (found != values_.end()) return found->second;
      const int64_t left_ns = deadline_ns - running_ns();
      if (left_ns <= 0) throw_never_set(key);
      changed_.wait_for(lock, std::chrono::nanoseconds(std::min(left_ns, kLongestWaitNs)));
    }
  }

 private:
  // wait_for adds this to the clock's time: an endless deadline must not overflow it.
  static constexpr int64_t kLongestWaitNs = 3'600'000'000'000;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::string, std::less<>> values_;
};

class PrefixStore final : public Store {
 public:
  PrefixStore(std::shared_ptr<Store> store, std::string prefix)
      : store_(std::move(store)), prefix_(std::move(prefix)) {}

  void set(std::string_view key, std::string_view value) override { store_->set(full(key), value); }

  std::string get(std::string_view key, int64_t deadline_ns) override {
    return store_->get(full(key), deadline_ns);
  }

 private:
  // The length tells prefix "a" with key "b/c" from prefix "a/b" with key "c".
  std::string full(std::string_view key) const {
    return fmt::format("{}:{}/{}", prefix_.size(), prefix_, key);
  }

  std::shared_ptr<Store> store_;
  std::string prefix_;
};

enum class StoreAnswer : uint8_t { kDone = 1, kSetAlready = 2, kFull = 3 };

// Returns views into `payload`; anything that encode() cannot produce is an Error.
StoreRequest decode_request(std::string_view payload) {
  StoreRequest request;
  const size_t key_bytes = payload.size() < 3 ? 0 : get_integer(payload.substr(1), 2);
  const bool good = key_bytes > 0 && key_bytes <= kMaxKeyBytes && payload.size() >= 3 + key_bytes;
  if (good) {
    request.verb = static_cast<StoreVerb>(payload[0]);
    request.key = payload.substr(3, key_bytes);
    request.value = payload.substr(3 + key_bytes);
  }
  const bool set = request.verb == StoreVerb::kSet && request.value.size() <= kMaxValueBytes;
  const bool get = request.verb == StoreVerb::kGet && request.value.empty();
  if (!good || !(set || get)) {
    throw Error(Code::kRendezvous, "a request that the store does not understand",
                "use the same version of lockstep on both sides");
  }
  return request;
}

constexpr size_t kMaxStoredBytes = size_t{256} << 20;
constexpr size_t kEntryBytes = 128;  // roughly what an entry costs beyond its text

Socket listen_for_clients(const StoreAddress& address) {
  if (!address.unix_name.empty()) return listen_unix(address.unix_name);
  if (address.token.empty()) {
    throw Error(Code::kRendezvous, "a store over TCP needs a token, but there is none",
                "set LOCKSTEP_TOKEN to the same secret on all hosts");
  }
  return listen_tcp({address.host, address.port});
}

// The values, and which client waits for which. A client has one pending request at a time.
class StoreHandler final : public HubHandler {
 public:
  void received(Hub& hub, PeerId peer, std::string_view payload) override {
    const StoreRequest request = decode_request(payload);
    if (waiting_.count(peer) != 0) {
      throw Error(Code::kRendezvous, "a second request came before the first was answered",
                  "use one connection for each thread");
    }
    if (request.verb == StoreVerb::kSet) {
      set(hub, peer, request);
    } else {
      get(hub, peer, std::string(request.key));
    }
  }

  void left(Hub& /*hub*/, PeerId peer, const std::string& /*why*/) override { forget(peer); }

 private:
  void set(Hub& hub, PeerId peer, const StoreRequest& request) {
    if (values_.find(request.key) != values_.end())
      return answer(hub, peer, StoreAnswer::kSetAlready);
    const size_t needed = request.key.size() + request.value.size() + kEntryBytes;
    if (stored_bytes_ + needed > kMaxStoredBytes) return answer(hub, peer, StoreAnswer::kFull);
    stored_bytes_ += needed;
    const auto& [key, value] = *values_.emplace(request.key, request.value).first;
    answer(hub, peer, StoreAnswer::kDone);
    const auto waiters = waiters_.extract(key);
    if (waiters.empty()) return;
    for (const PeerId waiter : waiters.mapped()) {
      waiting_.erase(waiter);
      answer(hub, waiter, StoreAnswer::kDone, value);
    }
  }

  void get(Hub& hub, PeerId peer, std::string key) {
    const auto found = values_.find(key);
    if (found != values_.end()) return answer(hub, peer, StoreAnswer::kDone, found->second);
    waiters_[key].insert(peer);
    waiting_.emplace(peer, std::move(key));
  }

  void forget(PeerId peer) {
    const auto found = waiting_.find(peer);
    if (found == waiting_.end()) return;
    const auto waiters = waiters_.find(found->second);
    waiters->second.erase(peer);
    if (waiters->second.empty()) waiters_.erase(waiters);
    waiting_.erase(found);
  }

  static void answer(Hub& hub, PeerId peer, StoreAnswer result, std::string_view value = {}) {
    std::string payload(1, static_cast<char>(result));
    payload += value;
    hub.send(peer, payload);
  }

  std::map<std::string, std::string, std::less<>> values_;
  size_t stored_bytes_ = 0;
  std::map<std::string, std::set<PeerId>> waiters_;  // by key
  std::unordered_map<PeerId, std::string> waiting_;  // the same by peer
};

// A set waits only for the server.
constexpr int64_t kSetNs = 30'000'000'000;

// A get may wait long, and must not block other threads: each call uses its own connection, and
// idle connections are kept for later calls.
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

  // Returns nullopt at the deadline and closes the connection, since the answer may still come.
  std::optional<std::string> ask(const StoreRequest& request, int64_t deadline_ns) {
    const std::string payload = encode(request);
    Connection connection = take_idle(deadline_ns);
    connection.post(payload);
    // A value that is already there can be read even after the deadline.
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

std::shared_ptr<Store> make_local_store() {
  return std::make_shared<LocalStore>();
}

std::shared_ptr<Store> make_prefix_store(std::shared_ptr<Store> store, std::string prefix) {
  return std::make_shared<PrefixStore>(std::move(store), std::move(prefix));
}

std::string encode(const StoreRequest& request) {
  check_sizes(request.key, request.value);
  std::string payload(1, static_cast<char>(request.verb));
  put_integer(payload, request.key.size(), 2);
  payload += request.key;
  payload += request.value;
  return payload;
}

struct StoreServer::State {
  std::unique_ptr<HubHandler> handler = std::make_unique<StoreHandler>();
  Hub hub;

  explicit State(const StoreAddress& address)
      : hub(listen_for_clients(address),
            {.token = address.unix_name.empty() ? address.token : "",
             .max_payload = kMaxStorePayload},
            *handler) {}
};

StoreServer::StoreServer(const StoreAddress& address) : state_(std::make_unique<State>(address)) {}

StoreServer::~StoreServer() = default;

int StoreServer::port() const {
  return state_->hub.port();
}

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
