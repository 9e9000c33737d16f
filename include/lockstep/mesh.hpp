#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "lockstep/communicator.hpp"

namespace lockstep {

/// A named direction of a mesh and its length.
struct MeshAxis {
  std::string name;
  int size = 1;
};

/// Splits a world into named axes. The last axis varies fastest, so that with {dp, 2}, {tp, 4} the
/// ranks 0 to 3 share a `tp` group and 0 and 4 a `dp` group.
///
///     lockstep::Mesh mesh(world.comm(), {{"dp", 2}, {"pp", 2}});
///     lockstep::DistributedDataParallel ddp(stage, mesh.axis("dp"));
class Mesh {
 public:
  /// Collective. The axes' product must be the world's size, their names different.
  Mesh(const Communicator& world, std::vector<MeshAxis> axes);

  /// The ranks that differ from this one in that axis only.
  const Communicator& axis(std::string_view name) const;

  /// The ranks that differ from this one in these axes only, in the order of the world: {"pp",
  /// "tp"} are those that together hold one model. Made anew by each call, so keep it. Collective
  /// over the world: every rank names the same axes, in any order.
  Communicator plane(const std::vector<std::string>& names) const;

  /// This rank's coordinate along an axis.
  int coordinate(std::string_view name) const;

  const std::vector<MeshAxis>& axes() const { return axes_; }

 private:
  size_t index_of(std::string_view name) const;
  // Ranks with the same coordinates in all axes that are not `inside`.
  Communicator split(const std::vector<bool>& inside) const;

  Communicator world_;
  std::vector<MeshAxis> axes_;
  std::vector<int> coordinates_;      // [axis]
  std::vector<Communicator> groups_;  // [axis]
};

}  // namespace lockstep
