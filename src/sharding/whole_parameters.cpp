#include "sharding/whole_parameters.hpp"

#include <torch/torch.h>

#include <utility>

#include "base/mutation.hpp"

namespace lockstep {
namespace {

// A rank's part of a unit on the CPU of a model on a GPU: copied there and back.
torch::Tensor offloaded_shard(const UnitPlan& unit) {
  return torch::zeros({unit.shard_elements}, unit.options.device(torch::kCPU).pinned_memory(true));
}

bool offloads(const UnitPlan& unit, const ShardOptions& options) {
  return options.offload_optimizer && unit.trained && !unit.options.device().is_cpu();
}

// Note [Storages without memory] Tensors refer to their storage, and the storage to its memory. So
// the memory can be freed and made again while the module, views of its parameters and autograd's
// saved tensors go on referring to the storage. Here two storages change memories.
void exchange_memory(const torch::Tensor& a, const torch::Tensor& b) {
  auto* first = a.storage().unsafeGetStorageImpl();
  auto* second = b.storage().unsafeGetStorageImpl();
  auto memory = second->set_data_ptr(c10::DataPtr(nullptr, b.device()));
  second->set_data_ptr(first->set_data_ptr(std::move(memory)));
}

// Stages 1 and 2: every rank has the whole parameters all the time. Its shard is a part of them, so
// gathering sends them in place.
class ResidentParameters final : public WholeParameters {
 public:
  ResidentParameters(const UnitPlan& unit, const Communicator& comm, bool offloaded)
      : comm_(comm),
        whole_(comm.allocate(unit.elements, unit.options)),
        own_(part_with_own_storage(whole_, comm.rank() * unit.shard_elements, unit.shard_elements)),
        shard_(offloaded ? offloaded_shard(unit) : own_) {}

  const torch::Tensor& whole() const override { return whole_; }
  const torch::Tensor& shard() const override { return shard_; }

  Work begin_gather(const CallOptions& call) override {
    const torch::NoGradGuard no_grad;
    if (!shard_.is_same(own_)) own_.copy_(shard_);
    return comm_.size() == 1 ? Work() : comm_.begin_all_gather(whole_, own_, call);
  }

  void scatter() override {
    const torch::NoGradGuard no_grad;
    if (!shard_.is_same(own_)) shard_.copy_(own_);
  }

  bool overwrites_shard() const override { return !shard_.is_same(own_); }

 private:
  Communicator comm_;
  torch::Tensor whole_;
  torch::Tensor own_;  // this rank's part of it
  torch::Tensor shard_;
};

// Stage 3: a rank keeps its shard, and has the whole parameters while they are used.
class TransientParameters final : public WholeParameters {
 public:
  TransientParameters(const UnitPlan& unit, const Communicator& comm, bool offloaded)
      : comm_(comm),
        whole_(torch::empty({unit.elements}, unit.options)),
        shard_(offloaded ? offloaded_shard(unit)
                         : comm.allocate(unit.shard_elements, unit.options)) {}

  const torch::Tensor& whole() const override { return whole_; }
  const torch::Tensor& shard() const override { return shard_; }
  bool has_memory() const override { return has_memory_; }

  void materialize() override {
    if (has_memory_) return;
    const torch::NoGradGuard no_grad;
    const torch::Tensor fresh = torch::empty({whole_.numel()}, whole_.options());
    exchange_memory(whole_, fresh);
    has_memory_ = true;
  }

  Work begin_gather(const CallOptions& call) override {
    const torch::NoGradGuard no_grad;
    materialize();
    return comm_.begin_all_gather(whole_, shard_.to(whole_.device()), call);
  }

  void scatter() override {
    const torch::NoGradGuard no_grad;
    shard_.copy_(whole_.narrow(0, comm_.rank() * shard_.numel(), shard_.numel()));
  }

  bool overwrites_shard() const override { return true; }

  void release() override {
    if (!std::exchange(has_memory_, false)) return;
    const torch::Tensor nothing = torch::empty({0}, whole_.options());
    exchange_memory(whole_, nothing);
  }

 private:
  Communicator comm_;
  torch::Tensor whole_;
  torch::Tensor shard_;
  bool has_memory_ = true;
};

// On one host: all ranks use the same memory, and each writes its own part of it. There is nothing
// to gather; who reads after a write must have passed a barrier.
class SharedParameters final : public WholeParameters {
 public:
  SharedParameters(const UnitPlan& unit, const Communicator& comm)
      : rank_(comm.rank()),
        whole_(comm.allocate_shared(unit.elements, unit.options)),
        shard_(part_with_own_storage(whole_, comm.rank() * unit.shard_elements,
                                     unit.shard_elements)) {}

  const torch::Tensor& whole() const override { return whole_; }
  const torch::Tensor& shard() const override { return shard_; }
  Work begin_gather(const CallOptions&) override { return {}; }
  bool is_shared() const override { return true; }

  void copy_for_changes() override {
    if (is_planted(Mutation::kGatheredChangeRepeated)) return;
    const torch::NoGradGuard no_grad;
    common_ = whole_.clone();
    exchange_memory(whole_, common_);
  }

  void scatter() override {
    if (!common_.defined()) return;
    const torch::NoGradGuard no_grad;
    const torch::Tensor shared = std::exchange(common_, {});
    exchange_memory(whole_, shared);  // now `shared` has this rank's copy
    shard_.copy_(shared.narrow(0, rank_ * shard_.numel(), shard_.numel()));
  }

  bool overwrites_shard() const override { return common_.defined(); }

 private:
  const int64_t rank_;
  torch::Tensor common_;  // has the memory that all ranks see, while whole_ has a copy
  torch::Tensor whole_;
  torch::Tensor shard_;
};

}  // namespace

torch::Tensor part_with_own_storage(const torch::Tensor& flat, int64_t begin, int64_t count) {
  char* address =
      static_cast<char*>(flat.data_ptr()) + begin * static_cast<int64_t>(flat.element_size());
  return torch::from_blob(
      address, {count}, [flat](void*) {}, flat.options());
}

std::unique_ptr<WholeParameters> make_whole_parameters(const UnitPlan& unit,
                                                       const Communicator& comm,
                                                       const ShardOptions& options) {
  const bool offloaded = offloads(unit, options);
  const bool on_cpu = unit.options.device().is_cpu();
  if (options.share_on_host && comm.size() > 1 && on_cpu && comm.can_share()) {
    return std::make_unique<SharedParameters>(unit, comm);
  }
  if (options.stage == ShardStage::kParameters && comm.size() > 1) {
    return std::make_unique<TransientParameters>(unit, comm, offloaded);
  }
  return std::make_unique<ResidentParameters>(unit, comm, offloaded);
}

}  // namespace lockstep
