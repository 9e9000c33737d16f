#pragma once

#include <initializer_list>
#include <string>

#include "device/capture.hpp"
#include "lockstep/communicator.hpp"

namespace lockstep {

/// CallOptions that outlive the call they were given to.
class KeptOptions {
 public:
  explicit KeptOptions(const CallOptions& given) : label_(given.label), options_(given) {}

  CallOptions get() const {
    CallOptions options = options_;
    options.label = label_;
    return options;
  }

 private:
  std::string label_;
  CallOptions options_;
};

/// The capture that a call belongs to, which is then made in each replay and not now; null: none.
/// Refuses, while a step is captured, calls with tensors on the CPU (kCapture): what the host does
/// with them would not be repeated.
Capture* capture_of_call(const char* operation, std::initializer_list<torch::Tensor> tensors);

}  // namespace lockstep
