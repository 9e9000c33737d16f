#include "backend_gpu_view.hpp"

#include <cuda_runtime_api.h>

#include <cstdlib>
#include <cstring>
#include <functional>
#include <utility>

#include "lockstep/error.hpp"

namespace lockstep::test {
namespace {

constexpr int64_t kPage = 4096;

void copy_and_wait(void* to, const void* from, int64_t bytes, CudaStream stream) {
  gpu_copy(to, from, bytes, stream);
  check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
}

}  // namespace

// Registered memory of the GPU and its picture on the host.
class ViewMemory final : public RegisteredMemory {
 public:
  ViewMemory(std::shared_ptr<RegisteredMemory> gpu, CudaStream stream) : gpu_(std::move(gpu)) {
    const int64_t rounded = (gpu_->bytes() / kPage + 1) * kPage;
    picture_ = static_cast<std::byte*>(std::aligned_alloc(kPage, static_cast<size_t>(rounded)));
    copy_and_wait(picture_, gpu_->data(), gpu_->bytes(), stream);
  }
  ~ViewMemory() override { std::free(picture_); }
  ViewMemory(const ViewMemory&) = delete;
  ViewMemory& operator=(const ViewMemory&) = delete;

  void* data() const override { return picture_; }
  int64_t bytes() const override { return gpu_->bytes(); }

  // Where the GPU has what the host sees at `data`; null where it lies elsewhere.
  std::byte* on_gpu(const void* data) const {
    const auto* at = static_cast<const std::byte*>(data);
    if (std::less<>()(at, picture_) || !std::less<>()(at, picture_ + bytes())) return nullptr;
    return static_cast<std::byte*>(gpu_->data()) + (at - picture_);
  }

 private:
  std::shared_ptr<RegisteredMemory> gpu_;
  std::byte* picture_;
};

// A host's buffer on the GPU: in registered memory where it is a picture of that, else in memory
// made for one call, which is freed in the order of the stream.
class GpuCopy {
 public:
  GpuCopy(void* host, int64_t count, Dtype dtype, std::byte* registered, int64_t shift,
          CudaStream stream)
      : host_(host), count_(count), dtype_(dtype), stream_(stream), data_(registered) {
    if (data_ == nullptr) {
      check_cuda(cudaMallocAsync(&memory_, static_cast<size_t>(bytes() + shift + 1), stream),
                 "cudaMallocAsync");
      data_ = static_cast<std::byte*>(memory_) + shift;
    }
    gpu_copy(data_, host_, bytes(), stream_);
  }
  ~GpuCopy() {
    if (memory_ != nullptr) (void)cudaFreeAsync(memory_, stream_);
  }
  GpuCopy(GpuCopy&& other) noexcept
      : host_(other.host_),
        count_(other.count_),
        dtype_(other.dtype_),
        stream_(other.stream_),
        memory_(std::exchange(other.memory_, nullptr)),
        data_(other.data_) {}

  int64_t bytes() const { return count_ * dtype_bytes(dtype_); }
  Buffer buffer() const { return {data_, count_, dtype_}; }
  ConstBuffer const_buffer() const { return {data_, count_, dtype_}; }
  void bring_back() const { copy_and_wait(host_, data_, bytes(), stream_); }

  // Makes a call, and brings back what it wrote. After a mismatch too: that must be nothing. After
  // other errors the stream may wait for a rank that is gone.
  template <class Action>
  auto around(Action&& call) const {
    try {
      return call();
    } catch (const Error& error) {
      if (error.code() == Code::kCallMismatch) bring_back();
      throw;
    }
  }

 private:
  void* host_;
  int64_t count_;
  Dtype dtype_;
  CudaStream stream_;
  void* memory_ = nullptr;
  std::byte* data_;
};

namespace {

class ViewWork final : public Backend::Work {
 public:
  ViewWork(GpuCopy copy, std::unique_ptr<Backend::Work> work)
      : copy_(std::move(copy)), work_(std::move(work)) {}

  bool advance() override {
    if (!copy_.around([&] { return work_->advance(); })) return false;
    finish();
    return true;
  }
  void wait() override {
    copy_.around([&] { work_->wait(); });
    finish();
  }

 private:
  void finish() {
    if (!brought_back_) copy_.bring_back();
    brought_back_ = true;
  }

