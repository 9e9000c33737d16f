#pragma once

#include <torch/types.h>

namespace lockstep {

class Device;

/// Guard: matrix products and convolutions of this thread run in a lower precision, as
/// torch.autocast decides it for each operation. Nests; ends with what was before, also on an
/// exception. Work that is given to logical devices inside it follows it there.
///
///     {
///       lockstep::Autocast amp(world.device(), torch::kBFloat16);
///       loss = torch::mse_loss(net(x), y);
///     }
///     loss.backward();  // outside: it runs in the dtypes of forward
///
/// Weights are converted once and kept until the outermost guard ends: let it end before the
/// weights change.
class Autocast {
 public:
  /// kHalf or kBFloat16. A precision that the device's libtorch cannot compute with is an Error
  /// that offers one it can. `enabled` false: full precision, also inside an outer guard.
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

/// Refuses what Autocast would refuse, before anything is started.
void require_autocast(torch::Device device, torch::ScalarType dtype);

/// The lower precision that is fastest there: kHalf on a GPU, kBFloat16 on the CPU.
torch::ScalarType default_autocast_dtype(torch::Device device);

}  // namespace lockstep
