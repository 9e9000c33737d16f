#include "train/cuda/captured_graphs.hpp"

#include <ATen/record_function.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <exception>
#include <mutex>
#include <string_view>
#include <utility>

#include "device/capture.hpp"
#include "device/cuda/support.hpp"
#include "lockstep/error.hpp"

namespace lockstep::cuda {
namespace {

std::mutex operator_mutex;    // guards the next two: backward runs in threads of its own
std::string failed_operator;  // the outermost operator that an exception passed through
std::string latest_operator;  // the one that began last

std::unique_ptr<at::ObserverContext> note_begin(const at::RecordFunction& call) {
  if (Capture::current() != nullptr) {
    const std::lock_guard lock(operator_mutex);
    latest_operator = call.name();
  }
  return nullptr;
}

// Called from the innermost operator outwards, so the last one noted is the one the step called.
void note_end(const at::RecordFunction& call, at::ObserverContext*) {
  if (std::uncaught_exceptions() == 0 || Capture::current() == nullptr) return;
  const std::lock_guard lock(operator_mutex);
  failed_operator = call.name();
}

struct Reason {
  std::string_view names;  // of operators, between spaces
  std::string_view what;
  std::string_view remedy;
};

constexpr std::array kReasons = {
    Reason{" aten::item aten::_local_scalar_dense aten::is_nonzero aten::equal aten::allclose ",
           "waits for the GPU, to read a value",
           "return the tensor from the step and read it afterwards"},
    Reason{" aten::nonzero aten::masked_select aten::argwhere aten::_unique2 aten::unique_dim "
           "aten::unique_consecutive aten::index aten::repeat_interleave ",
           "has a result whose size depends on values", "use a mask of a fixed size instead"},
    Reason{" aten::to aten::_to_copy aten::copy_ aten::cpu aten::pin_memory ",
           "copies between the GPU and the host",
           "give the step tensors that are on the GPU, and copy its result afterwards"}};

Reason reason_of(const std::string& name) {
  const auto* found = std::find_if(kReasons.begin(), kReasons.end(), [&](const Reason& reason) {
    return reason.names.find(" " + name + " ") != std::string_view::npos;
  });
  if (found != kReasons.end()) return *found;
  return {"", "cannot be recorded into a CUDA graph", "leave it out of the step"};
}

std::string first_line(const std::string& text) {
  return text.substr(0, text.find('\n'));
}

// Guard: knows which of libtorch's operators a captured step was running when it failed, in any
// thread. A process has one at a time, like captures.
class OperatorWatch {
 public:
  OperatorWatch();
  ~OperatorWatch();
  OperatorWatch(const OperatorWatch&) = delete;
  OperatorWatch& operator=(const OperatorWatch&) = delete;

  // Names what cannot be captured, and what to do instead. `cause` is what the step threw.
  Error error(const std::exception& cause) const;

