#if LOCKSTEP_NCCL

#include "comm/gpu/nccl_core.hpp"

#include <algorithm>
#include <chrono>
#include <exception>
#include <thread>

#include "base/running_clock.hpp"
#include "comm/make_call.hpp"
#include "lockstep/error.hpp"

namespace lockstep {
namespace {

constexpr int kSenders = 1;    // channel of what senders tell, and of what else goes one way
constexpr int kReceivers = 2;  // channel of what receivers tell
constexpr int64_t kPatienceNs = 30'000'000'000;  // for queued work to end

// Made by the group's first rank.
struct Ids {
  ncclUniqueId collectives;
  ncclUniqueId messages;
};

Ids agree_on_ids(GpuControl& control, int64_t deadline_ns) {
  Ids ids{};
  if (control.rank() == 0) {
    check_nccl(ncclGetUniqueId(&ids.collectives), nullptr, "ncclGetUniqueId");
    check_nccl(ncclGetUniqueId(&ids.messages), nullptr, "ncclGetUniqueId");
  }
  control.channel(kSenders).broadcast({&ids, sizeof ids, Dtype::kU8}, 0,
                                      {.deadline_ns = deadline_ns, .label = "NCCL's id"});
  return ids;
}

std::shared_ptr<NcclFlight> make_flight(const Call& call, const CallContext& context) {
  auto flight = std::make_shared<NcclFlight>();
  flight->call = call;
  flight->limit_ns = std::max<int64_t>(0, context.deadline_ns - running_ns());
  return flight;
}

}  // namespace

NcclCore::NcclCore(std::unique_ptr<GpuControl> control, int gpu, int64_t deadline_ns)
    : gpu_(gpu),
      control_(std::move(control)),
      peers_(control_->channel(kSenders), deadline_ns),
      progress_(stream_.get()),
      message_progress_(message_stream_.get()),
      own_messages_(group()),
      sent_(static_cast<size_t>(group().size())),
      received_(static_cast<size_t>(group().size())) {
  const Ids ids = agree_on_ids(*control_, deadline_ns);
  comm_.emplace(ids.collectives, group().rank, group().size(), deadline_ns);
  std::vector<NcclComm*> comms = {&*comm_};
  if (group().size() > 1) {
    messages_.emplace(ids.messages, group().rank, group().size(), deadline_ns);
    comms.push_back(&*messages_);
  }
  control_->on_failure([comms](const std::exception_ptr&) {
    for (NcclComm* comm : comms) comm->abort();
  });
  watch_.emplace(gpu_, group(), peers_, comms, [this](const std::exception_ptr& error) {
    try {
      control_->guarded([&] { std::rethrow_exception(error); });
    } catch (...) {
      // Kept by the control: every later call throws it.
    }
  });
}

// Queued work ends before NCCL does, which would cut it off; the watch still sees peers that die.
NcclCore::~NcclCore() {
  if (std::uncaught_exceptions() > 0) {
    control_->abort("failed with an exception");
  } else {
    finish_queued();
  }
  watch_.reset();
  control_->on_failure(nullptr);
  try {
    const GpuGuard on_gpu(gpu_);
    messages_.reset();
    comm_.reset();
  } catch (const std::exception&) {
    // The GPU is gone, and with it what was to be ended there.
  }
}

void NcclCore::finish_queued() noexcept {
  try {
    const GpuGuard on_gpu(gpu_);
    const int64_t until_ns = running_ns() + kPatienceNs;
    while (!control_->broken() && !(stream_.idle() && message_stream_.idle()) &&
           running_ns() < until_ns) {
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  } catch (const std::exception&) {
    // The GPU has failed: nothing is queued there any more.
  }
}

// A call that fails because the communicator was given up meanwhile throws what it was given up
// for.
void NcclCore::guarded(const std::function<void()>& action) {
  const GpuGuard on_gpu(gpu_);
  try {
    control_->guarded(action);
  } catch (...) {
    queue_.clear();
    control_->guarded([] {});
    throw;
  }
}

std::shared_ptr<NcclCore::Task> NcclCore::begin(const Call& what, const CallContext& context,
                                                Body body) {
  check_not_captured(context.stream, operation_name(what.operation));
  auto task = std::make_shared<Task>();
  guarded([&] {
    const Call numbered = control_->number(what, context);
    task->flight = make_flight(numbered, context);
    task->deadline_ns = context.deadline_ns;
    task->stream = context.stream;
    task->body = std::move(body);
    if (task->body) task->flight->ready.record(task->stream);
    task->agreement = control_->agree(numbered, context);
    queue_.push_back(task);
  });
  return task;
}

bool NcclCore::advance(const Task& task) {
  if (task.launched) return true;
  guarded([&] {
    while (!queue_.empty() && queue_.front()->agreement->advance()) launch_front();
  });
  return task.launched;
}

void NcclCore::finish(const Task& task) {
  guarded([&] {
    while (!task.launched) {
      queue_.front()->agreement->wait();
      launch_front();
    }
    if (task.body) task.flight->done.hold(task.stream);
  });
}

// In the order of begin() on every rank, whoever is asked to advance first.
void NcclCore::launch_front() {
  const std::shared_ptr<Task> task = std::move(queue_.front());
  queue_.pop_front();
  if (task->body) {
    NcclFlight& flight = *task->flight;
    flight.ready.hold(stream_.get());
    queue_on(progress_, flight, [&] {
      task->body({*comm_, group(), stream_.get(), task->deadline_ns}, task->agreement->calls());
    });
    flight.done.record(stream_.get());
    watch_->follow(task->flight);
  }
  task->launched = true;
}

void NcclCore::queue_on(NcclProgress& progress, NcclFlight& flight,
                        const std::function<void()>& part) const {
  flight.progress = &progress;
  flight.number = progress.queue([&] { peers_.blaming(flight.call, part); });
}

void NcclCore::send(const ConstBuffer& buffer, int to, int tag, const CallContext& context) {
  check_not_captured(context.stream, "send");
  guarded([&] {
    if (to == group().rank) return own_messages_.send(buffer, tag, context);
    const int64_t sequence = ++sent_[static_cast<size_t>(to)];
    message(make_message_call(Operation::kSend, sequence, buffer, tag, context.label), to, context,
            [&](const NcclTransfer& transfer) { transfer.send(buffer, to); });
  });
}

void NcclCore::recv(const Buffer& buffer, int from, int tag, const CallContext& context) {
  check_not_captured(context.stream, "recv");
  guarded([&] {
    if (from == group().rank) return own_messages_.recv(buffer, tag, context);
    const int64_t sequence = ++received_[static_cast<size_t>(from)];
    const ConstBuffer expected{buffer.data, buffer.count, buffer.dtype};
    message(make_message_call(Operation::kRecv, sequence, expected, tag, context.label), from,
            context, [&](const NcclTransfer& transfer) { transfer.recv(buffer, from); });
  });
}

void NcclCore::message(const Call& own, int peer, const CallContext& context,
                       const std::function<void(const NcclTransfer&)>& move) {
  const auto flight = make_flight(own, context);
  flight->ready.record(context.stream);
  rendezvous(own, peer, context.deadline_ns);
  flight->ready.hold(message_stream_.get());
  queue_on(message_progress_, *flight, [&] {
    move({*messages_, group(), message_stream_.get(), context.deadline_ns});
  });
  flight->done.record(message_stream_.get());
  flight->done.hold(context.stream);
  watch_->follow(flight);
}

// Both sides learn what the other has called before either moves data.
void NcclCore::rendezvous(const Call& own, int peer, int64_t deadline_ns) {
  Call theirs;
  const ConstBuffer mine{&own, sizeof own, Dtype::kU8};
  const Buffer other{&theirs, sizeof theirs, Dtype::kU8};
  const CallContext context{.deadline_ns = deadline_ns, .label = {}};
  const bool sends = own.operation == Operation::kSend;
  try {
    if (sends) {
      control_->channel(kSenders).send(mine, peer, 0, context);
      control_->channel(kReceivers).recv(other, peer, 0, context);
    } else {
      control_->channel(kSenders).recv(other, peer, 0, context);
      control_->channel(kReceivers).send(mine, peer, 0, context);
    }
  } catch (const Error&) {
    rethrow_as_part_of(group(), own);
  }
  const int here = group().rank;
  if (sends) return require_same_message(group(), here, own, peer, theirs);
  require_same_message(group(), peer, theirs, here, own);
}

std::unique_ptr<GpuControl> NcclCore::split(int colour, int key, std::string_view group_name,
                                            const CallContext& context) {
  Call what;
  what.operation = Operation::kSplit;
  const auto task = begin(what, context, nullptr);
  finish(*task);
  std::unique_ptr<GpuControl> part;
  guarded([&] { part = control_->split(colour, key, group_name, task->flight->call, context); });
  return part;
}

}  // namespace lockstep

#endif
