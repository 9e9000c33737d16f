#pragma once

#include <ATen/cuda/CUDAEvent.h>
#include <torch/types.h>

#include <cstdint>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "device/cuda/graph_memory.hpp"
#include "device/own_stream.hpp"
#include "lockstep/captured_step.hpp"
#include "lockstep/memory.hpp"
#include "train/cuda/graph_capture.hpp"

namespace lockstep::cuda {

/// A step on one GPU: runs as it is while it warms up, is captured, and replayed from then on; for
/// each shape of its inputs on its own.
///
/// Note [One stream]: libtorch cannot capture the default stream, where a program works unless told
/// otherwise. A step of such a program runs on a stream of its own from its first call on, after
/// what the caller has queued, and the caller goes on after it. Warm-up must be there too: autograd
/// accumulates a gradient on the stream on which its parameter was first used.
class CapturedGraphs {
 public:
  using Function = CapturedStep::Function;
  using Tensors = std::vector<torch::Tensor>;

  CapturedGraphs(torch::Device device, const CaptureOptions& options);
  ~CapturedGraphs();
  CapturedGraphs(const CapturedGraphs&) = delete;
  CapturedGraphs& operator=(const CapturedGraphs&) = delete;

  torch::Device device() const { return stream_.device(); }

  /// The step's result, without its history, as a tensor of the caller's.
  torch::Tensor call(const Function& step, const Tensors& inputs);

  /// Of the last call, which has replayed.
  const Tensors& inputs() const { return shapes_.front().inputs; }
  CaptureStats stats() const;
  const std::string& why_not() const { return why_not_; }  ///< of the last call; "": it replayed

 private:
  struct Signature {
    std::vector<std::vector<int64_t>> sizes;
    std::vector<torch::ScalarType> dtypes;
    std::vector<torch::Device> devices;
    bool operator==(const Signature&) const = default;
  };

  // Inputs of one signature.
  struct Shape {
    Signature signature;
    int64_t calls = 0;  // while it was not captured
    Tensors inputs = {};
    torch::Tensor output = {};  // undefined where the step gives nothing back
    std::optional<StepRecording> recording = {};
  };

  class OnStream;

  static Signature signature_of(const Tensors& inputs);
  Shape& shape_of(const Tensors& inputs);
  void forget_oldest();
  bool warming_up(const Shape& shape) const;
  torch::Tensor run(const Function& step, const Tensors& inputs, const std::string& why);
  void capture(const Function& step, const Tensors& inputs, Shape& shape);
  void record(const Function& step, Shape& shape);
  void replay(const Tensors& inputs, Shape& shape);
  void require_on_gpu(const Tensors& inputs);
  void give_up(const std::string& why);
  bool any_captured() const;
  void clear_leftovers(const GraphMemory::Blocks& computed) const;

  const CaptureOptions options_;
  std::optional<OwnStream> own_stream_;  // of a step that is called on the default stream
  const c10::cuda::CUDAStream stream_;
  MemoryAccount* account_ = nullptr;  // charged for a stream of the step's own; null: none is
  at::cuda::CUDAEvent before_;        // the caller's stream got here
  at::cuda::CUDAEvent after_;         // the step's did
  at::cuda::MempoolId_t pool_{0, 0};
  std::optional<GraphMemory> memory_;  // of the pool
  std::list<Shape> shapes_;            // the last used first; gone before their memory
  bool failed_ = false;                // a capture has: every call runs the step as it is
  std::string why_not_;
  CaptureStats stats_;
};

}  // namespace lockstep::cuda
