#include "layers/cuda/matmul.hpp"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <fmt/format.h>
#include <torch/torch.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <type_traits>
#include <vector>

#include "device/storage_watch.hpp"
#include "lockstep/error.hpp"
#include "lockstep/fused_layers.hpp"

namespace lockstep {
namespace layers {
namespace {

// One of several ways to do the same work: queues it on a stream, or returns false if it cannot.
using Way = std::function<bool()>;

constexpr float kBriefMs = 1;
constexpr int kBriefRounds = 3;
constexpr float kWorthALongOne = 1.1F;  // times the fastest brief time
constexpr size_t kFinalists = 4;
constexpr float kLongMs = 50;
constexpr int kLongRounds = 2;
constexpr float kClearlyFaster = 0.99F;  // times the time of an earlier one
constexpr float kCannot = std::numeric_limits<float>::infinity();

class Stopwatch {
 public:
  explicit Stopwatch(cudaStream_t stream) : stream_(stream) {
    C10_CUDA_CHECK(cudaEventCreate(&begin_));
    C10_CUDA_CHECK(cudaEventCreate(&end_));
  }
  ~Stopwatch() {
    if (begin_) (void)cudaEventDestroy(begin_);
    if (end_) (void)cudaEventDestroy(end_);
  }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

  /// Returns the mean milliseconds of as many in a row as take about `ms`, after as many to warm
  /// up.
  float measure(const Way& way, float ms) {
    if (!way()) return kCannot;
    const float once_ms = mean_of(way, 1);
    const int repeats = std::clamp(static_cast<int>(ms / once_ms), 2, kMostRepeats);
    for (int i = 0; i < repeats; ++i) way();
    return mean_of(way, repeats);
  }

 private:
  static constexpr int kMostRepeats = 10000;

  float mean_of(const Way& way, int repeats) {
    C10_CUDA_CHECK(cudaEventRecord(begin_, stream_));
    for (int i = 0; i < repeats; ++i) way();
    C10_CUDA_CHECK(cudaEventRecord(end_, stream_));
    C10_CUDA_CHECK(cudaEventSynchronize(end_));
    float ms = 0;
    C10_CUDA_CHECK(cudaEventElapsedTime(&ms, begin_, end_));
    return ms / static_cast<float>(repeats);
  }

