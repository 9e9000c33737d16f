#pragma once

#include <exception>
#include <future>
#include <optional>
#include <type_traits>
#include <utility>

namespace lockstep {

/// Work submitted to a device. run() is called under the device's guards and publish() after they
/// have ended, so that the work's tensors are freed and its span is in the timeline when the result
/// becomes available.
class Task {
 public:
  virtual ~Task() = default;
  virtual void run() noexcept = 0;
  virtual void fail(std::exception_ptr error) noexcept = 0;
  virtual void publish() noexcept = 0;
};

/// The task that runs one callable.
template <class Work>
class TaskOf final : public Task {
 public:
  using Result = std::invoke_result_t<Work&>;

  explicit TaskOf(Work work) : work_(std::move(work)) {}

  std::future<Result> result() { return promise_.get_future(); }

  void run() noexcept override {
    try {
      if constexpr (std::is_void_v<Result>) {
        (*work_)();
      } else {
        value_.emplace((*work_)());
      }
    } catch (...) {
      error_ = std::current_exception();
    }
    work_.reset();
  }

  void fail(std::exception_ptr error) noexcept override { error_ = std::move(error); }

  void publish() noexcept override {
    if (error_) {
      promise_.set_exception(std::move(error_));
    } else if constexpr (std::is_void_v<Result>) {
      promise_.set_value();
    } else {
      promise_.set_value(std::move(*value_));
    }
  }

 private:
  struct Nothing {};
  using Value = std::conditional_t<std::is_void_v<Result>, Nothing, Result>;

  std::optional<Work> work_;
  std::optional<Value> value_;
  std::exception_ptr error_;
  std::promise<Result> promise_;
};

}  // namespace lockstep