  GpuCopy copy_;
  std::unique_ptr<Backend::Work> work_;  // goes first: what it queued may use the copy
  bool brought_back_ = false;
};

}  // namespace

GpuView::GpuView(std::unique_ptr<Backend> host, std::unique_ptr<Backend> gpu)
    : host_(std::move(host)), gpu_(std::move(gpu)) {}

// A stream that waits for a rank that died is not waited for.
GpuView::~GpuView() {
  gpu_.reset();
  if (cudaStreamQuery(stream_.get()) != cudaSuccess) stream_.leave_behind();
}

CallContext GpuView::on_stream(const CallContext& context) const {
  CallContext with_stream = context;
  with_stream.stream = stream_.get();
  return with_stream;
}

// Private memory begins at different offsets within 16 bytes, as tensors' views do.
GpuCopy GpuView::copy(void* data, int64_t count, Dtype dtype) {
  std::byte* registered = nullptr;
  for (const auto& memory : memories_) {
    const auto alive = memory.lock();
    if (alive && registered == nullptr) registered = alive->on_gpu(data);
  }
  const int64_t shift = (copies_++ + rank()) % 4 * dtype_bytes(dtype);
  return {data, count, dtype, registered, shift, stream_.get()};
}

std::unique_ptr<Backend::Work> GpuView::all_reduce(const Buffer& buffer, ReduceOp op, double weight,
                                                   const CallContext& context) {
  GpuCopy on_gpu = copy(buffer.data, buffer.count, buffer.dtype);
  auto work = on_gpu.around(
      [&] { return gpu_->all_reduce(on_gpu.buffer(), op, weight, on_stream(context)); });
  return std::make_unique<ViewWork>(std::move(on_gpu), std::move(work));
}

void GpuView::broadcast(const Buffer& buffer, int root, const CallContext& context) {
  const GpuCopy on_gpu = copy(buffer.data, buffer.count, buffer.dtype);
  on_gpu.around([&] { gpu_->broadcast(on_gpu.buffer(), root, on_stream(context)); });
  on_gpu.bring_back();
}

void GpuView::reduce_scatter(const ConstBuffer& input, const Buffer& output, ReduceOp op,
                             double weight, const CallContext& context) {
  const GpuCopy from = copy(const_cast<void*>(input.data), input.count, input.dtype);
  const GpuCopy to = copy(output.data, output.count, output.dtype);
  to.around([&] {
    gpu_->reduce_scatter(from.const_buffer(), to.buffer(), op, weight, on_stream(context));
  });
  to.bring_back();
  from.bring_back();  // an input that was written shows
}

void GpuView::all_gather(const ConstBuffer& input, const Buffer& output,
                         const CallContext& context) {
  // Arguments that the backend refuses must not be read here either.
  const bool fits = output.count == input.count * size();
  const GpuCopy from = copy(const_cast<void*>(input.data), input.count, input.dtype);
  const GpuCopy to = copy(output.data, fits ? output.count : 0, output.dtype);
  to.around([&] {
    Buffer buffer = to.buffer();
    buffer.count = output.count;
    gpu_->all_gather(from.const_buffer(), buffer, on_stream(context));
  });
  to.bring_back();
}

void GpuView::send(const ConstBuffer& buffer, int to, int tag, const CallContext& context) {
  const GpuCopy on_gpu = copy(const_cast<void*>(buffer.data), buffer.count, buffer.dtype);
  gpu_->send(on_gpu.const_buffer(), to, tag, on_stream(context));
}

void GpuView::recv(const Buffer& buffer, int from, int tag, const CallContext& context) {
  const GpuCopy on_gpu = copy(buffer.data, buffer.count, buffer.dtype);
  on_gpu.around([&] { gpu_->recv(on_gpu.buffer(), from, tag, on_stream(context)); });
  on_gpu.bring_back();
}

std::unique_ptr<Backend> GpuView::split(int color, int key, std::string_view group_name,
                                        const CallContext& context) {
  return std::make_unique<GpuView>(nullptr,
                                   gpu_->split(color, key, group_name, on_stream(context)));
}

std::shared_ptr<RegisteredMemory> GpuView::allocate(int64_t bytes, const CallContext& context) {
  auto memory =
      std::make_shared<ViewMemory>(gpu_->allocate(bytes, on_stream(context)), stream_.get());
  memories_.push_back(memory);
  return memory;
}

}  // namespace lockstep::test