  cudaStream_t stream_;
  cudaEvent_t begin_ = nullptr;
  cudaEvent_t end_ = nullptr;
};

// Returns the indices of the ways worth a long comparison, in ascending order.
std::vector<size_t> finalists(const std::vector<Way>& ways, Stopwatch& watch) {
  std::vector<float> best(ways.size(), kCannot);
  for (int round = 0; round < kBriefRounds; ++round) {
    for (size_t i = 0; i < ways.size(); ++i) {
      best[i] = std::min(best[i], watch.measure(ways[i], kBriefMs));
    }
  }
  std::vector<size_t> order(ways.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return best[a] < best[b]; });
  const float limit = best[order.front()] * kWorthALongOne;
  std::erase_if(order, [&](size_t i) { return best[i] == kCannot || best[i] > limit; });
  order.resize(std::min(order.size(), kFinalists));
  std::sort(order.begin(), order.end());
  return order;
}

// Returns the index of the way that is fastest when repeated, or 0 if none works. Takes up to a
// second.
//
// Large matrix products bring a GPU to its power limit, and the kernel that wins a few milliseconds
// below the limit often draws the most power. So a brief comparison in turns only selects the few
// that are worth a long one, where each runs alone for as long as the clock needs to settle. Among
// ways that are about equal the first wins, so that runs tend to agree.
size_t fastest(const std::vector<Way>& ways, cudaStream_t stream) {
  if (ways.size() < 2) return 0;
  Stopwatch watch(stream);
  const auto compared = finalists(ways, watch);
  if (compared.empty()) return 0;
  if (compared.size() == 1) return compared.front();

  std::vector<float> total(compared.size(), 0);
  for (int round = 0; round < kLongRounds; ++round) {
    for (size_t i = 0; i < compared.size(); ++i) {
      total[i] += watch.measure(ways[compared[i]], kLongMs);
    }
  }
  size_t chosen = 0;
  for (size_t i = 1; i < total.size(); ++i) {
    if (total[i] < total[chosen] * kClearlyFaster) chosen = i;
  }
  return compared[chosen];
}

constexpr size_t kMaxWorkspaceBytes = size_t{32} << 20;
constexpr int kCandidates = 16;

std::atomic<bool> tuning{false};

void check(cublasStatus_t status, const char* what) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  throw Error(Code::kEngine,
              fmt::format("cuBLASLt failed in {}: {}", what, cublasLtGetStatusString(status)),
              "check with `lockstep doctor` that one CUDA version is loaded");
}

template <class Handle, cublasStatus_t (*destroy)(Handle)>
struct Destroy {
  void operator()(std::remove_pointer_t<Handle>* handle) const { (void)destroy(handle); }
};
using Operation = std::unique_ptr<std::remove_pointer_t<cublasLtMatmulDesc_t>,
                                  Destroy<cublasLtMatmulDesc_t, cublasLtMatmulDescDestroy>>;
using Layout = std::unique_ptr<std::remove_pointer_t<cublasLtMatrixLayout_t>,
                               Destroy<cublasLtMatrixLayout_t, cublasLtMatrixLayoutDestroy>>;
using Preference =
    std::unique_ptr<std::remove_pointer_t<cublasLtMatmulPreference_t>,
                    Destroy<cublasLtMatmulPreference_t, cublasLtMatmulPreferenceDestroy>>;

cudaDataType_t cuda_type(const torch::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case torch::kHalf:
      return CUDA_R_16F;
    case torch::kBFloat16:
      return CUDA_R_16BF;
    case torch::kFloat:
      return CUDA_R_32F;
    default:
      throw Error(Code::kInternal,
                  fmt::format("a matrix product of {} tensors", toString(tensor.scalar_type())));
  }
}

// At most 256, which is all that cuBLASLt can use; 256 for an undefined tensor.
uint32_t alignment_bytes(const torch::Tensor& tensor) {
  if (!tensor.defined()) return 256;
  const auto address = reinterpret_cast<uintptr_t>(tensor.data_ptr());
  return static_cast<uint32_t>(uintptr_t{1} << std::min(std::countr_zero(address), 8));
}

// Everything that the choice of an algorithm depends on. cuBLASLt's columns are our rows, so its A
// is our b.
using PlanKey = std::array<int64_t, 14>;

PlanKey key_of(const Matmul& work) {
  const int64_t k = work.transpose_a ? work.a.size(0) : work.a.size(1);
  return {work.out.get_device(),
          work.out.size(1),
          work.out.size(0),
          k,
          work.transpose_b,
          work.transpose_a,
          cuda_type(work.a),
          cuda_type(work.out),
          work.epilogue,
          work.beta != 0,
          alignment_bytes(work.b),
          alignment_bytes(work.a),
          alignment_bytes(work.out),
          std::min(alignment_bytes(work.bias), alignment_bytes(work.aux))};
}

struct Plan {
  bool searched = false;
  bool found = false;
  bool tuned = false;
  cublasLtMatmulAlgo_t algorithm{};
  size_t workspace_bytes = 0;
};

cublasLtHandle_t handle_of(int gpu) {
  static std::mutex mutex;
  static auto* handles = new std::map<int, cublasLtHandle_t>();  // never destroyed
  const std::lock_guard lock(mutex);
  auto& handle = (*handles)[gpu];
  if (!handle) check(cublasLtCreate(&handle), "cublasLtCreate");
  return handle;
}

