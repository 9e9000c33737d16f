#include "pipeline/channel.hpp"

#include <c10/core/StreamGuard.h>
#include <fmt/format.h>

#include <algorithm>
#include <deque>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "base/counted.hpp"
#include "base/process.hpp"
#include "device/streams.hpp"
#include "lockstep/error.hpp"
#include "lockstep/tensor_text.hpp"
#include "torch_compat.hpp"

namespace lockstep {

void Mailbox::put(const MessageTag& tag, Message message) {
  {
    const std::lock_guard lock(mutex_);
    messages_.insert_or_assign(tag, std::move(message));
  }
  arrived_.notify_all();
}

Mailbox::Message Mailbox::take(const MessageTag& tag) {
  std::unique_lock lock(mutex_);
  arrived_.wait(lock, [&] { return error_ != nullptr || messages_.contains(tag); });
  if (error_) throw Stopped();
  return std::move(messages_.extract(tag).mapped());
}

void Mailbox::fail(std::exception_ptr error) {
  {
    const std::lock_guard lock(mutex_);
    if (!error_) error_ = std::move(error);
  }
  arrived_.notify_all();
}

std::exception_ptr Mailbox::error() const {
  const std::lock_guard lock(mutex_);
  return error_;
}

void Mailbox::clear() {
  const std::lock_guard lock(mutex_);
  messages_.clear();
  error_ = nullptr;
}

namespace {

class LocalChannel final : public StageChannel {
 public:
  LocalChannel(Mailbox& mailbox, Device& device) : mailbox_(mailbox), device_(device) {}

  void send(const MessageTag& tag, const torch::Tensor& tensor, const MicroBatchShape&) override {
    mailbox_.put(tag, {tensor, StreamOrder::now(device_), &device_});
  }

  torch::Tensor receive(const MessageTag& tag, const MicroBatchShape&) override {
    const auto [tensor, order, from] = mailbox_.take(tag);
    if (from == &device_) return tensor;
    order.hold_back(device_);
    const auto bytes = static_cast<int64_t>(tensor.nbytes());
    from->count_traffic_to(device_, bytes);
    stats_.messages += 1;
    stats_.bytes += bytes;
    keep_for_current_stream(tensor);
    return tensor.to(device_.torch_device(), tensor.scalar_type(), /*non_blocking=*/true,
                     /*copy=*/true);
  }

  void abort(const std::string&) override {}
  LinkStats stats() const override { return stats_; }

 private:
  Mailbox& mailbox_;
  Device& device_;
  LinkStats stats_;  // of what arrived here
};

std::string label_of(const MessageTag& tag) {
  return fmt::format("{} of stage {}, micro-batch {}",
                     tag.payload == Payload::kActivation ? "output" : "input gradient",
                     tag.from_stage, tag.micro_batch);
}

struct TensorShape {
  torch::ScalarType dtype = torch::kFloat;
  std::vector<int64_t> sizes;

  bool operator==(const TensorShape&) const = default;
  std::string text() const { return fmt::format("{} {}", shape_text(sizes), dtype_text(dtype)); }
};

// One end of a one-way link between two ranks: what one stage sends to another. The ends agree on
// the shape with the first message of each shape of the input, separately inside and outside
// Autocast; later messages are bare data.
//
// Note [A sender thread for each link]
// A send may have to wait for its receiver, which may be about to send in the opposite direction
// and would then wait for us. So each link has a thread that sends its messages in order, and the
// stage continues computing.
class RankLink {
 public:
  // `pair` joins the two ranks and is used by this link only.
  RankLink(const Communicator& pair, bool sends, Device& device) : pair_(pair), device_(device) {
    if (sends) sender_ = start_quiet_thread([this] { run_sender(); });
  }
  ~RankLink();
  RankLink(const RankLink&) = delete;
  RankLink& operator=(const RankLink&) = delete;

  // Throws the error of an earlier send.
  void send(const MessageTag& tag, const torch::Tensor& tensor, const MicroBatchShape& input);
  torch::Tensor receive(const MessageTag& tag, const MicroBatchShape& input);
  void abort(const std::string& reason) const { pair_.abort(reason); }
  const LinkStats& stats() const { return stats_; }

 private:
  using ShapeKey = std::pair<MicroBatchShape, int>;  // and Autocast's dtype or -1
  struct QueuedSend {
    torch::Tensor tensor;
    StreamOrder order;  // when the tensor is ready
    std::string label;
    int tag = 0;
    bool with_shape = false;  // the shape goes first
  };