 private:
  at::CallbackHandle handle_;
};

OperatorWatch::OperatorWatch() {
  {
    const std::lock_guard lock(operator_mutex);
    failed_operator.clear();
    latest_operator.clear();
  }
  handle_ = at::addGlobalCallback(
      at::RecordFunctionCallback(note_begin, note_end).scopes({at::RecordScope::FUNCTION}));
}

OperatorWatch::~OperatorWatch() {
  at::removeCallback(handle_);
}

Error OperatorWatch::error(const std::exception& cause) const {
  const std::lock_guard lock(operator_mutex);
  const std::string note = first_line(describe(cause));
  if (failed_operator.empty() && latest_operator.empty()) {
    return {Code::kCapture, "the step cannot be captured", "run it without capture", {note}};
  }
  if (failed_operator.empty()) {
    return {Code::kCapture,
            fmt::format("the step cannot be captured: something after {} cannot be recorded into a "
                        "CUDA graph",
                        latest_operator),
            "leave out of the step what waits for the GPU, or run it without capture",
            {note}};
  }
  const Reason reason = reason_of(failed_operator);
  return {Code::kCapture,
          fmt::format("{} in the step {}", failed_operator, reason.what),
          fmt::format("{}, or run the step without capture", reason.remedy),
          {note}};
}

// See Note [One stream].
c10::cuda::CUDAStream stream_for(torch::Device device, std::optional<OwnStream>& own) {
  const auto caller = c10::cuda::getCurrentCUDAStream(device.index());
  if (caller != c10::cuda::getDefaultCUDAStream(device.index())) return caller;
  own.emplace(device);
  return c10::cuda::CUDAStream(own->get());
}

// One step is captured at a time: libtorch's generators record for one graph only.
std::mutex& capturing() {
  static std::mutex mutex;
  return mutex;
}

torch::Tensor without_history(const torch::Tensor& result) {
  return result.defined() ? result.detach() : result;
}

// A copy that belongs to the caller, made on the caller's stream.
torch::Tensor copy_of(const torch::Tensor& result) {
  return result.defined() ? result.clone() : result;
}

// Tells errors of a capture from errors of the step itself. Those that end the capture show in its
// state. libtorch's own checks ("Cannot copy between CPU and CUDA tensors during CUDA graph
// capture") do not, and have no code: their text is all there is.
bool is_about_capture(const std::exception& error) {
  if (dynamic_cast<const Error*>(&error) != nullptr) return false;
  return describe(error).find("captur") != std::string::npos;
}

}  // namespace

// Guard: the thread works on the step's stream, after the work of the caller's stream, which then
// continues after the step's.
class CapturedGraphs::OnStream {
 public:
  explicit OnStream(CapturedGraphs& graphs)
      : graphs_(graphs), caller_(c10::cuda::getCurrentCUDAStream(graphs.device().index())) {
    if (caller_ != graphs_.stream_) {
      graphs_.before_.record(caller_);
      graphs_.before_.block(graphs_.stream_);
    }
    guard_.emplace(graphs_.stream_);
  }
  ~OnStream() {
    guard_.reset();
    if (caller_ == graphs_.stream_) return;
    try {
      graphs_.after_.record(graphs_.stream_);
      graphs_.after_.block(caller_);
    } catch (const std::exception&) {
      // A GPU that has failed reports it at its next use.
    }
  }
  OnStream(const OnStream&) = delete;
  OnStream& operator=(const OnStream&) = delete;

 private:
  CapturedGraphs& graphs_;
  c10::cuda::CUDAStream caller_;
  std::optional<c10::cuda::CUDAStreamGuard> guard_;
};

CapturedGraphs::CapturedGraphs(torch::Device device, const CaptureOptions& options)
    : options_(options), stream_(stream_for(device, own_stream_)) {
  const auto caller = c10::cuda::getCurrentCUDAStream(device.index());
  if (caller == stream_) return;
  account_ = watching_account(caller.unwrap());
  if (account_ != nullptr) watch_memory(stream_.unwrap(), *account_);
}

// Graphs that still run must not lose their memory.
CapturedGraphs::~CapturedGraphs() {
  (void)cudaStreamSynchronize(stream_.stream());
  shapes_.clear();
  memory_.reset();
  if (account_ != nullptr) unwatch_memory(stream_.unwrap(), *account_);
}

CapturedGraphs::Signature CapturedGraphs::signature_of(const Tensors& inputs) {
  Signature signature;
  for (const auto& input : inputs) {
    signature.sizes.push_back(input.sizes().vec());
    signature.dtypes.push_back(input.scalar_type());
    signature.devices.push_back(input.device());
  }
  return signature;
}

CapturedGraphs::Shape& CapturedGraphs::shape_of(const Tensors& inputs) {
  Signature signature = signature_of(inputs);
  const auto known = std::find_if(shapes_.begin(), shapes_.end(),
                                  [&](const Shape& shape) { return shape.signature == signature; });
  if (known != shapes_.end()) {
    shapes_.splice(shapes_.begin(), shapes_, known);
  } else {
    if (shapes_.size() >= static_cast<size_t>(std::max(1, options_.max_shapes))) forget_oldest();
    shapes_.push_front({.signature = std::move(signature)});
  }
  return shapes_.front();
}

void CapturedGraphs::forget_oldest() {
  if (shapes_.back().recording) C10_CUDA_CHECK(cudaStreamSynchronize(stream_.stream()));
  shapes_.pop_back();
}

// A new shape needs only one call once libraries and allocators are warm. Without any, every replay
// would make again what an optimizer makes in its first step.
bool CapturedGraphs::warming_up(const Shape& shape) const {
  return shape.calls < (stats_.captures == 0 ? std::max<int64_t>(1, options_.warmup) : 1);
}

bool CapturedGraphs::any_captured() const {
  return std::any_of(shapes_.begin(), shapes_.end(),
                     [](const Shape& shape) { return shape.recording.has_value(); });
}

torch::Tensor CapturedGraphs::call(const Function& step, const Tensors& inputs) {
  if (Capture::current() != nullptr) {
    why_not_ = "inside another captured step";
    return without_history(step(inputs));
  }
  if (failed_) return run(step, inputs, why_not_);
  Shape& shape = shape_of(inputs);
  if (!shape.recording && warming_up(shape)) {
    shape.calls += 1;
    return run(step, inputs, "warming up");
  }
  {
    const OnStream on(*this);
    if (!shape.recording) capture(step, inputs, shape);
    replay(inputs, shape);
  }
  why_not_.clear();
  return copy_of(shape.output);
}

torch::Tensor CapturedGraphs::run(const Function& step, const Tensors& inputs,
                                  const std::string& why) {
  why_not_ = why;
  torch::Tensor result;
  {
    const OnStream on(*this);
    result = without_history(step(inputs));
  }
  return copy_of(result);
}

void CapturedGraphs::capture(const Function& step, const Tensors& inputs, Shape& shape) {
  const std::lock_guard one_at_a_time(capturing());
  require_on_gpu(inputs);
  if (!any_captured()) {  // libtorch cannot reuse a pool that no graph uses any more
    memory_.reset();
    memory_.emplace(stream_.unwrap());
    pool_ = at::cuda::graph_pool_handle();
  }
  shape.inputs.clear();  // of an attempt that failed before it recorded
  for (const auto& input : inputs) {
    shape.inputs.push_back(torch::empty_like(input.detach()).requires_grad_(input.requires_grad()));
  }
  // What warm-up left in the cache would stay unused: the graphs have memory of their own.
  C10_CUDA_CHECK(cudaStreamSynchronize(stream_.stream()));
  c10::cuda::CUDACachingAllocator::emptyCache();
  const PauseSampling no_queries;
  const auto of_other_shapes = memory_->live_blocks();
  try {
    record(step, shape);
  } catch (const std::exception& error) {
    shape.inputs.clear();
    shape.output.reset();
    clear_leftovers(of_other_shapes);
    const auto* known = dynamic_cast<const Error*>(&error);
    if (known != nullptr && known->code() == Code::kCapture) give_up(known->message());
    throw;
  }
  stats_.captures += 1;
}

// A replay would read the host's memory as it was at capture, or as it is by then.
void CapturedGraphs::require_on_gpu(const Tensors& inputs) {
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (inputs[i].device() == device()) continue;
    const std::string message =
        "input " + std::to_string(i) + " of the step is on " + inputs[i].device().str();
    give_up(message);
    throw Error(Code::kCapture, message, "move all inputs to " + device().str() + " first");
  }
}