// One product as cuBLASLt describes it.
class Problem {
 public:
  explicit Problem(const Matmul& work)
      : work_(work),
        handle_(handle_of(work.out.get_device())),
        stream_(c10::cuda::getCurrentCUDAStream(work.out.get_device()).stream()) {
    cublasLtMatmulDesc_t operation = nullptr;
    check(cublasLtMatmulDescCreate(&operation, CUBLAS_COMPUTE_32F, CUDA_R_32F), "a description");
    operation_.reset(operation);
    set(CUBLASLT_MATMUL_DESC_TRANSA, work.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N);
    set(CUBLASLT_MATMUL_DESC_TRANSB, work.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N);
    set(CUBLASLT_MATMUL_DESC_EPILOGUE, work.epilogue);
    if (work.bias.defined()) set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, work.bias.data_ptr());
    if (work.aux.defined()) {
      set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, work.aux.data_ptr());
      set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, int64_t{work.aux.size(1)});
    }
    a_ = layout_of(work.b);
    b_ = layout_of(work.a);
    out_ = layout_of(work.out);
  }

  /// Returns cuBLASLt's candidates; those it expects to be fastest come first.
  std::vector<cublasLtMatmulHeuristicResult_t> candidates(int count) const {
    cublasLtMatmulPreference_t raw = nullptr;
    check(cublasLtMatmulPreferenceCreate(&raw), "a preference");
    const Preference preference(raw);
    const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
      check(cublasLtMatmulPreferenceSetAttribute(raw, attribute, &value, sizeof value),
            "a preference");
    };
    prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, kMaxWorkspaceBytes);
    // Split sums must be added in float32 and in a fixed order.
    prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
           uint32_t{CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE});
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment_bytes(work_.b));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment_bytes(work_.a));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignment_bytes(work_.out));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment_bytes(work_.out));
    std::vector<cublasLtMatmulHeuristicResult_t> results(static_cast<size_t>(count));
    int found = 0;
    const auto status =
        cublasLtMatmulAlgoGetHeuristic(handle_, operation_.get(), a_.get(), b_.get(), out_.get(),
                                       out_.get(), raw, count, results.data(), &found);
    results.resize(status == CUBLAS_STATUS_SUCCESS ? static_cast<size_t>(found) : 0);
    std::erase_if(results, [](const auto& result) {
      return result.state != CUBLAS_STATUS_SUCCESS || result.workspaceSize > kMaxWorkspaceBytes;
    });
    return results;
  }

  /// The workspace comes from libtorch's allocator, which reuses it only for later work of this
  /// stream and handles captures.
  cublasStatus_t queue(const cublasLtMatmulAlgo_t& algorithm, size_t workspace_bytes,
                       const torch::Tensor& out) const {
    torch::Tensor workspace;
    if (workspace_bytes > 0) {
      workspace =
          at::empty({static_cast<int64_t>(workspace_bytes)}, out.options().dtype(at::kByte));
    }
    return cublasLtMatmul(
        handle_, operation_.get(), &work_.alpha, work_.b.data_ptr(), a_.get(), work_.a.data_ptr(),
        b_.get(), &work_.beta, out.data_ptr(), out_.get(), out.data_ptr(), out_.get(), &algorithm,
        workspace_bytes > 0 ? workspace.data_ptr() : nullptr, workspace_bytes, stream_);
  }

  cudaStream_t stream() const { return stream_; }

 private:
  template <class Value>
  void set(cublasLtMatmulDescAttributes_t attribute, const Value& value) {
    check(cublasLtMatmulDescSetAttribute(operation_.get(), attribute, &value, sizeof value),
          "a description");
  }

  // A contiguous row-major matrix is a column-major one with its sizes swapped.
  static Layout layout_of(const torch::Tensor& matrix) {
    cublasLtMatrixLayout_t layout = nullptr;
    check(cublasLtMatrixLayoutCreate(&layout, cuda_type(matrix),
                                     static_cast<uint64_t>(matrix.size(1)),
                                     static_cast<uint64_t>(matrix.size(0)), matrix.size(1)),
          "a layout");
    return Layout(layout);
  }

  const Matmul& work_;
  cublasLtHandle_t handle_;
  cudaStream_t stream_;
  Operation operation_;
  Layout a_;
  Layout b_;
  Layout out_;
};

bool is_capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  C10_CUDA_CHECK(cudaStreamIsCapturing(stream, &status));
  return status != cudaStreamCaptureStatusNone;
}

