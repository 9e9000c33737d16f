#include <cstdlib>
#include <cstring>
#include <exception>

#include "comm/backends.hpp"
#include "comm/check_call.hpp"
#include "comm/self_messages.hpp"
#include "lockstep/error.hpp"

namespace lockstep {
namespace {

class Done final : public Pending {
 public:
  bool advance() override { return true; }
  void wait() override {}
};

// Memory that only this rank reaches.
class OwnMemory final : public ReachableMemory {
 public:
  explicit OwnMemory(int64_t bytes) : bytes_(bytes) {
    const size_t rounded = (static_cast<size_t>(bytes) / kAlignment + 1) * kAlignment;
    data_ = std::aligned_alloc(kAlignment, rounded);
    if (data_ == nullptr) {
      throw Error(Code::kOutOfMemory, "no memory for allocate", "use a smaller model or batch");
    }
    std::memset(data_, 0, rounded);
  }
  ~OwnMemory() override { std::free(data_); }
  OwnMemory(const OwnMemory&) = delete;
  OwnMemory& operator=(const OwnMemory&) = delete;

  void* data() const override { return data_; }
  int64_t bytes() const override { return bytes_; }

 private:
  static constexpr size_t kAlignment = 4096;
  void* data_ = nullptr;
  int64_t bytes_;
};

class SelfBackend final : public Backend {
 public:
  explicit SelfBackend(Group group) : group_(std::move(group)), messages_(group_) {}

  std::string_view name() const override { return "self"; }
  const Group& group() const override { return group_; }

  std::unique_ptr<Pending> all_reduce(const Buffer& buffer, ReduceOp op, double weight,
                                      const CallContext&) override {
    check_usable();
    check_reduce(buffer, op, weight);
    check_weight(op, weight);
    return std::make_unique<Done>();
  }

  void broadcast(const Buffer& buffer, int root, const CallContext&) override {
    check_usable();
    check_broadcast(group_, buffer, root);
  }

  void reduce_scatter(const ConstBuffer& input, const Buffer& output, ReduceOp op, double weight,
                      const CallContext&) override {
    check_usable();
    check_reduce_scatter(group_, input, output, op, weight);
    check_weight(op, weight);
    copy(input, output);
  }

  void all_gather(const ConstBuffer& input, const Buffer& output, const CallContext&) override {
    check_usable();
    check_all_gather(group_, input, output);
    copy(input, output);
  }

  void send(const ConstBuffer& buffer, int to, int tag, const CallContext& context) override {
    check_usable();
    check_message(group_, buffer.count, to);
    messages_.send(buffer, tag, context);
  }

  void recv(const Buffer& buffer, int from, int tag, const CallContext& context) override {
    check_usable();
    check_message(group_, buffer.count, from);
    try {
      messages_.recv(buffer, tag, context);
    } catch (...) {
      broken_ = std::current_exception();
      throw;
    }
  }

  void barrier(const CallContext&) override { check_usable(); }

  std::unique_ptr<Backend> split(int /*colour*/, int /*key*/, std::string_view group_name,
                                 const CallContext&) override {
    check_usable();
    Group child = group_;
    child.name = group_name;
    return std::make_unique<SelfBackend>(std::move(child));
  }

  std::shared_ptr<ReachableMemory> allocate(int64_t bytes, const CallContext&) override {
    check_usable();
    check_allocate(bytes);
    return std::make_shared<OwnMemory>(bytes);
  }

  void abort(std::string_view reason) noexcept override {
    if (broken_) return;
    try {
      throw RankError(Code::kRankFailed, group_.world_ranks[0],
                      "this rank gave up: " + std::string(reason),
                      "make a new communicator after an abort");
    } catch (...) {
      broken_ = std::current_exception();
    }
  }

 private:
  void check_usable() const {
    if (broken_) std::rethrow_exception(broken_);
  }

  static void check_weight(ReduceOp op, double weight) {
    if (op != ReduceOp::kMean || weight != 0) return;
    throw Error(Code::kUsage, "the weights of all ranks are zero",
                "give at least one rank a weight; a weight is usually its number of samples");
  }

  static void copy(const ConstBuffer& from, const Buffer& to) {
    if (from.data == to.data || from.count == 0) return;
    std::memcpy(to.data, from.data, static_cast<size_t>(from.bytes()));
  }

  Group group_;
  SelfMessages messages_;
  std::exception_ptr broken_;
};

}  // namespace

std::unique_ptr<Backend> make_self_backend() {
  return std::make_unique<SelfBackend>(Group{.rank = 0, .world_ranks = {0}, .name = "world"});
}

}  // namespace lockstep
