#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

namespace lockstep {

/// Small values by name, seen by all ranks of a job: how they find each other before they can talk.
/// Any thread may call it.
class Store {
 public:
  virtual ~Store() = default;

  /// Sets a value once; setting it again is an Error.
  virtual void set(std::string_view key, std::string_view value) = 0;

  /// Waits until somebody has set the value. kRendezvous at the deadline, naming the key.
  virtual std::string get(std::string_view key, int64_t deadline_ns) = 0;
};

/// A store inside this process, for ranks that are threads.
std::shared_ptr<Store> make_local_store();

/// The same store under a prefix, so that two users of it never meet.
std::shared_ptr<Store> make_prefix_store(std::shared_ptr<Store> store, std::string prefix);

/// Where a store is served.
struct StoreAddress {
  std::string unix_name;  ///< one host: an abstract Unix socket; only this user may connect
  std::string host;       ///< several hosts: name or address; used where unix_name is empty
  int port = 0;           ///< 0 for a server: any free one
  std::string token;      ///< TCP only: the secret both sides prove to know
};

/// Of "node1:29500" or "[fd00::1]:29500", as in LOCKSTEP_STORE.
StoreAddress parse_store_address(std::string_view text, std::string token);

/// Serves a store from a thread of its own until destroyed. Bounded in the size of keys, values and
/// in connections; a client that sends rubbish, or nothing, is dropped and delays nobody.
class StoreServer {
 public:
  explicit StoreServer(const StoreAddress& address);
  ~StoreServer();
  StoreServer(const StoreServer&) = delete;
  StoreServer& operator=(const StoreServer&) = delete;

  int port() const;  ///< the one in use; 0 on a Unix socket

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// Connects to a server, retrying until the deadline while it is not there yet. A wrong token, or a
/// server that does not know ours, is an Error at once.
std::shared_ptr<Store> connect_store(const StoreAddress& address, int64_t deadline_ns);

}  // namespace lockstep
