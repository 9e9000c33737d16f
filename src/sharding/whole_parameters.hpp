#pragma once

#include <memory>

#include "lockstep/communicator.hpp"
#include "sharding/unit_plan.hpp"

namespace lockstep {

/// The memory of one unit: its whole parameters, this rank's shard, and how the former are made of
/// all ranks' shards. Both tensors keep their storage for life; a storage may be without memory.
class WholeParameters {
 public:
  virtual ~WholeParameters() = default;

  virtual const torch::Tensor& whole() const = 0;  ///< flat
  virtual const torch::Tensor& shard() const = 0;  ///< flat; its storage is its own

  /// Gives whole() memory, without its values.
  virtual void materialize() {}

  /// Begins to fill whole() from all ranks' shards. Collective.
  virtual Work begin_gather(const CallOptions& call) = 0;

  /// The reverse: takes this rank's part of whole() as its shard.
  virtual void scatter() {}

  /// Whether scatter() would now overwrite an update of shard().
  virtual bool overwrites_shard() const { return false; }

  /// Gives the memory of whole() back, where it can be gathered again.
  virtual void release() {}

  virtual bool has_memory() const { return true; }

  /// Where all ranks see the same memory: gives this one a copy of its own until scatter(), so that
  /// ranks can change it without each other.
  virtual void copy_for_changes() {}

  /// Whether all ranks see the same memory, so that changes are seen after a barrier.
  virtual bool is_shared() const { return false; }
};

/// Makes the memory that this stage asks for. Collective.
std::unique_ptr<WholeParameters> make_whole_parameters(const UnitPlan& unit,
                                                       const Communicator& comm,
                                                       const ShardOptions& options);

/// The elements of `flat` from `begin` on, with a storage of their own: whoever uses them does not
/// use the rest of `flat`, which they keep alive.
torch::Tensor part_with_own_storage(const torch::Tensor& flat, int64_t begin, int64_t count);

}  // namespace lockstep
