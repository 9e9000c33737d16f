#pragma once

#include <torch/nn/module.h>
#include <torch/types.h>

#include <cstdint>
#include <string>
#include <vector>

#include "buckets/part_tree.hpp"
#include "device/rng.hpp"
#include "lockstep/communicator.hpp"
#include "lockstep/virtual_shards.hpp"

namespace lockstep {

/// The wrapper whose parts are computed.
class PartOwner {
 public:
  virtual ~PartOwner() = default;

  /// The forward and backward of a part follow; `last`: of this rank's in this step.
  virtual void begin_part(bool last) = 0;

  /// They have ended: takes the part's gradients away from the parameters.
  virtual void take_gradients(const BatchPart& part, double weight) = 0;

  /// All parts have: makes their weighted mean the gradients. Collective.
  virtual void average(double sum_of_weights) = 0;
};

/// The random numbers of parts: they depend on the program's seed, the step and the part, and on
/// nothing that another number of ranks would change. A checkpoint need not save them, since the
/// step goes on from that of Checkpoint::resume().
class PartSeeds {
 public:
  /// Another step begins, or, if it `continues`, another micro-step of the same one.
  void begin_step(bool continues);

  uint64_t seed_of(int64_t part) const;

 private:
  int64_t steps_ = 0;
  int64_t micro_step_ = 0;
};

/// Guard: a thread computes on a fixed number of threads. Libraries may divide a sum among their
/// threads, and then its bits depend on how many there are.
class FixedThreads {
 public:
  explicit FixedThreads(int threads);
  ~FixedThreads();
  FixedThreads(const FixedThreads&) = delete;
  FixedThreads& operator=(const FixedThreads&) = delete;

 private:
  int before_;
};

/// Buffers such as running means while the parts of a step are computed: each part begins with
/// those that the step began with, and afterwards they are those of this rank's first part. So
/// rank 0, whose buffers count, has those of part 0, as it would with a rank for each part.
class PartBuffers {
 public:
  explicit PartBuffers(const torch::nn::Module& module);

  /// Called before each forward of a part, in any order.
  void begin_forward() const { put(at_begin_); }

  /// Keeps what the first part has made of them: called before the next one begins.
  void end_forward(int64_t local_index);

  /// Called after the last part.
  void finish() const { put(after_first_); }

 private:
  void put(const std::vector<torch::Tensor>& values) const;
  std::vector<torch::Tensor> copies() const;

  std::vector<torch::Tensor> buffers_;
  std::vector<torch::Tensor> at_begin_;
  std::vector<torch::Tensor> after_first_;
};

/// Refuses (kUsage) a number of threads that cannot compute a part.
void require_part_threads(int threads);

/// Refuses (kUsage) a module whose results depend on how many ranks there are, whatever the order
/// of sums: with sparse gradients, with layers that compute over all ranks' rows, or with buffers
/// that are each rank's own.
void require_same_in_parts(const torch::nn::Module& module, bool shares_buffers,
                           const std::string& wrapper);

/// The remedy for a NoSync inside a part.
inline constexpr const char* kNoSyncInParts =
    "put it around backward_parts(): within a part gradients are accumulated anyway";

/// Computes the parts of a step one after the other: the same for every wrapper that has virtual
/// shards.
class VirtualShards {
 public:
  /// `threads` compute each part. Refuses (kUsage) what the ranks cannot divide.
  VirtualShards(int64_t parts, int threads, const Communicator& comm, std::string wrapper);

  const PartTree& tree() const { return tree_; }
  BatchPart part(int64_t local_index) const;

  /// Forward and backward of this rank's parts. `continues`: the gradients are added to those of
  /// another step. Returns the weighted mean of all parts' losses. Collective.
  torch::Tensor step(const torch::nn::Module& module, PartOwner& owner, const PartLoss& loss_of,
                     const PartStep& how, bool continues);

  /// Sets the weight of the part that is computed now.
  void set_weight(double weight);

  /// What ranks have exchanged about their parts.
  struct Sums {
    double weight = 0;  ///< the sum over all parts
    double loss = 0;    ///< the weighted sum over all parts
  };

  /// Exchanges the weights and losses of this rank's parts, and the rows that each of them has (0:
  /// unknown). `seed` is that of part 0. Refuses ranks with other seeds or in other steps, and with
  /// other rows. Collective.
  static Sums exchange(const PartTree& tree, const Communicator& comm, uint64_t seed, int64_t rows,
                       const std::vector<double>& weights, const std::vector<double>& losses);

  /// Refuses what happens outside step(), where sums would depend on the number of ranks.
  void require_inside(const std::string& what) const;
  /// Refuses what must not happen inside.
  void require_outside(const std::string& what, const std::string& help) const;

 private:
  const PartTree tree_;
  const Communicator comm_;
  const int threads_;
  const std::string wrapper_;
  PartSeeds seeds_;
  bool inside_ = false;
  double weight_ = 1;
};

}  // namespace lockstep
