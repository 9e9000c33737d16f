#include "parallel/comm_hooks.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/error.hpp"
#include "lockstep/tensor_text.hpp"

namespace lockstep {
namespace {

// Ranks compare labels: those that disagree about when to synchronise stop here, instead of adding
// gradients of different micro-steps.
std::string label_of(const GradientBucket& bucket) {
  if (bucket.micro_steps == 1) return fmt::format("bucket {}", bucket.index);
  return fmt::format("bucket {} of {} micro-steps", bucket.index, bucket.micro_steps);
}

// `values` are those of the bucket, or stand in for them.
Work begin_bucket(const Communicator& comm, const torch::Tensor& values,
                  const GradientBucket& bucket, double weight) {
  return comm.begin_all_reduce(
      values, ReduceOp::kMean,
      {.label = label_of(bucket), .bucket = bucket.index, .weight = weight});
}

class MeanWork : public BucketWork {
 public:
  explicit MeanWork(Work work) : work_(std::move(work)) {}
  bool advance() override { return work_.advance(); }
  void wait() override { work_.wait(); }
  std::optional<Moment> arrived() const override { return work_.arrived(); }

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
  std::optional<Moment> arrived() const override { return work_.arrived(); }

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

// Memory for the compressed buckets, made when a bucket first travels and kept as long as that
// bucket's. One hook may serve several models, whose buckets travel at the same time.
class CompressionMemory {
 public:
  explicit CompressionMemory(torch::ScalarType dtype) : dtype_(dtype) {}

  // Whether memory must be made, which is collective, depends on what all ranks do alike. So a
  // model is told by its gradients' storage, which as long as it is remembered here is no other's.
  torch::Tensor for_bucket(const Communicator& comm, const GradientBucket& bucket) {
    const auto gradients = bucket.gradients.storage().getWeakStorageImpl();
    std::erase_if(entries_, [](const Entry& entry) { return entry.gradients.expired(); });
    auto entry = std::find_if(entries_.begin(), entries_.end(), [&](const Entry& candidate) {
      return candidate.gradients == gradients && candidate.bucket == bucket.index;
    });
    if (entry == entries_.end()) {
      entry = entries_.insert(entry, Entry{gradients, bucket.index, {}});
    }
    if (!entry->memory.defined() || entry->memory.numel() != bucket.gradients.numel()) {
      entry->memory =
          comm.allocate(bucket.gradients.numel(), bucket.gradients.options().dtype(dtype_));
    }
    return entry->memory;
  }

 private:
  struct Entry {
    c10::weak_intrusive_ptr<c10::StorageImpl> gradients;
    int64_t bucket;
    torch::Tensor memory;
  };

  torch::ScalarType dtype_;
  std::vector<Entry> entries_;
};

}  // namespace

std::unique_ptr<BucketWork> begin_mean(const Communicator& comm, const GradientBucket& bucket,
                                       double weight) {
  return std::make_unique<MeanWork>(begin_bucket(comm, bucket.gradients, bucket, weight));
}

CommHook compress_gradients(torch::ScalarType dtype) {
  if (dtype != torch::kBFloat16 && dtype != torch::kFloat16) {
    throw Error(Code::kUsage,
                fmt::format("gradients cannot be compressed to {}", dtype_text(dtype)),
                "use torch::kBFloat16 or torch::kFloat16");
  }
  auto memory = std::make_shared<CompressionMemory>(dtype);
  return [memory](const Communicator& comm, const GradientBucket& bucket, double weight) {
    const torch::Tensor small = memory->for_bucket(comm, bucket);
    small.copy_(bucket.gradients);
    return std::make_unique<CompressedWork>(begin_bucket(comm, small, bucket, weight), small,
                                            bucket.gradients);
  };
}

}  // namespace lockstep
