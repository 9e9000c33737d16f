#if LOCKSTEP_NCCL

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <fmt/format.h>
#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <iterator>
#include <thread>
#include <utility>

#include "base/process.hpp"
#include "base/running_clock.hpp"
#include "comm/arguments.hpp"
#include "comm/gpu/nccl_core.hpp"
#include "lockstep/error.hpp"
#include "lockstep/units.hpp"

namespace lockstep {

namespace {

// How long an error that blames nobody waits for the end of a process. A connection ends before the
// process does: the driver first takes back its GPU's memory, which took more than half a second
// where five processes shared a GPU.
constexpr int64_t kExitGraceNs = 500'000'000;
constexpr int64_t kLostPeerNs = 5'000'000'000;

}  // namespace

NcclPeers::NcclPeers(Backend& host, int64_t deadline_ns, std::function<bool()> over)
    : group_(host.group()), over_(std::move(over)) {
  const ProcessHome own = ProcessHome::own();
  std::vector<ProcessHome> homes(static_cast<size_t>(host.size()));
  const auto bytes = static_cast<int64_t>(sizeof own);
  host.all_gather({&own, bytes, Dtype::kU8}, {homes.data(), bytes * host.size(), Dtype::kU8},
                  {.deadline_ns = deadline_ns, .label = "processes of the ranks"})
      ->wait();
  for (int group_rank = 0; group_rank < host.size(); ++group_rank) {
    const ProcessHome& theirs = homes[static_cast<size_t>(group_rank)];
    if (!own.numbers_as(theirs) || theirs.pid == own.pid) continue;
    peers_.push_back({group_rank, PeerProcess(static_cast<pid_t>(theirs.pid))});
  }
}

void NcclPeers::blaming(const Fingerprint& call, const std::function<void()>& part) const {
  try {
    part();
  } catch (const Error& error) {
    const auto* of_rank = dynamic_cast<const RankError*>(&error);
    if (of_rank != nullptr && of_rank->blamed_rank() >= 0) throw;
    if (error.code() == Code::kRankAbsent) {
      throw_ended(call);
      throw_stopped(call);
      throw;
    }
    const bool lost_peer = error.code() == Code::kRankFailed;
    const int64_t until_ns = running_ns() + (lost_peer ? kLostPeerNs : kExitGraceNs);
    while (running_ns() < until_ns && !peers_.empty() && !over_()) {
      throw_ended(call);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    throw;
  }
}

void NcclPeers::throw_ended(const Fingerprint& call) const {
  for (const auto& [group_rank, process] : peers_) {
    if (process.ended()) {
      throw_rank_failed(group_, call, group_rank,
                        fmt::format("died: process {} has ended", process.pid()));
    }
  }
}

void NcclPeers::throw_stopped(const Fingerprint& call) const {
  for (const auto& [group_rank, process] : peers_) {
    if (!process.stopped()) continue;
    const int rank = group_.world_ranks[static_cast<size_t>(group_rank)];
    throw RankError(
        Code::kRankAbsent, rank,
        fmt::format("{}: rank {} came, but does not go on: {}", describe_in(group_, call), rank,
                    process.state()),
        fmt::format("let it go on (kill -CONT {}), or start the ranks again", process.pid()));
  }
}

namespace {

using WriteValue = CUresult (*)(CUstream, CUdeviceptr, cuuint32_t, unsigned int);

// A function of the driver, which this library is not linked with: it must load on machines without
// a GPU.
WriteValue write_value() {
  static const auto function = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult status{};
    check_cuda(cudaGetDriverEntryPointByVersion("cuStreamWriteValue32", &found, 12000,
                                                cudaEnableDefault, &status),
               "cudaGetDriverEntryPointByVersion");
    if (status != cudaDriverEntryPointSuccess) {
      throw Error(Code::kBackend, "the NVIDIA driver has no cuStreamWriteValue32",
                  "update the driver, or use --backend shm or gloo");
    }
    return reinterpret_cast<WriteValue>(found);
  }();
  return function;
}

}  // namespace

NcclProgress::NcclProgress(CudaStream stream) : stream_(stream), words_(2 * sizeof(uint32_t)) {
  for (int word = 0; word < 2; ++word) {
    reinterpret_cast<uint32_t*>(words_.data())[word] = 0;
  }
}

uint32_t NcclProgress::queue(const std::function<void()>& call) {
  ++number_;
  mark(0, number_);
  call();
  mark(1, number_);
  return number_;
}

void NcclProgress::mark(int word, uint32_t number) const {
  const auto at = reinterpret_cast<CUdeviceptr>(reinterpret_cast<uint32_t*>(words_.data()) + word);
  if (write_value()(stream_, at, number, 0) != CUDA_SUCCESS) {
    check_cuda(cudaStreamQuery(stream_), "cuStreamWriteValue32");
    throw Error(Code::kBackend, "cuStreamWriteValue32 failed",
                "update the NVIDIA driver, or use --backend shm or gloo");
  }
}

// Compares the difference, since numbers wrap around to 0.
bool NcclProgress::has_reached(int word, uint32_t number) const {
  auto& written = reinterpret_cast<uint32_t*>(words_.data())[word];
  const uint32_t latest = std::atomic_ref(written).load(std::memory_order_acquire);
  return static_cast<int32_t>(latest - number) >= 0;
}

namespace {

constexpr auto kLookPeriod = std::chrono::milliseconds(5);

[[noreturn]] void throw_overdue(const Group& group, const QueuedCall& queued) {
  throw RankError(
      Code::kRankAbsent, -1,
      fmt::format("{}: all ranks came, but their GPUs did not finish within {}",
                  describe_in(group, queued.call),
                  format_seconds(static_cast<double>(queued.limit_ns) * 1e-9)),
      "see whether a rank's process or GPU hangs; where one only computes long, give it more time "
      "with --timeout of `lockstep run` or LOCKSTEP_TIMEOUT_S");
}

}  // namespace

NcclWatch::NcclWatch(int gpu, const Group& group, const NcclPeers& peers,
                     std::vector<NcclComm*> comms, Fail fail)
    : gpu_(gpu), group_(group), peers_(peers), comms_(std::move(comms)), fail_(std::move(fail)) {
  thread_ = start_quiet_thread([this] { work(); });
}

NcclWatch::~NcclWatch() {
  stop();
}

void NcclWatch::stop() noexcept {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void NcclWatch::follow(std::shared_ptr<QueuedCall> queued) {
  QueuedCalls ended;
  {
    const std::lock_guard lock(mutex_);
    new_calls_.push_back(std::move(queued));
    ended.swap(ended_);
  }
  changed_.notify_all();
}

void NcclWatch::work() {
  QueuedCalls calls;
  try {
    check_cuda(cudaSetDevice(gpu_), "cudaSetDevice");
    // Another thread may capture a graph, which must not be spoiled by what NCCL does here.
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    check_cuda(cudaThreadExchangeStreamCaptureMode(&mode), "cudaThreadExchangeStreamCaptureMode");
    for (;;) {
      {
        std::unique_lock lock(mutex_);
        const auto has_work = [&] { return stopping_ || !new_calls_.empty(); };
        if (calls.empty()) {
          changed_.wait(lock, has_work);
        } else {
          // One look in a period is enough, however many calls there are.
          changed_.wait_for(lock, kLookPeriod, [&] { return stopping_; });
        }
        if (stopping_) return;
        std::move(new_calls_.begin(), new_calls_.end(), std::back_inserter(calls));
        new_calls_.clear();
      }
      set_aside_ended(calls);
      if (!calls.empty()) look_after_all(calls);
    }
  } catch (...) {
    fail_(std::current_exception());
  }
}

// See NcclProgress: from here on CUDA is not called before fail_.
void NcclWatch::set_aside_ended(QueuedCalls& calls) {
  const auto ended = std::stable_partition(calls.begin(), calls.end(), [](const auto& queued) {
    return !queued->progress->has_ended(queued->number);
  });
  const std::lock_guard lock(mutex_);
  ended_.insert(ended_.end(), std::move_iterator(ended), std::move_iterator(calls.end()));
  calls.erase(ended, calls.end());
}

void NcclWatch::look_after_all(const QueuedCalls& calls) const {
  peers_.blaming(calls.front()->call, [&] {
    for (NcclComm* comm : comms_) comm->check_health();
  });
  for (const auto& queued : calls) {
    peers_.blaming(queued->call, [&] { require_in_time(*queued); });
  }
}

void NcclWatch::require_in_time(QueuedCall& queued) const {
  const int64_t now_ns = running_ns();
  if (queued.started_ns == 0 && queued.progress->has_begun(queued.number)) {
    queued.started_ns = now_ns;
  }
  if (queued.started_ns != 0 && now_ns - queued.started_ns > queued.limit_ns) {
    throw_overdue(group_, queued);
  }
}

namespace {

constexpr int kSenders = 1;    // carries senders' announcements and other one-way traffic
constexpr int kReceivers = 2;  // carries receivers' announcements
constexpr int64_t kQueuedWorkNs = 30'000'000'000;  // for queued work to end

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
  control.channel(kSenders)
      .broadcast({&ids, sizeof ids, Dtype::kU8}, 0,
                 {.deadline_ns = deadline_ns, .label = "NCCL's id"})
      ->wait();
  return ids;
}

std::shared_ptr<QueuedCall> make_queued(const Fingerprint& call, const CallContext& context) {
  auto queued = std::make_shared<QueuedCall>();
  queued->call = call;
  queued->limit_ns = std::max<int64_t>(0, context.deadline_ns - running_ns());
  return queued;
}

}  // namespace

NcclCore::NcclCore(std::unique_ptr<GpuControl> control, int gpu, int64_t deadline_ns)
    : gpu_(gpu),
      control_(std::move(control)),
      peers_(control_->channel(kSenders), deadline_ns,
             [this] { return leaving_ || control_->broken(); }),
      progress_(stream_.get()),
      message_progress_(message_stream_.get()),
      own_messages_(group()) {
  const Ids ids = agree_on_ids(*control_, deadline_ns);
  comm_.emplace(ids.collectives, group().rank, group().size(), deadline_ns);
  std::vector<NcclComm*> comms = {&*comm_};
  if (group().size() > 1) {
    messages_.emplace(ids.messages, group().rank, group().size(), deadline_ns);
    comms.push_back(&*messages_);
  }
  control_->session().on_failure([comms](const std::exception_ptr&) {
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
    control_->session().abort("failed with an exception");
  } else {
    finish_queued();
  }
  leaving_ = true;
  watch_.reset();
  control_->session().on_failure(nullptr);
  try {
    const GpuGuard on_gpu(gpu_);
    messages_.reset();
    comm_.reset();
  } catch (const std::exception&) {
    // The GPU is gone, and its queued work with it.
  }
}

void NcclCore::finish_queued() noexcept {
  try {
    const GpuGuard on_gpu(gpu_);
    const int64_t until_ns = running_ns() + kQueuedWorkNs;
    while (!control_->broken() && !(stream_.idle() && message_stream_.idle()) &&
           running_ns() < until_ns) {
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  } catch (const std::exception&) {
    // The GPU has failed: nothing is queued there any more.
  }
}

void NcclCore::guarded(const std::function<void()>& action) {
  const GpuGuard on_gpu(gpu_);
  try {
    control_->guarded(action);
  } catch (...) {
    queue_.clear();
    message_queue_.clear();
    throw;
  }
}

std::shared_ptr<NcclCore::Task> NcclCore::begin(const Fingerprint& what, const CallContext& context,
                                                Body body, std::span<const std::byte> note,
                                                Check check) {
  check_not_captured(context.stream, operation_name(what.operation));
  auto task = std::make_shared<Task>();
  guarded([&] {
    const Fingerprint numbered = control_->number(what, context);
    task->queued = make_queued(numbered, context);
    task->deadline_ns = context.deadline_ns;
    task->stream = context.stream;
    task->body = std::move(body);
    if (task->body) task->queued->ready.record(task->stream);
    task->check = std::move(check);
    task->agreement = control_->agree(numbered, context, note);
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
    if (task.body) task.queued->done.hold(task.stream);
  });
}

// In the order of begin() on every rank, whichever task is advanced first.
void NcclCore::launch_front() {
  const std::shared_ptr<Task> task = std::move(queue_.front());
  queue_.pop_front();
  if (task->check) task->check(*task->agreement);
  if (task->body) {
    QueuedCall& queued = *task->queued;
    queued.ready.hold(stream_.get());
    queue_on(progress_, queued, [&] {
      task->body({*comm_, group(), stream_.get(), task->deadline_ns}, task->agreement->calls());
    });
    queued.done.record(stream_.get());
    watch_->follow(task->queued);
  }
  task->launched = true;
}

void NcclCore::queue_on(NcclProgress& progress, QueuedCall& queued,
                        const std::function<void()>& part) const {
  queued.progress = &progress;
  queued.number = progress.queue([&] { peers_.blaming(queued.call, part); });
}

std::shared_ptr<NcclCore::MessageTask> NcclCore::begin_send(const ConstBuffer& buffer, int to,
                                                            int tag, const CallContext& context) {
  const int64_t sequence = control_->session().next_sent(to);
  return begin_message(
      make_message_fingerprint(Operation::kSend, sequence, buffer, tag, context.label),
      {.sends = true, .data = const_cast<void*>(buffer.data), .bytes = buffer.bytes(), .peer = to},
      context);
}

std::shared_ptr<NcclCore::MessageTask> NcclCore::begin_recv(const Buffer& buffer, int from, int tag,
                                                            const CallContext& context) {
  const int64_t sequence = control_->session().next_received(from);
  const ConstBuffer expected{buffer.data, buffer.count, buffer.dtype};
  return begin_message(
      make_message_fingerprint(Operation::kRecv, sequence, expected, tag, context.label),
      {.sends = false, .data = buffer.data, .bytes = buffer.bytes(), .peer = from}, context);
}

// Both sides learn what the other has called before either moves data.
std::shared_ptr<NcclCore::MessageTask> NcclCore::begin_message(const Fingerprint& own,
                                                               const NcclTransfer::Message& message,
                                                               const CallContext& context) {
  check_not_captured(context.stream, operation_name(own.operation));
  auto task = std::make_shared<MessageTask>();
  guarded([&] {
    task->queued = make_queued(own, context);
    task->queued->ready.record(context.stream);
    task->deadline_ns = context.deadline_ns;
    task->stream = context.stream;
    task->message = message;
    const Fingerprint& kept = task->queued->call;
    const CallContext part{.deadline_ns = context.deadline_ns, .part_of = &kept};
    const ConstBuffer mine{&kept, sizeof kept, Dtype::kU8};
    const Buffer other{&task->theirs, sizeof task->theirs, Dtype::kU8};
    Backend& outgoing = control_->channel(message.sends ? kSenders : kReceivers);
    Backend& incoming = control_->channel(message.sends ? kReceivers : kSenders);
    task->sent = outgoing.send(mine, message.peer, 0, part);
    task->received = incoming.recv(other, message.peer, 0, part);
    message_queue_.push_back(task);
  });
  return task;
}

bool NcclCore::advance(const MessageTask& task) {
  if (task.launched) return true;
  guarded([&] {
    bool ready = true;
    for (const auto& each : message_queue_) {
      ready = each->sent->advance() && each->received->advance() && ready;
    }
    if (ready) launch_messages();
  });
  return task.launched;
}

void NcclCore::finish(const MessageTask& task) {
  guarded([&] {
    if (!task.launched) launch_messages();
    task.queued->done.hold(task.stream);
  });
}

void NcclCore::launch_messages() {
  std::vector<NcclTransfer::Message> group_of_messages;
  int64_t deadline_ns = 0;
  for (const auto& task : message_queue_) {
    task->sent->wait();
    task->received->wait();
    const int here = group().rank;
    const int peer = task->message.peer;
    const Fingerprint& own = task->queued->call;
    if (task->message.sends) {
      require_same_message(group(), here, own, peer, task->theirs);
    } else {
      require_same_message(group(), peer, task->theirs, here, own);
    }
    task->queued->ready.hold(message_stream_.get());
    group_of_messages.push_back(task->message);
    deadline_ns = std::max(deadline_ns, task->deadline_ns);
  }
  const auto launched = std::exchange(message_queue_, {});
  if (launched.empty()) return;
  queue_on(message_progress_, *launched.front()->queued, [&] {
    NcclTransfer(*messages_, group(), message_stream_.get(), deadline_ns)
        .messages(group_of_messages);
  });
  for (const auto& task : launched) {
    task->queued->progress = launched.front()->queued->progress;
    task->queued->number = launched.front()->queued->number;
    task->queued->done.record(message_stream_.get());
    watch_->follow(task->queued);
    task->launched = true;
  }
}

std::unique_ptr<GpuControl> NcclCore::split(int color, int key, std::string_view group_name,
                                            const CallContext& context) {
  Fingerprint what;
  what.operation = Operation::kSplit;
  const auto task = begin(what, context, nullptr);
  finish(*task);
  std::unique_ptr<GpuControl> part;
  guarded([&] { part = control_->split(color, key, group_name, task->queued->call, context); });
  return part;
}

}  // namespace lockstep

#endif
