#pragma once

#include <map>
#include <memory>

#include "pipeline/rank_channel.hpp"
#include "pipeline/wire.hpp"

namespace lockstep {

/// Between places that are ranks of an axis.
class RankWire final : public Wire {
 public:
  /// Collective over `axis`: makes a line for each pair of neighbouring stages and direction.
  /// Refuses a schedule whose ranks would take messages in another order than they are sent.
  RankWire(const Communicator& axis, const Schedule& schedule, Device& device);

  void send(const ParcelName& name, const torch::Tensor& tensor, int64_t rows) override;
  torch::Tensor receive(const ParcelName& name, int64_t rows) override;
  void abort(const std::string& reason) override;
  LinkStats stats() const override;

 private:
  using Line = std::pair<Cargo, int>;  // what, from which stage

  Exchange own_;                                        // between stages of this rank
  LocalWire at_home_;                                   // the same
  std::map<Line, std::unique_ptr<RankChannel>> lines_;  // that begin or end at this rank
};

}  // namespace lockstep
