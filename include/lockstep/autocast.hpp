#pragma once

#include <torch/types.h>

namespace lockstep {

class Device;

/// Guard: matrix products and convolutions of this thread run in a lower precision, as
/// torch.autocast decides for each operation. Guards nest, and each restores what was before it,
/// also on an exception. Work that is posted to logical devices inside a guard follows it there.
///
///     {
///       lockstep::Autocast amp(world.device(), torch::kBFloat16);
///       loss = torch::mse_loss(net(x), y);
///     }
///     loss.backward();  // outside: it runs in the dtypes of forward
///
/// Converted weights are kept until the outermost guard ends, so end it before the weights change.
class Autocast {
 public:
  /// `dtype` is kHalf or kBFloat16. If libtorch cannot compute in it on this device, the Error
  /// names one that works. `enabled` = false gives full precision, also inside an outer guard.
  Autocast(torch::Device device, torch::ScalarType dtype, bool enabled = true);
  Autocast(const Device& device, torch::ScalarType dtype, bool enabled = true);
  ~Autocast();
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

 private:
  torch::DeviceType kind_;
  bool enabled_before_;
  torch::ScalarType dtype_before_;
  bool cache_before_;
};

/// Throws what Autocast would throw, before anything is started.
void require_autocast(torch::Device device, torch::ScalarType dtype);

/// Returns the fastest lower precision of a device: kHalf on a GPU, kBFloat16 on the CPU.
torch::ScalarType default_autocast_dtype(torch::Device device);

}  // namespace lockstep
