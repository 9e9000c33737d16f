#pragma once

#include <cstdint>

#include "course/hybrid.hpp"
#include "lockstep/mesh.hpp"
#include "lockstep/world.hpp"

namespace course {

/// What a message costs: a time for each, and one for each byte.
struct Link {
  double call_ms = 0;
  double byte_ms = 0;

  double ms(double calls, int64_t bytes) const {
    return calls * call_ms + static_cast<double>(bytes) * byte_ms;
  }
};

/// Of the three axes; one of size 1 costs nothing.
struct Links {
  Link data;      ///< an all-reduce, by the bytes a rank sends in it
  Link pipeline;  ///< a message from one place to the next
  Link tensor;    ///< as data
};

/// Sends a small and a large tensor along each axis, a few times. Collective.
Links measure_links(const HybridPlan& plan, const lockstep::World& world,
                    const lockstep::Mesh& mesh);

}  // namespace course
