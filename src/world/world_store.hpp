#pragma once

#include <memory>
#include <optional>
#include <string>

#include "lockstep/rank_environment.hpp"
#include "net/store.hpp"

namespace lockstep {

/// How the ranks of a job find each other before they have a communicator: the launcher's store;
/// where there is none, one that rank 0 serves itself, on a Unix socket on one host and at
/// MASTER_ADDR and MASTER_PORT on several; under torchrun, which holds that port, at one of rank
/// 0's own that it announces through torchrun's store.
class WorldStore {
 public:
  WorldStore(const RankEnvironment& environment, int64_t deadline_ns);

  const std::shared_ptr<Store>& store() const { return store_; }

  /// This host's address as the other hosts reach it.
  const std::string& own_address() const { return own_address_; }

 private:
  std::optional<StoreServer> server_;  // rank 0's, where no launcher serves
  std::shared_ptr<Store> store_;
  std::string own_address_;
};

}  // namespace lockstep
