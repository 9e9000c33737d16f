#pragma once

#include <ATen/record_function.h>

#include <exception>
#include <string>

#include "lockstep/error.hpp"

namespace lockstep::cuda {

/// Guard: knows which of libtorch's operators a captured step was in when it failed, in whatever
/// thread. One at a time in a process, as captures are.
class OperatorWatch {
 public:
  OperatorWatch();
  ~OperatorWatch();
  OperatorWatch(const OperatorWatch&) = delete;
  OperatorWatch& operator=(const OperatorWatch&) = delete;

  /// What cannot be captured, and what to do instead. `cause` is what the step threw.
  Error error(const std::exception& cause) const;

 private:
  at::CallbackHandle handle_;
};

}  // namespace lockstep::cuda