  int peer() const { return 1 - pair_.rank(); }
  ShapeKey key_of(const MicroBatchShape& input) const;
  void run_sender();
  void send_shape(const torch::Tensor& tensor, const std::string& label) const;
  TensorShape receive_shape(const std::string& label) const;

  const Communicator pair_;
  Device& device_;
  std::map<ShapeKey, TensorShape> shapes_;  // that the ends have agreed on
  LinkStats stats_;

  std::mutex mutex_;  // guards the next four
  std::condition_variable changed_;
  std::deque<QueuedSend> send_queue_;
  std::exception_ptr error_;  // of a send
  bool closing_ = false;

  std::thread sender_;  // at the sending end only; last: uses all of the above
};

RankLink::~RankLink() {
  if (!sender_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
  }
  changed_.notify_all();
  sender_.join();
}

// The ranks of an axis step inside the same Autocast or outside any, so both ends get the same key.
RankLink::ShapeKey RankLink::key_of(const MicroBatchShape& input) const {
  const auto autocast = compat::AutocastSwitch::get(device_.torch_device().type());
  return {input, autocast.enabled ? static_cast<int>(autocast.dtype) : -1};
}

void RankLink::send(const MessageTag& tag, const torch::Tensor& tensor,
                    const MicroBatchShape& input) {
  const TensorShape shape{tensor.scalar_type(), tensor.sizes().vec()};
  const auto [known, is_new] = shapes_.emplace(key_of(input), shape);
  if (known->second != shape) {
    throw Error(
        Code::kStageMismatch,
        fmt::format("the {} is {}; for {} of the same shape it was {} before", label_of(tag),
                    shape.text(), counted(input.rows, "row"), known->second.text()),
        "between ranks the shape and dtype of a stage's output must follow from those of "
        "the step's input");
  }
  {
    const std::lock_guard lock(mutex_);
    if (error_) std::rethrow_exception(error_);
    send_queue_.push_back({.tensor = tensor.contiguous(),
                           .order = StreamOrder::now(device_),
                           .label = label_of(tag),
                           .tag = tag.micro_batch,
                           .with_shape = is_new});
  }
  changed_.notify_all();
  stats_.messages += 1;
  stats_.bytes += static_cast<int64_t>(tensor.nbytes());
}

// On a GPU sends are queued on a stream of the link's own, for the same reason as in Note [A sender
// thread for each link]: a send that waits for its receiver must not delay what the stage computes
// next.
void RankLink::run_sender() {
  std::optional<OwnStream> own_stream;
  std::optional<c10::StreamGuard> on_it;
  if (device_.plan().kind == DeviceKind::kCuda) {
    own_stream.emplace(device_.torch_device());
    on_it.emplace(own_stream->get());
  }
  for (;;) {
    QueuedSend next;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return closing_ || !send_queue_.empty(); });
      if (send_queue_.empty() || error_) return;
      next = std::move(send_queue_.front());
      send_queue_.pop_front();
    }
    try {
      if (next.with_shape) send_shape(next.tensor, next.label);
      next.order.hold_back(device_);
      keep_for_current_stream(next.tensor);
      pair_.send(next.tensor, peer(), {.label = next.label, .tag = next.tag});
    } catch (...) {
      const std::lock_guard lock(mutex_);
      error_ = std::current_exception();
      return;
    }
  }
}

void RankLink::send_shape(const torch::Tensor& tensor, const std::string& label) const {
  const auto sizes = tensor.sizes();
  if (sizes.size() > kMaxDimensions) {
    throw Error(Code::kStageMismatch, fmt::format("the {} has {} dimensions", label, sizes.size()),
                fmt::format("between ranks a tensor may have at most {}", kMaxDimensions));
  }
  std::vector<int64_t> header(2 + kMaxDimensions, 0);
  header[0] = static_cast<int64_t>(tensor.scalar_type());
  header[1] = static_cast<int64_t>(sizes.size());
  std::copy(sizes.begin(), sizes.end(), header.begin() + 2);
  pair_.send(torch::tensor(header, torch::kInt64), peer(), {.label = "shape of the " + label});
}

TensorShape RankLink::receive_shape(const std::string& label) const {
  const torch::Tensor header = torch::zeros({2 + kMaxDimensions}, torch::kInt64);
  pair_.recv(header, peer(), {.label = "shape of the " + label});
  const int64_t* values = header.data_ptr<int64_t>();
  return {static_cast<torch::ScalarType>(values[0]), {values + 2, values + 2 + values[1]}};
}

