#include <fmt/format.h>

#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>

#include "base/running_clock.hpp"
#include "net/store_limits.hpp"

namespace lockstep {
namespace {

class LocalStore final : public Store {
 public:
  void set(std::string_view key, std::string_view value) override {
    check_sizes(key, value);
    const std::lock_guard lock(mutex_);
    if (!values_.emplace(key, value).second) throw_set_twice(key);
    changed_.notify_all();
  }

  std::string get(std::string_view key, int64_t deadline_ns) override {
    check_sizes(key, {});
    std::unique_lock lock(mutex_);
    for (;;) {
      const auto found = values_.find(key);
      if (found != values_.end()) return found->second;
      const int64_t left_ns = deadline_ns - running_ns();
      if (left_ns <= 0) throw_never_set(key);
      changed_.wait_for(lock, std::chrono::nanoseconds(std::min(left_ns, kLongestWaitNs)));
    }
  }

 private:
  // wait_for adds to the clock's time: an endless deadline must not overflow it.
  static constexpr int64_t kLongestWaitNs = 3'600'000'000'000;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::string, std::less<>> values_;
};

class PrefixStore final : public Store {
 public:
  PrefixStore(std::shared_ptr<Store> store, std::string prefix)
      : store_(std::move(store)), prefix_(std::move(prefix)) {}

  void set(std::string_view key, std::string_view value) override { store_->set(full(key), value); }

  std::string get(std::string_view key, int64_t deadline_ns) override {
    return store_->get(full(key), deadline_ns);
  }

 private:
  // Prefix "a" with key "b/c" and prefix "a/b" with key "c" must not meet: the length tells them
  // apart.
  std::string full(std::string_view key) const {
    return fmt::format("{}:{}/{}", prefix_.size(), prefix_, key);
  }

  std::shared_ptr<Store> store_;
  std::string prefix_;
};

}  // namespace

void check_sizes(std::string_view key, std::string_view value) {
  if (key.empty() || key.size() > kMaxKeyBytes) {
    throw Error(
        Code::kRendezvous,
        fmt::format("a store's key has {} bytes; 1 to {} are allowed", key.size(), kMaxKeyBytes),
        "use a shorter name");
  }
  if (value.size() > kMaxValueBytes) {
    throw Error(Code::kRendezvous,
                fmt::format("the store's value \"{}\" has {} bytes; at most {} are allowed", key,
                            value.size(), kMaxValueBytes),
                "exchange addresses and small texts through the store, not data");
  }
}

void throw_set_twice(std::string_view key) {
  throw Error(Code::kRendezvous, fmt::format("the store's value \"{}\" is set already", key),
              "two ranks have the same number, or two jobs share one store: give each job an "
              "endpoint of its own");
}

void throw_never_set(std::string_view key) {
  throw Error(Code::kRendezvous,
              fmt::format("nobody has set \"{}\" in the store before the deadline", key),
              "the rank that should have set it did not start, failed early, or is slow: look at "
              "its log, or allow more time");
}

std::shared_ptr<Store> make_local_store() {
  return std::make_shared<LocalStore>();
}

std::shared_ptr<Store> make_prefix_store(std::shared_ptr<Store> store, std::string prefix) {
  return std::make_shared<PrefixStore>(std::move(store), std::move(prefix));
}

}  // namespace lockstep
