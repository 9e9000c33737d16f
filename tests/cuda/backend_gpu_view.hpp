#pragma once

#include <memory>
#include <vector>

#include "comm/backend.hpp"
#include "comm/gpu/gpu_runtime.hpp"

namespace lockstep::test {

class ViewMemory;
class GpuCopy;

/// A GPU backend as the conformance suite sees backends: with buffers of the host. What a call
/// reads goes to the GPU before it and what it wrote comes back after it, on a stream of the rank's
/// own; allocate() gives the host's picture of registered memory. So one suite serves all backends.
class GpuView final : public Backend {
 public:
  /// `host` is what the GPU backend stands on; null if it needs none.
  GpuView(std::unique_ptr<Backend> host, std::unique_ptr<Backend> gpu);
  ~GpuView() override;
  GpuView(const GpuView&) = delete;
  GpuView& operator=(const GpuView&) = delete;

  /// The backend itself, for the GPU's memory.
  Backend& gpu() { return *gpu_; }
  CudaStream stream() const { return stream_.get(); }

  std::string_view name() const override { return gpu_->name(); }
  const Group& group() const override { return gpu_->group(); }
  std::unique_ptr<Work> all_reduce(const Buffer& buffer, ReduceOp op, double weight,
                                   const CallContext& context) override;
  std::unique_ptr<Work> broadcast(const Buffer& buffer, int root,
                                  const CallContext& context) override;
  std::unique_ptr<Work> reduce_scatter(const ConstBuffer& input, const Buffer& output, ReduceOp op,
                                       double weight, const CallContext& context) override;
  std::unique_ptr<Work> all_gather(const ConstBuffer& input, const Buffer& output,
                                   const CallContext& context) override;
  std::unique_ptr<Work> reduce(const Buffer& buffer, int root, ReduceOp op, double weight,
                               const CallContext& context) override;
  std::unique_ptr<Work> exchange(const ConstBuffer& input, const Buffer& output,
                                 const BlockExchange& blocks, const CallContext& context) override;
  std::unique_ptr<Work> send(const ConstBuffer& buffer, int to, int tag,
                             const CallContext& context) override;
  std::unique_ptr<Work> recv(const Buffer& buffer, int from, int tag,
                             const CallContext& context) override;
  void barrier(const CallContext& context) override { gpu_->barrier(on_stream(context)); }
  std::unique_ptr<Backend> split(int color, int key, std::string_view group_name,
                                 const CallContext& context) override;
  std::shared_ptr<RegisteredMemory> allocate(int64_t bytes, const CallContext& context) override;
  void abort(const AbortRecord& record) noexcept override { gpu_->abort(record); }

 private:
  CallContext on_stream(const CallContext& context) const;
  GpuCopy copy(void* data, int64_t count, Dtype dtype);
  std::vector<GpuCopy> copy_sides(const Buffer& larger, const Buffer& smaller);

  GpuStream stream_;
  std::unique_ptr<Backend> host_;
  std::unique_ptr<Backend> gpu_;
  std::vector<std::weak_ptr<ViewMemory>> memories_;
  int64_t copies_ = 0;
};

}  // namespace lockstep::test
