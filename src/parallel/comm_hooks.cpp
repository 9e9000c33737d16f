#include "parallel/comm_hooks.hpp"

#include <fmt/format.h>

#include <map>
#include <utility>

#include "lockstep/error.hpp"
#include "lockstep/tensor_text.hpp"

namespace lockstep {
namespace {

Work begin_bucket(const Communicator& comm, const torch::Tensor& tensor, int64_t bucket,
                  double weight) {
  return comm.begin_all_reduce(
      tensor, ReduceOp::kMean,
      {.label = fmt::format("bucket {}", bucket), .bucket = bucket, .weight = weight});
}

class MeanWork : public BucketWork {
 public:
  explicit MeanWork(Work work) : work_(std::move(work)) {}
  bool advance() override { return work_.advance(); }
  void wait() override { work_.wait(); }

 private:
  Work work_;
};

// The bucket's values travel in a smaller type.
class CompressedWork : public BucketWork {
 public:
  CompressedWork(Work work, torch::Tensor small, torch::Tensor gradients)
      : work_(std::move(work)), small_(std::move(small)), gradients_(std::move(gradients)) {}

  bool advance() override {
    const bool done = work_.advance();
    if (done) widen();
    return done;
  }
  void wait() override {
    work_.wait();
    widen();
  }

 private:
  void widen() {
    if (widened_) return;
    gradients_.copy_(small_);
    widened_ = true;
  }

  Work work_;
  torch::Tensor small_;
  torch::Tensor gradients_;
  bool widened_ = false;
};

// Memory for the compressed buckets, made when a bucket first travels and kept.
class CompressionMemory {
 public:
  explicit CompressionMemory(torch::ScalarType dtype) : dtype_(dtype) {}

  const torch::Tensor& for_bucket(const Communicator& comm, const GradientBucket& bucket) {
    torch::Tensor& memory = memory_[bucket.index];
    if (!memory.defined() || memory.numel() != bucket.gradients.numel()) {
      memory = comm.allocate(bucket.gradients.numel(), bucket.gradients.options().dtype(dtype_));
    }
    return memory;
  }

 private:
  torch::ScalarType dtype_;
  std::map<int64_t, torch::Tensor> memory_;  // [bucket]
};

}  // namespace

std::unique_ptr<BucketWork> begin_mean(const Communicator& comm, const GradientBucket& bucket,
                                       double weight) {
  return std::make_unique<MeanWork>(begin_bucket(comm, bucket.gradients, bucket.index, weight));
}

CommHook compress_gradients(torch::ScalarType dtype) {
  if (dtype != torch::kBFloat16 && dtype != torch::kFloat16) {
    throw Error(Code::kUsage,
                fmt::format("gradients cannot be compressed to {}", dtype_text(dtype)),
                "use torch::kBFloat16 or torch::kFloat16");
  }
  auto memory = std::make_shared<CompressionMemory>(dtype);
  return [memory](const Communicator& comm, const GradientBucket& bucket, double weight) {
    const torch::Tensor& small = memory->for_bucket(comm, bucket);
    small.copy_(bucket.gradients);
    return std::make_unique<CompressedWork>(begin_bucket(comm, small, bucket.index, weight), small,
                                            bucket.gradients);
  };
}

}  // namespace lockstep