torch::Tensor RankLink::receive(const MessageTag& tag, const MicroBatchShape& input) {
  const std::string label = label_of(tag);
  const ShapeKey key = key_of(input);
  auto known = shapes_.find(key);
  if (known == shapes_.end()) known = shapes_.emplace(key, receive_shape(label)).first;
  const auto& [dtype, sizes] = known->second;
  const torch::Tensor tensor =
      torch::empty(sizes, torch::TensorOptions(dtype).device(device_.torch_device()));
  pair_.recv(tensor, peer(), {.label = label, .tag = tag.micro_batch});
  return tensor;
}

// The micro-batches of a stage's forwards or backwards, in the order of its rank's list.
std::vector<int> order_of(const Schedule& schedule, int stage, bool forward) {
  const int rank = schedule.rank_of_stage[static_cast<size_t>(stage)];
  std::vector<int> order;
  for (const Action& action : schedule.actions[static_cast<size_t>(rank)]) {
    if (action.stage != stage || action.kind == ActionKind::kBackwardWeight) continue;
    if ((action.kind == ActionKind::kForward) == forward) order.push_back(action.micro_batch);
  }
  return order;
}

void require_same_order(const Schedule& schedule, int stage) {
  for (const bool forward : {true, false}) {
    if (order_of(schedule, stage, forward) == order_of(schedule, stage + 1, forward)) continue;
    throw Error(Code::kSchedule,
                fmt::format("stages {} and {} of schedule {} take their {} in different orders",
                            stage, stage + 1, schedule.name, forward ? "forwards" : "backwards"),
                "between ranks messages arrive in the order they were sent: use one order in both "
                "stages");
  }
}

class RankChannel final : public StageChannel {
 public:
  RankChannel(const Communicator& axis, const Schedule& schedule, Device& device);

  void send(const MessageTag& tag, const torch::Tensor& tensor,
            const MicroBatchShape& shape) override {
    RankLink* link = find(tag);
    link != nullptr ? link->send(tag, tensor, shape) : local_.send(tag, tensor, shape);
  }

  torch::Tensor receive(const MessageTag& tag, const MicroBatchShape& shape) override {
    RankLink* link = find(tag);
    return link != nullptr ? link->receive(tag, shape) : local_.receive(tag, shape);
  }

  void abort(const std::string& reason) override {
    mailbox_.clear();
    for (const auto& [end, link] : links_) link->abort(reason);
  }

  LinkStats stats() const override {
    LinkStats total;
    for (const auto& [end, link] : links_) {
      total.messages += link->stats().messages;
      total.bytes += link->stats().bytes;
    }
    return total;
  }

 private:
  RankLink* find(const MessageTag& tag) const {
    const auto found = links_.find({tag.payload, tag.from_stage});
    return found == links_.end() ? nullptr : found->second.get();
  }

  Mailbox mailbox_;     // between stages of this rank
  LocalChannel local_;  // likewise
  // [payload, sending stage]: the links that begin or end at this rank
  std::map<std::pair<Payload, int>, std::unique_ptr<RankLink>> links_;
};

RankChannel::RankChannel(const Communicator& axis, const Schedule& schedule, Device& device)
    : local_(mailbox_, device) {
  for (int stage = 0; stage + 1 < schedule.stages(); ++stage) {
    const int left = schedule.rank_of_stage[static_cast<size_t>(stage)];
    const int right = schedule.rank_of_stage[static_cast<size_t>(stage) + 1];
    if (left == right) continue;
    require_same_order(schedule, stage);
    for (const Payload payload : {Payload::kActivation, Payload::kGradient}) {
      const bool forward = payload == Payload::kActivation;
      const bool takes_part = axis.rank() == left || axis.rank() == right;
      Communicator pair = axis.split(
          takes_part ? 0 : 1 + axis.rank(), axis.rank(),
          fmt::format("stages {} and {}, {}", stage, stage + 1, forward ? "forward" : "backward"));
      if (!takes_part) continue;
      const bool sends = axis.rank() == (forward ? left : right);
      if (sends) pair.hide();
      links_[{payload, forward ? stage : stage + 1}] =
          std::make_unique<RankLink>(pair, sends, device);
    }
  }
}

}  // namespace

std::unique_ptr<StageChannel> make_local_channel(Mailbox& mailbox, Device& device) {
  return std::make_unique<LocalChannel>(mailbox, device);
}

std::unique_ptr<StageChannel> make_rank_channel(const Communicator& axis, const Schedule& schedule,
                                                Device& device) {
  return std::make_unique<RankChannel>(axis, schedule, device);
}

}  // namespace lockstep
