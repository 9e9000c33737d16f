#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

namespace lockstep {

inline constexpr size_t kMaxKeyBytes = 1 << 10;
inline constexpr size_t kMaxValueBytes = 1 << 20;

/// Small named values, shared by all ranks of a job: how they find each other before they can talk.
/// A key has 1 to kMaxKeyBytes bytes, a value at most kMaxValueBytes. Thread-safe.
class Store {
 public:
  virtual ~Store() = default;

  /// Sets a value once; setting it again is an Error.
  virtual void set(std::string_view key, std::string_view value) = 0;

  /// Waits until the value is set. At the deadline it throws kRendezvous, naming the key.
  virtual std::string get(std::string_view key, int64_t deadline_ns) = 0;
};

/// A store inside this process, for ranks that are threads.
std::shared_ptr<Store> make_local_store();

/// The same store under a prefix, so that two users of it cannot collide.
std::shared_ptr<Store> make_prefix_store(std::shared_ptr<Store> store, std::string prefix);

/// Where a store is served.
struct StoreAddress {
  std::string unix_name;  ///< one host: an abstract Unix socket; only this user may connect
  std::string host;       ///< several hosts: name or address; used if unix_name is empty
  int port = 0;           ///< 0 for a server: any free port
  std::string token;      ///< TCP only: the secret that both sides prove to know
};

/// Parses "node1:29500" or "[fd00::1]:29500", as in LOCKSTEP_STORE.
StoreAddress parse_store_address(std::string_view text, std::string token);

/// Serves a store from its own thread until destroyed. The sizes of keys and values and the number
/// of connections are limited; a client that sends garbage, or nothing, is dropped and delays
/// nobody.
class StoreServer {
 public:
  explicit StoreServer(const StoreAddress& address);
  ~StoreServer();
  StoreServer(const StoreServer&) = delete;
  StoreServer& operator=(const StoreServer&) = delete;

  int port() const;  ///< the port in use; 0 on a Unix socket

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// Connects to a server and retries until the deadline while it is not there yet. A wrong token, or
/// a server that does not know ours, is an Error at once.
std::shared_ptr<Store> connect_store(const StoreAddress& address, int64_t deadline_ns);

// The protocol between client and server: one request, one answer.

enum class StoreVerb : uint8_t { kSet = 1, kGet = 2 };

/// [verb 1][length of key 2][key][value]
struct StoreRequest {
  StoreVerb verb = StoreVerb::kGet;
  std::string_view key;
  std::string_view value = {};  ///< of a set
};

inline constexpr size_t kMaxStorePayload = 1 + 2 + kMaxKeyBytes + kMaxValueBytes;

std::string encode(const StoreRequest& request);

}  // namespace lockstep
