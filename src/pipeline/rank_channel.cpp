#include "pipeline/rank_channel.hpp"

#include <c10/core/StreamGuard.h>
#include <fmt/format.h>

#include <optional>

#include "device/dtype_map.hpp"
#include "device/own_stream.hpp"
#include "lockstep/error.hpp"
#include "lockstep/tensor_text.hpp"
#include "net/quiet_thread.hpp"
#include "torch_compat.hpp"

namespace lockstep {
namespace {

constexpr size_t kMostDimensions = 10;

std::string label_of(const ParcelName& name) {
  return fmt::format("{} of stage {}, micro-batch {}",
                     name.cargo == Cargo::kActivation ? "output" : "input gradient",
                     name.from_stage, name.micro_batch);
}

std::string text_of(torch::ScalarType dtype, const std::vector<int64_t>& sizes) {
  return fmt::format("{} {}", shape_text(sizes), dtype_text(dtype));
}

}  // namespace

RankChannel::RankChannel(const Communicator& pair, bool sends, Device& device)
    : pair_(pair), device_(device) {
  if (sends) postman_ = start_quiet_thread([this] { deliver_letters(); });
}

RankChannel::~RankChannel() {
  if (!postman_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
  }
  changed_.notify_all();
  postman_.join();
}

// The ranks of an axis step inside the same Autocast or outside any: both ends come to the same.
RankChannel::Circumstances RankChannel::circumstances(int64_t rows) const {
  const auto autocast = compat::AutocastSwitch::get(device_.torch_device().type());
  return {rows, autocast.enabled ? static_cast<int>(autocast.dtype) : -1};
}

void RankChannel::send(const ParcelName& name, const torch::Tensor& tensor, int64_t rows) {
  const Shape shape{tensor.scalar_type(), tensor.sizes().vec()};
  const auto [known, is_new] = agreed_.emplace(circumstances(rows), shape);
  if (known->second != shape) {
    throw Error(Code::kStageMismatch,
                fmt::format("the {} is {}; for {} rows it was {} before", label_of(name),
                            text_of(shape.dtype, shape.sizes), rows,
                            text_of(known->second.dtype, known->second.sizes)),
                "between ranks a stage's output has the same shape and dtype in every step");
  }
  {
    const std::lock_guard lock(mutex_);
    if (error_) std::rethrow_exception(error_);
    letters_.push_back({.parcel = {tensor.contiguous(), StreamOrder::now(device_), &device_},
                        .label = label_of(name),
                        .tag = name.micro_batch,
                        .announce = is_new});
  }
  changed_.notify_all();
  messages_ += 1;
  bytes_ += static_cast<int64_t>(tensor.nbytes());
}

// A GPU's sends are queued on a stream of the line's own, for the reason of Note [A thread for each
// line]: what waits for the receiver there must not hold back what the stage computes next.
void RankChannel::deliver_letters() {
  std::optional<OwnStream> own_stream;
  std::optional<c10::StreamGuard> on_it;
  if (device_.plan().kind == DeviceKind::kCuda) {
    own_stream.emplace(device_.torch_device());
    on_it.emplace(own_stream->get());
  }
  for (;;) {
    Letter letter;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return closing_ || !letters_.empty(); });
      if (letters_.empty() || error_) return;
      letter = std::move(letters_.front());
      letters_.pop_front();
    }
    try {
      const torch::Tensor& tensor = letter.parcel.tensor;
      if (letter.announce) send_shape({tensor.scalar_type(), tensor.sizes().vec()}, letter.label);
      letter.parcel.order.hold_back(device_);
      keep_for_current_stream(tensor);
      pair_.send(tensor, peer(), {.label = letter.label, .tag = letter.tag});
    } catch (...) {
      const std::lock_guard lock(mutex_);
      error_ = std::current_exception();
      return;
    }
  }
}

void RankChannel::send_shape(const Shape& shape, const std::string& label) const {
  if (shape.sizes.size() > kMostDimensions) {
    throw Error(Code::kStageMismatch,
                fmt::format("the {} has {} dimensions", label, shape.sizes.size()),
                fmt::format("between ranks a tensor has {} at most", kMostDimensions));
  }
  std::vector<int64_t> header(2 + kMostDimensions, 0);
  header[0] = static_cast<int64_t>(shape.dtype);
  header[1] = static_cast<int64_t>(shape.sizes.size());
  std::copy(shape.sizes.begin(), shape.sizes.end(), header.begin() + 2);
  pair_.send(torch::tensor(header, torch::kInt64), peer(), {.label = "shape of the " + label});
}

RankChannel::Shape RankChannel::receive_shape(const std::string& label) const {
  const torch::Tensor header = torch::zeros({2 + kMostDimensions}, torch::kInt64);
  pair_.recv(header, peer(), {.label = "shape of the " + label});
  const int64_t* values = header.data_ptr<int64_t>();
  return {static_cast<torch::ScalarType>(values[0]), {values + 2, values + 2 + values[1]}};
}

torch::Tensor RankChannel::receive(const ParcelName& name, int64_t rows) {
  const std::string label = label_of(name);
  const Circumstances now = circumstances(rows);
  auto known = agreed_.find(now);
  if (known == agreed_.end()) known = agreed_.emplace(now, receive_shape(label)).first;
  const auto& [dtype, sizes] = known->second;
  const torch::Tensor tensor =
      torch::empty(sizes, torch::TensorOptions(dtype).device(device_.torch_device()));
  pair_.recv(tensor, peer(), {.label = label, .tag = name.micro_batch});
  return tensor;
}

}  // namespace lockstep
