#include "world/world_store.hpp"

#include <fmt/format.h>
#include <sys/socket.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <chrono>

#include "base/running_clock.hpp"
#include "launch/token.hpp"
#include "lockstep/error.hpp"
#include "net/connection.hpp"
#include "net/socket.hpp"

namespace lockstep {
namespace {

// The local address of the route to a host: no packet is sent by connecting a datagram socket.
std::string address_towards(const std::string& host) {
  for (const ResolvedAddress& address : resolve({.host = host, .port = 9})) {
    const Socket socket(::socket(address.family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    const auto* bytes = reinterpret_cast<const sockaddr*>(address.bytes.data());
    if (socket &&
        ::connect(socket.get(), bytes, static_cast<socklen_t>(address.bytes.size())) == 0) {
      return own_address(socket);
    }
  }
  throw Error(Code::kRendezvous, fmt::format("there is no route to MASTER_ADDR {}", host),
              "check the network between the hosts");
}

// torchrun's agent serves MASTER_PORT itself, so that rank 0 cannot. It can announce another there.
int exchange_port_through_torchrun(const RankEnvironment& environment, int own_port,
                                   int64_t deadline_ns) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(environment.master_port);
  options.isServer = false;
  options.waitWorkers = false;
  options.timeout =
      std::chrono::milliseconds(std::max<int64_t>(1, (deadline_ns - running_ns()) / 1'000'000));
  const c10::intrusive_ptr<c10d::Store> agent =
      c10::make_intrusive<c10d::TCPStore>(environment.master_addr, options);
  const std::string key = "lockstep/" + environment.session;
  if (environment.rank == 0) {
    const std::string port = std::to_string(own_port);
    agent->set(key, std::vector<uint8_t>(port.begin(), port.end()));
    return own_port;
  }
  const std::vector<uint8_t> port = agent->get(key);
  return std::stoi(std::string(port.begin(), port.end()));
}

// mpirun does not tell its ranks where rank 0 is.
void require_master(const RankEnvironment& environment) {
  if (environment.one_host() || !environment.master_addr.empty()) return;
  throw Error(Code::kWorld, "the ranks are on several hosts, and nobody said where rank 0 is",
              "export MASTER_ADDR and MASTER_PORT to all ranks, e.g. mpirun -x MASTER_ADDR -x "
              "MASTER_PORT, or start them with `lockstep run --nnodes`");
}

std::string own_address_of(const RankEnvironment& environment) {
  require_master(environment);
  return environment.one_host() ? "127.0.0.1" : address_towards(environment.master_addr);
}

// A store that rank 0 serves: whoever does not find it, or loses it, is rank 0's victim.
class StoreOfRank0 final : public Store {
 public:
  StoreOfRank0(const StoreAddress& address, int64_t deadline_ns) {
    try {
      store_ = connect_store(address, deadline_ns);
    } catch (const Error& error) {
      blame_rank_0(error);
    }
  }

  void set(std::string_view key, std::string_view value) override {
    try {
      store_->set(key, value);
    } catch (const ConnectionLost& error) {
      blame_rank_0(error);
    }
  }

  std::string get(std::string_view key, int64_t deadline_ns) override {
    try {
      return store_->get(key, deadline_ns);
    } catch (const ConnectionLost& error) {
      blame_rank_0(error);
    }
  }

 private:
  [[noreturn]] static void blame_rank_0(const Error& error) {
    throw RankError(Code::kRendezvous, 0, "the store of rank 0: " + error.message(), error.help());
  }

  std::shared_ptr<Store> store_;
};

}  // namespace

WorldStore::WorldStore(const RankEnvironment& environment, int64_t deadline_ns)
    : own_address_(own_address_of(environment)) {
  const bool serves = environment.rank == 0 && environment.store.empty();
  StoreAddress address;
  if (!environment.store.empty()) {
    address = parse_store_address(environment.store, environment.token);
  } else if (environment.one_host()) {
    address.unix_name = "store-" + environment.session;
  } else {
    const bool under_torchrun = environment.launcher == "torchrun";
    address = {.unix_name = {},
               .host = environment.master_addr,
               .port = under_torchrun ? 0 : environment.master_port,
               .token = environment.token.empty() ? load_or_make_token() : environment.token};
    if (serves) server_.emplace(address);
    if (under_torchrun) {
      address.port =
          exchange_port_through_torchrun(environment, serves ? server_->port() : 0, deadline_ns);
    }
  }
  if (serves && !server_) server_.emplace(address);
  const auto connected = [&]() -> std::shared_ptr<Store> {
    const bool of_rank_0 = environment.store.empty() && !serves;
    if (of_rank_0) return std::make_shared<StoreOfRank0>(address, deadline_ns);
    return connect_store(address, deadline_ns);
  };
  store_ = make_prefix_store(connected(), environment.session + "/");
}

}  // namespace lockstep
