#include <cstdlib>
#include <cstring>

#include "comm/arguments.hpp"
#include "comm/backend.hpp"
#include "comm/control_session.hpp"
#include "comm/self_messages.hpp"
#include "lockstep/error.hpp"

namespace lockstep {
namespace {

class Done final : public Backend::Work {
 public:
  bool advance() override { return true; }
  void wait() override {}
};

// Memory that only this rank reaches.
class OwnMemory final : public RegisteredMemory {
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
  explicit SelfBackend(Group group)
      : session_(std::move(group), nullptr), messages_(this->group()) {}

  std::string_view name() const override { return "self"; }
  const Group& group() const override { return session_.group(); }

  std::unique_ptr<Backend::Work> all_reduce(const Buffer& buffer, ReduceOp op, double weight,
                                            const CallContext&) override {
    session_.throw_if_broken();
    check_reduce(buffer, op, weight);
    check_weight(Operation::kAllReduce, buffer, op, weight);
    return make_done_work();
  }

  std::unique_ptr<Backend::Work> broadcast(const Buffer& buffer, int root,
                                           const CallContext&) override {
    session_.throw_if_broken();
    check_broadcast(group(), buffer, root);
    return make_done_work();
  }

  std::unique_ptr<Backend::Work> reduce_scatter(const ConstBuffer& input, const Buffer& output,
                                                ReduceOp op, double weight,
                                                const CallContext&) override {
    session_.throw_if_broken();
    check_reduce_scatter(group(), input, output, op, weight);
    check_weight(Operation::kReduceScatter, output, op, weight);
    copy(input, output);
    return make_done_work();
  }

  std::unique_ptr<Backend::Work> all_gather(const ConstBuffer& input, const Buffer& output,
                                            const CallContext&) override {
    session_.throw_if_broken();
    check_all_gather(group(), input, output);
    copy(input, output);
    return make_done_work();
  }

  std::unique_ptr<Backend::Work> reduce(const Buffer& buffer, int root, ReduceOp op, double weight,
                                        const CallContext&) override {
    session_.throw_if_broken();
    check_rooted_reduce(group(), buffer, root, op, weight);
    check_weight(Operation::kReduce, buffer, op, weight);
    return make_done_work();
  }

  std::unique_ptr<Backend::Work> exchange(const ConstBuffer& input, const Buffer& output,
                                          const BlockExchange& blocks,
                                          const CallContext&) override {
    session_.throw_if_broken();
    check_exchange(group(), input, output, blocks);
    session_.guarded([&] {
      require_same_counts(group(), make_exchange_fingerprint(input.dtype, blocks), {blocks.given},
                          {blocks.taken});
    });
    copy(input, output);
    return make_done_work();
  }

  std::unique_ptr<Backend::Work> send(const ConstBuffer& buffer, int to, int tag,
                                      const CallContext& context) override {
    session_.throw_if_broken();
    check_message(group(), buffer.count, to);
    messages_.send(buffer, tag, context);
    return make_done_work();
  }

  std::unique_ptr<Backend::Work> recv(const Buffer& buffer, int from, int tag,
                                      const CallContext& context) override {
    session_.throw_if_broken();
    check_message(group(), buffer.count, from);
    session_.guarded([&] { messages_.recv(buffer, tag, context); });
    return make_done_work();
  }

  void barrier(const CallContext&) override { session_.throw_if_broken(); }

  std::unique_ptr<Backend> split(int /*color*/, int /*key*/, std::string_view group_name,
                                 const CallContext&) override {
    session_.throw_if_broken();
    Group child = group();
    child.name = group_name;
    return std::make_unique<SelfBackend>(std::move(child));
  }

  std::shared_ptr<RegisteredMemory> allocate(int64_t bytes, const CallContext&) override {
    session_.throw_if_broken();
    check_allocate(bytes);
    return std::make_shared<OwnMemory>(bytes);
  }

  void abort(const AbortRecord& record) noexcept override { session_.abort(record); }

 private:
  static void check_weight(Operation operation, const Buffer& buffer, ReduceOp op, double weight) {
    const Fingerprint call =
        make_reduce_fingerprint(operation, buffer.dtype, buffer.count, op, weight);
    mean_factors({&call, 1});
  }

  static void copy(const ConstBuffer& from, const Buffer& to) {
    if (from.data == to.data || from.count == 0) return;
    std::memcpy(to.data, from.data, static_cast<size_t>(from.bytes()));
  }

  ControlSession session_;
  SelfMessages messages_;
};

}  // namespace

void Backend::abort(std::string_view reason) noexcept {
  try {
    abort(AbortRecord{.by = rank(), .blamed = rank(), .text = std::string(reason)});
  } catch (...) {
    abort(AbortRecord{.by = rank(), .blamed = rank()});  // no memory for the reason
  }
}

std::unique_ptr<Backend::Work> make_done_work() {
  return std::make_unique<Done>();
}

std::unique_ptr<Backend> make_self_backend() {
  return std::make_unique<SelfBackend>(Group::world(0, 1));
}

}  // namespace lockstep