// The error is thrown once; later calls run the function directly.
void CapturedGraphs::give_up(const std::string& why) {
  failed_ = true;
  why_not_ = "it cannot be captured: " + why;
  (void)cudaStreamSynchronize(stream_.stream());  // graphs of other shapes may still run
  shapes_.clear();
  memory_.reset();
}

void CapturedGraphs::record(const Function& step, Shape& shape) {
  const GraphMemory::Recording counted(*memory_);
  const OperatorWatch operators;
  GraphCapture capture(stream_, pool_);
  try {
    shape.output = without_history(step(shape.inputs));
    shape.recording = capture.finish();
  } catch (const std::exception& error) {
    const bool capture_failed = capture.is_invalid() || is_about_capture(error);
    capture.drop();
    if (capture_failed) throw operators.error(error);
    throw;
  }
}

// Clears tensors that outlive a failed capture, such as gradients: they were never computed.
void CapturedGraphs::clear_leftovers(const GraphMemory::Blocks& computed) const {
  for (const auto& block : memory_->live_blocks()) {
    if (std::find(computed.begin(), computed.end(), block) != computed.end()) continue;
    const auto& [address, bytes] = block;
    C10_CUDA_CHECK(cudaMemsetAsync(address, 0, static_cast<size_t>(bytes), stream_.stream()));
  }
}

void CapturedGraphs::replay(const Tensors& inputs, Shape& shape) {
  {
    const torch::NoGradGuard no_grad;
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (inputs[i].is_same(shape.inputs[i])) continue;  // the caller has filled it
      shape.inputs[i].copy_(inputs[i], /*non_blocking=*/true);
    }
  }
  shape.recording->replay();
  stats_.replays += 1;
  stats_.graphs = shape.recording->graphs();
}

CaptureStats CapturedGraphs::stats() const {
  CaptureStats stats = stats_;
  stats.memory_bytes = memory_ ? memory_->held_bytes() : 0;
  return stats;
}

}  // namespace lockstep::cuda
