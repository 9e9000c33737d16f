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

  // Where the GPU has what the host sees at `data`; null if it lies elsewhere.
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

 private:
  void* host_;
  int64_t count_;
  Dtype dtype_;
  CudaStream stream_;
  void* memory_ = nullptr;
  std::byte* data_;
};

namespace {

// What a call wrote comes back when it is done, in the order of the copies.
class ViewWork final : public Backend::Work {
 public:
  using Begin = std::function<std::unique_ptr<Backend::Work>()>;

  ViewWork(std::vector<GpuCopy> copies, const Begin& begin) : copies_(std::move(copies)) {
    around([&] {
      work_ = begin();
      return true;
    });
  }

  bool advance() override {
    if (!around([&] { return work_->advance(); })) return false;
    finish();
    return true;
  }
  void wait() override {
    around([&] {
      work_->wait();
      return true;
    });
    finish();
  }

 private:
  // After a mismatch nothing may have been written; after other errors the stream may wait for a
  // rank that is gone.
  bool around(const std::function<bool()>& call) {
    try {
      return call();
    } catch (const Error& error) {
      if (error.code() == Code::kCallMismatch) bring_back();
      throw;
    }
  }
  void bring_back() const {
    for (const GpuCopy& copy : copies_) copy.bring_back();
  }
  void finish() {
    if (!brought_back_) bring_back();
    brought_back_ = true;
  }

  std::vector<GpuCopy> copies_;
  std::unique_ptr<Backend::Work> work_;  // goes first: what it queued may use the copies
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
  std::vector<GpuCopy> copies;
  copies.push_back(copy(buffer.data, buffer.count, buffer.dtype));
  const Buffer on_gpu = copies[0].buffer();
  return std::make_unique<ViewWork>(
      std::move(copies), [&] { return gpu_->all_reduce(on_gpu, op, weight, on_stream(context)); });
}

std::unique_ptr<Backend::Work> GpuView::broadcast(const Buffer& buffer, int root,
                                                  const CallContext& context) {
  std::vector<GpuCopy> copies;
  copies.push_back(copy(buffer.data, buffer.count, buffer.dtype));
  const Buffer on_gpu = copies[0].buffer();
  return std::make_unique<ViewWork>(
      std::move(copies), [&] { return gpu_->broadcast(on_gpu, root, on_stream(context)); });
}

// The larger side first. Where the smaller one is a part of it, so it is on the GPU.
std::vector<GpuCopy> GpuView::copy_sides(const Buffer& larger, const Buffer& smaller) {
  std::vector<GpuCopy> copies;
  copies.push_back(copy(larger.data, larger.count, larger.dtype));
  const int64_t offset =
      static_cast<std::byte*>(smaller.data) - static_cast<std::byte*>(larger.data);
  if (offset >= 0 && offset < larger.bytes()) {
    std::byte* inside = static_cast<std::byte*>(copies[0].buffer().data) + offset;
    copies.emplace_back(smaller.data, smaller.count, smaller.dtype, inside, 0, stream_.get());
  } else {
    copies.push_back(copy(smaller.data, smaller.count, smaller.dtype));
  }
  return copies;
}

std::unique_ptr<Backend::Work> GpuView::reduce_scatter(const ConstBuffer& input,
                                                       const Buffer& output, ReduceOp op,
                                                       double weight, const CallContext& context) {
  auto copies = copy_sides({const_cast<void*>(input.data), input.count, input.dtype}, output);
  const ConstBuffer from = copies[0].const_buffer();  // one that was written shows
  const Buffer to = copies[1].buffer();
  return std::make_unique<ViewWork>(std::move(copies), [&] {
    return gpu_->reduce_scatter(from, to, op, weight, on_stream(context));
  });
}

std::unique_ptr<Backend::Work> GpuView::all_gather(const ConstBuffer& input, const Buffer& output,
                                                   const CallContext& context) {
  // Arguments that the backend refuses must not be read here either.
  const bool fits = output.count == input.count * size();
  auto copies = copy_sides({output.data, fits ? output.count : 0, output.dtype},
                           {const_cast<void*>(input.data), input.count, input.dtype});
  Buffer to = copies[0].buffer();
  to.count = output.count;
  const ConstBuffer from = copies[1].const_buffer();
  return std::make_unique<ViewWork>(std::move(copies),
                                    [&] { return gpu_->all_gather(from, to, on_stream(context)); });
}

std::unique_ptr<Backend::Work> GpuView::reduce(const Buffer& buffer, int root, ReduceOp op,
                                               double weight, const CallContext& context) {
  std::vector<GpuCopy> copies;
  copies.push_back(copy(buffer.data, buffer.count, buffer.dtype));
  const Buffer on_gpu = copies[0].buffer();
  return std::make_unique<ViewWork>(std::move(copies), [&] {
    return gpu_->reduce(on_gpu, root, op, weight, on_stream(context));
  });
}

std::unique_ptr<Backend::Work> GpuView::exchange(const ConstBuffer& input, const Buffer& output,
                                                 const BlockExchange& blocks,
                                                 const CallContext& context) {
  std::vector<GpuCopy> copies;
  copies.push_back(copy(const_cast<void*>(input.data), input.count, input.dtype));
  copies.push_back(copy(output.data, output.count, output.dtype));
  const ConstBuffer from = copies[0].const_buffer();
  const Buffer to = copies[1].buffer();
  return std::make_unique<ViewWork>(
      std::move(copies), [&] { return gpu_->exchange(from, to, blocks, on_stream(context)); });
}

std::unique_ptr<Backend::Work> GpuView::send(const ConstBuffer& buffer, int to, int tag,
                                             const CallContext& context) {
  std::vector<GpuCopy> copies;
  copies.push_back(copy(const_cast<void*>(buffer.data), buffer.count, buffer.dtype));
  const ConstBuffer on_gpu = copies[0].const_buffer();
  return std::make_unique<ViewWork>(
      std::move(copies), [&] { return gpu_->send(on_gpu, to, tag, on_stream(context)); });
}

std::unique_ptr<Backend::Work> GpuView::recv(const Buffer& buffer, int from, int tag,
                                             const CallContext& context) {
  std::vector<GpuCopy> copies;
  copies.push_back(copy(buffer.data, buffer.count, buffer.dtype));
  const Buffer on_gpu = copies[0].buffer();
  return std::make_unique<ViewWork>(
      std::move(copies), [&] { return gpu_->recv(on_gpu, from, tag, on_stream(context)); });
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
