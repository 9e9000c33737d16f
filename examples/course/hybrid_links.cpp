#include "course/hybrid_links.hpp"

#include <torch/torch.h>

#include <algorithm>
#include <functional>
#include <vector>

#include "lockstep/clock.hpp"
#include "lockstep/record.hpp"

namespace course {
namespace {

using lockstep::Communicator;

constexpr int64_t kSmallBytes = 4 << 10;
constexpr int64_t kMessageBytes = 1 << 20;    // an activation
constexpr int64_t kGradientBytes = 16 << 20;  // more than caches hold
constexpr int kTries = 9;

// `exchange` passes that many bytes.
double median_ms(int64_t bytes, const std::function<void(int64_t bytes)>& exchange) {
  exchange(bytes);  // memory is touched for the first time
  std::vector<double> times_ms;
  for (int i = 0; i < kTries; ++i) {
    const int64_t begun_ns = lockstep::monotonic_ns();
    exchange(bytes);
    times_ms.push_back(static_cast<double>(lockstep::monotonic_ns() - begun_ns) * 1e-6);
  }
  return lockstep::summarize(times_ms).median;
}

// A line through two points. `sent_share`: bytes a rank sends of each byte exchanged.
Link fit(const std::function<void(int64_t bytes)>& exchange, int64_t large_bytes,
         double sent_share) {
  const double small_ms = median_ms(kSmallBytes, exchange);
  const double large_ms = median_ms(large_bytes, exchange);
  const double byte_ms =
      std::max(0.0, large_ms - small_ms) / static_cast<double>(large_bytes - kSmallBytes);
  return {.call_ms = std::max(0.0, small_ms - byte_ms * static_cast<double>(kSmallBytes)),
          .byte_ms = byte_ms / sent_share};
}

Link measure_all_reduce(const Communicator& comm, torch::Device device, int64_t large_bytes) {
  if (comm.size() == 1) return {};
  const auto buffer = comm.allocate(large_bytes / 4, torch::TensorOptions(device));
  const double ranks = comm.size();
  return fit(
      [&](int64_t bytes) {
        comm.all_reduce(buffer.narrow(0, 0, bytes / 4), lockstep::ReduceOp::kSum,
                        {.label = "measuring a link"});
      },
      large_bytes, 2 * (ranks - 1) / ranks);
}

// Two ranks send a tensor to and fro. All learn what the first two found.
Link measure_messages(const Communicator& comm, torch::Device device) {
  if (comm.size() == 1) return {};
  Link link;
  if (comm.rank() < 2) {
    const auto tensor = torch::zeros({kMessageBytes / 4}, torch::TensorOptions(device));
    const int other = 1 - comm.rank();
    link = fit(
        [&](int64_t bytes) {
          const auto part = tensor.narrow(0, 0, bytes / 4);
          const auto send = [&] { comm.send(part, other, {.label = "measuring a link"}); };
          const auto receive = [&] { comm.recv(part, other, {.label = "measuring a link"}); };
          if (comm.rank() == 0) send();
          receive();
          if (comm.rank() == 1) send();
        },
        kMessageBytes, 1);
  }
  const auto found = torch::tensor({link.call_ms / 2, link.byte_ms / 2}, torch::kDouble);
  comm.broadcast(found, 0, {.label = "what a link costs"});
  return {.call_ms = found[0].item<double>(), .byte_ms = found[1].item<double>()};
}

// From one device of this process to the next: its worker takes the tensor over.
Link measure_handover(const lockstep::Devices& devices) {
  const auto tensor = torch::zeros(
      {kMessageBytes}, torch::TensorOptions(torch::kUInt8).device(devices[0].torch_device()));
  return fit(
      [&](int64_t bytes) {
        devices[1].run("measuring a link", [&] {
          const auto taken = tensor.narrow(0, 0, bytes)
                                 .to(devices[1].torch_device(), torch::kUInt8,
                                     /*non_blocking=*/true, /*copy=*/true);
          devices[1].synchronize();
        });
      },
      kMessageBytes, 1);
}

}  // namespace

Links measure_links(const HybridPlan& plan, const lockstep::World& world,
                    const lockstep::Mesh& mesh) {
  const auto device = world.device().torch_device();
  Links links{.data = measure_all_reduce(mesh.axis("dp"), device, kGradientBytes),
              .pipeline = measure_messages(mesh.axis("pp"), device),
              .tensor = measure_all_reduce(mesh.axis("tp"), device, kMessageBytes)};
  if (!plan.over_ranks && plan.schedule.places() > 1) {
    links.pipeline = measure_handover(world.devices());
  }
  return links;
}

}  // namespace course