// Returns the index of the fastest candidate.
size_t fastest_candidate(const Problem& problem, const Matmul& work,
                         const std::vector<cublasLtMatmulHeuristicResult_t>& candidates) {
  // A product that adds to its output must not be repeated on it.
  const auto out = work.beta == 0 ? work.out : at::empty_like(work.out);
  std::vector<Way> ways;
  for (const auto& candidate : candidates) {
    ways.emplace_back([&] {
      return problem.queue(candidate.algo, candidate.workspaceSize, out) == CUBLAS_STATUS_SUCCESS;
    });
  }
  return fastest(ways, problem.stream());
}

std::mutex plans_mutex;

// Every thread that runs backward may call this. Timing holds the lock: one shape at a time.
Plan plan_of(const Problem& problem, const Matmul& work) {
  static auto* plans = new std::map<PlanKey, Plan>();
  const std::lock_guard lock(plans_mutex);
  auto& plan = (*plans)[key_of(work)];
  const bool tune = tuning && !plan.tuned && !is_capturing(problem.stream());
  if (plan.searched && (!plan.found || !tune)) return plan;
  plan.searched = true;
  const auto candidates = problem.candidates(tune ? kCandidates : 1);
  if (candidates.empty()) return plan;
  const size_t chosen = tune ? fastest_candidate(problem, work, candidates) : 0;
  plan = {.searched = true,
          .found = true,
          .tuned = tune,
          .algorithm = candidates[chosen].algo,
          .workspace_bytes = candidates[chosen].workspaceSize};
  return plan;
}

// Epilogues with activations need rows of whole 16 bytes; elsewhere fusing gains nothing.
bool may_be_fused(const Matmul& work) {
  if (work.epilogue == CUBLASLT_EPILOGUE_DEFAULT || work.epilogue == CUBLASLT_EPILOGUE_BIAS) {
    return true;
  }
  const auto fits = [](const torch::Tensor& tensor) {
    return !tensor.defined() || (alignment_bytes(tensor) >= 16 && tensor.size(-1) % 8 == 0);
  };
  return fits(work.a) && fits(work.b) && fits(work.out) && fits(work.bias) && fits(work.aux);
}

// cuBLASLt reads addresses: whoever fills weights just in time must know.
void note_uses(const Matmul& work) {
  for (const torch::Tensor& tensor : {work.a, work.b, work.bias}) note_use(tensor);
}

}  // namespace

bool try_matmul(const Matmul& work) {
  note_uses(work);
  if (!may_be_fused(work)) return false;
  const Problem problem(work);
  const Plan plan = plan_of(problem, work);
  if (!plan.found) return false;
  check(problem.queue(plan.algorithm, plan.workspace_bytes, work.out), "a matrix product");
  return true;
}

void matmul(const Matmul& work) {
  if (try_matmul(work)) return;
  throw Error(Code::kEngine,
              fmt::format("cuBLASLt has no algorithm for a matrix product of {} x {} and {} x {}",
                          work.a.size(0), work.a.size(1), work.b.size(0), work.b.size(1)),
              "use torch::linear for this layer");
}

bool choose_fused(const Matmul& fused, const Matmul& plain, const std::function<void()>& rest) {
  note_uses(fused);
  if (!may_be_fused(fused)) return false;
  const Problem problem(fused);
  if (!plan_of(problem, fused).found) return false;
  if (!tuning) return true;

  static std::mutex mutex;
  static auto* choices = new std::map<PlanKey, bool>();
  const std::lock_guard lock(mutex);
  const bool is_new = !choices->contains(key_of(fused));
  if (is_new && is_capturing(problem.stream())) return true;
  bool& choice = (*choices)[key_of(fused)];
  if (is_new) {
    const Way together = [&] { return try_matmul(fused); };
    const Way apart = [&] {
      matmul(plain);
      rest();
      return true;
    };
    choice = fastest({together, apart}, problem.stream()) == 0;
  }
  return choice;
}

}  // namespace layers

void tune_layers(bool on) {
  layers::tuning = on;
}

}  // namespace lockstep
