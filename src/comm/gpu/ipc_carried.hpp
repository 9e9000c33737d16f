#pragma once

#include <memory>

#include "comm/backend.hpp"
#include "comm/gpu/gpu_agreement.hpp"
#include "comm/gpu/ipc_core.hpp"

namespace lockstep {

/// A small collective through the host's memory: values come down, the host's backend moves them,
/// and the result goes up. Processes have a GPU in turns, and a wait for another one's event costs
/// a turn, about 2 ms: more than this whole way takes. All happens on the call's own stream, since
/// waits between streams cost too. Results are those of the other ways, to the bit.
class IpcCarried final : public Awaited {
 public:
  /// `input` is null where this rank contributes nothing, `output` where it gets nothing.
  IpcCarried(IpcCore& core, const Call& call, const CallContext& context, const std::byte* input,
             std::byte* output);
  IpcCarried(const IpcCarried&) = delete;
  IpcCarried& operator=(const IpcCarried&) = delete;

  /// True when the result is on its way up.
  bool advance() override;
  void wait() override;

 private:
  void begin_moving();
  void take_up();

  IpcCore& core_;
  Call call_;
  int64_t deadline_ns_;
  CudaStream stream_;
  IpcCore::HostArea& area_;
  std::byte* output_;
  int64_t output_bytes_;
  std::byte* below_;   // on the host: what came down, and the result of calls in place
  std::byte* result_;  // on the host
  GpuEvent down_;      // values have come down
  bool moving_ = false;
  bool done_ = false;
  std::unique_ptr<Pending> pending_;  // of an all_reduce; other calls are over when they have begun
};

}  // namespace lockstep
