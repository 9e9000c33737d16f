#include <fmt/format.h>

#include <map>
#include <unordered_map>

#include "net/bytes.hpp"
#include "net/hub.hpp"
#include "net/store_wire.hpp"

namespace lockstep {
namespace {

constexpr size_t kMaxStoredBytes = size_t{256} << 20;
constexpr size_t kEntryBytes = 128;  // what an entry costs beside its texts, roughly

Socket listen_at(const StoreAddress& address) {
  if (!address.unix_name.empty()) return listen_unix(address.unix_name);
  if (address.token.empty()) {
    throw Error(Code::kRendezvous, "a store over TCP needs a token, and there is none",
                "set LOCKSTEP_TOKEN to the same secret on all hosts");
  }
  return listen_tcp({address.host, address.port});
}

// The values, and who waits for which. A client has one request under way at a time.
class StoreHandler final : public HubHandler {
 public:
  void received(Hub& hub, PeerId peer, std::string_view payload) override {
    const StoreRequest request = decode_request(payload);
    if (waiting_.count(peer) != 0) {
      throw Error(Code::kRendezvous, "a second request before the first was answered",
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
    const auto [first, last] = waiters_.equal_range(key);
    for (auto waiter = first; waiter != last; ++waiter) {
      waiting_.erase(waiter->second);
      answer(hub, waiter->second, StoreAnswer::kDone, value);
    }
    waiters_.erase(key);
  }

  void get(Hub& hub, PeerId peer, std::string key) {
    const auto found = values_.find(key);
    if (found != values_.end()) return answer(hub, peer, StoreAnswer::kDone, found->second);
    waiters_.emplace(key, peer);
    waiting_.emplace(peer, std::move(key));
  }

  void forget(PeerId peer) {
    const auto found = waiting_.find(peer);
    if (found == waiting_.end()) return;
    const auto [first, last] = waiters_.equal_range(found->second);
    for (auto waiter = first; waiter != last; ++waiter) {
      if (waiter->second != peer) continue;
      waiters_.erase(waiter);
      break;
    }
    waiting_.erase(found);
  }

  static void answer(Hub& hub, PeerId peer, StoreAnswer result, std::string_view value = {}) {
    std::string payload(1, static_cast<char>(result));
    payload += value;
    hub.send(peer, payload);
  }

  std::map<std::string, std::string, std::less<>> values_;
  size_t stored_bytes_ = 0;
  std::multimap<std::string, PeerId> waiters_;       // by key
  std::unordered_map<PeerId, std::string> waiting_;  // the same, by peer
};

}  // namespace

std::string encode(const StoreRequest& request) {
  check_sizes(request.key, request.value);
  std::string payload(1, static_cast<char>(request.verb));
  put_integer(payload, request.key.size(), 2);
  payload += request.key;
  payload += request.value;
  return payload;
}

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
    throw Error(Code::kRendezvous, "a request that no store understands",
                "use the same version of lockstep on both sides");
  }
  return request;
}

struct StoreServer::State {
  StoreHandler handler;
  Hub hub;

  explicit State(const StoreAddress& address)
      : hub(listen_at(address),
            {.token = address.unix_name.empty() ? address.token : "",
             .max_payload = kMaxStorePayload},
            handler) {}
};

StoreServer::StoreServer(const StoreAddress& address) : state_(std::make_unique<State>(address)) {}

StoreServer::~StoreServer() = default;

int StoreServer::port() const {
  return state_->hub.port();
}

}  // namespace lockstep
