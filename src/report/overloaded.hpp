#pragma once

namespace lockstep {

/// One visitor of a variant, made of a lambda for each alternative.
template <class... Functions>
struct Overloaded : Functions... {
  using Functions::operator()...;
};

template <class... Functions>
Overloaded(Functions...) -> Overloaded<Functions...>;

}  // namespace lockstep
