#include "train/cuda/operator_watch.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <memory>
#include <mutex>
#include <string_view>

#include "device/capture.hpp"

namespace lockstep::cuda {
namespace {

std::mutex mutex;    // guards what follows: backward runs in threads of its own
std::string failed;  // the outermost operator that an exception went through
std::string latest;  // the one that was begun last

std::unique_ptr<at::ObserverContext> begun(const at::RecordFunction& call) {
  if (Capture::current() != nullptr) {
    const std::lock_guard lock(mutex);
    latest = call.name();
  }
  return nullptr;
}

// From the innermost operator outwards, so that the last one told of is the one the step called.
void ended(const at::RecordFunction& call, at::ObserverContext*) {
  if (std::uncaught_exceptions() == 0 || Capture::current() == nullptr) return;
  const std::lock_guard lock(mutex);
  failed = call.name();
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

}  // namespace

OperatorWatch::OperatorWatch() {
  {
    const std::lock_guard lock(mutex);
    failed.clear();
    latest.clear();
  }
  handle_ = at::addGlobalCallback(
      at::RecordFunctionCallback(begun, ended).scopes({at::RecordScope::FUNCTION}));
}

OperatorWatch::~OperatorWatch() {
  at::removeCallback(handle_);
}

Error OperatorWatch::error(const std::exception& cause) const {
  const std::lock_guard lock(mutex);
  const std::string note = first_line(describe(cause));
  if (failed.empty() && latest.empty()) {
    return {Code::kCapture, "the step cannot be captured", "run it without capture", {note}};
  }
  if (failed.empty()) {
    return {Code::kCapture,
            fmt::format("the step cannot be captured: something after {} cannot be recorded into a "
                        "CUDA graph",
                        latest),
            "leave out of the step what waits for the GPU, or run it without capture",
            {note}};
  }
  const Reason reason = reason_of(failed);
  return {Code::kCapture,
          fmt::format("{} in the step {}", failed, reason.what),
          fmt::format("{}, or run the step without capture", reason.remedy),
          {note}};
}

}  // namespace lockstep::cuda
