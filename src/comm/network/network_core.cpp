#include <fmt/format.h>
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <utility>

#include "base/file.hpp"
#include "base/process.hpp"
#include "base/running_clock.hpp"
#include "comm/arguments.hpp"
#include "comm/network/network_core.hpp"
#include "comm/network/tcp_control.hpp"
#include "lockstep/error.hpp"

namespace lockstep {

namespace {

// The module connects after the rendezvous: a peer that needs longer than this will not connect.
constexpr int64_t kConnectTimeoutMs = 30'000;

constexpr const char* kHelp =
    "see whether all ranks still run, and whether a firewall stands between the hosts: ranks "
    "connect to each other at ports that the system chooses";

// The files that a rank opens for its group: a control connection to each peer, and the module's
// listener and connection.
constexpr int kModuleFilesPerPeer = 2;
int files_of(const Group& group) {
  constexpr int kOtherFiles = 64;
  return (1 + kModuleFilesPerPeer) * group.size() + kOtherFiles;
}

[[noreturn]] void fail(const BackendInfo& info, const Group& group, const std::string& what,
                       const std::string& why) {
  const bool enough_files = make_room_for_files(kModuleFilesPerPeer * group.size());
  throw Error(Code::kRendezvous, fmt::format("{} {}: {}", info.name, what, why),
              info.has_own_launcher()
                  ? fmt::format("start the ranks with the {}, or the {}, that {} was built with",
                                info.launchers[0], info.launchers[1], info.module->file)
                  : limit_help(enough_files ? 0 : EMFILE, kHelp, files_of(group)));
}

// A rank ended, or did not come in time, before all were connected.
[[noreturn]] void fail_rank(const Group& group, int group_rank, const std::string& what) {
  const int rank = group.world_ranks.at(static_cast<size_t>(group_rank));
  throw RankError(
      Code::kRendezvous, rank,
      fmt::format("group {}: rank {} {} before all ranks were connected", group.name, rank, what),
      kHelp);
}

// While ranks find each other: the next note of each of these.
std::vector<std::string> take_notes(const Group& group, TcpControl& link,
                                    std::span<const int> peers, int64_t deadline_ns) {
  auto gathered = link.gather(TcpControl::Frame::kNote, peers, deadline_ns);
  if (const auto* trouble = std::get_if<TcpControl::Trouble>(&gathered)) {
    const bool late = trouble->kind == TcpControl::Trouble::Kind::kLate;
    fail_rank(group, late ? trouble->missing.front() : trouble->rank,
              late ? "did not come in time" : "ended");
  }
  return std::get<std::vector<std::string>>(std::move(gathered));
}

}  // namespace

TransportData::TransportData(const BackendInfo& info, const Group& group,
                             const std::string& address, TcpControl& link, int64_t deadline_ns)
    : api_(load_transport(*info.module)) {
  const int64_t left_ms = std::max<int64_t>((deadline_ns - running_ns()) / 1'000'000, 1);
  LockstepTransportMessage message{};
  if (api_.create(group.rank, group.size(), address.c_str(), std::min(left_ms, kConnectTimeoutMs),
                  running_ns, &context_, &message) != LOCKSTEP_TRANSPORT_OK) {
    fail(info, group, "cannot begin at " + address, message.text);
  }
  try {
    connect(info, group, link, deadline_ns);
  } catch (...) {
    api_.destroy(context_);
    throw;
  }
}

void TransportData::connect(const BackendInfo& info, const Group& group, TcpControl& link,
                            int64_t deadline_ns) {
  LockstepTransportMessage message{};
  std::vector<int> peers;
  for (int peer = 0; peer < group.size(); ++peer) {
    if (peer == group.rank) continue;
    peers.push_back(peer);
    char bytes[LOCKSTEP_TRANSPORT_MAX_ADDRESS];
    size_t length = 0;
    if (api_.address(context_, peer, bytes, &length, &message) != LOCKSTEP_TRANSPORT_OK) {
      fail(info, group, "has no address", message.text);
    }
    link.send(peer, TcpControl::Frame::kNote, {bytes, length});
  }
  const std::vector<std::string> addresses = take_notes(group, link, peers, deadline_ns);
  for (size_t i = 0; i < peers.size(); ++i) {
    const std::string& theirs = addresses[i];
    if (api_.connect(context_, peers[i], theirs.data(), theirs.size(), &message) !=
        LOCKSTEP_TRANSPORT_OK) {
      fail(info, group,
           fmt::format("cannot connect to rank {}",
                       group.world_ranks.at(static_cast<size_t>(peers[i]))),
           message.text);
    }
  }
  // A rank that left now would close connections that a slower rank is still making.
  link.send_all(TcpControl::Frame::kNote, "connected");
  take_notes(group, link, peers, deadline_ns);
}

namespace {

// After a transfer broke: how long until some rank's final notice tells why.
constexpr int64_t kExplainNs = 2'000'000'000;

std::string as_bytes(const Fingerprint& call) {
  return {reinterpret_cast<const char*>(&call), sizeof call};
}

Fingerprint from_bytes(const Group& group, int group_rank, const std::string& bytes) {
  Fingerprint call;
  std::memcpy(&call, bytes.data(), std::min(bytes.size(), sizeof call));
  if (bytes.size() >= sizeof call && is_valid(call)) return call;
  const int rank = group.world_rank(group_rank);
  throw RankError(Code::kInternal, rank,
                  fmt::format("group {}: what rank {} has sent is not a call", group.name, rank),
                  "see whether all hosts have the same version of lockstep");
}

std::vector<int> all_but(int rank, int size) {
  std::vector<int> peers;
  for (int peer = 0; peer < size; ++peer) {
    if (peer != rank) peers.push_back(peer);
  }
  return peers;
}

// The link and the address of the module's own connections.
std::unique_ptr<TcpControl> connect_link(const BackendInfo& info, Store& store, const Group& group,
                                         std::string& address, int64_t deadline_ns) {
  if (group.size() == 1) return nullptr;
  load_transport(*info.module);  // a missing module is found before anybody waits for anybody
  make_room_for_files(files_of(group));
  TcpRendezvous connected = rendezvous(store, group, address, deadline_ns);
  address = std::move(connected.address);
  return std::make_unique<TcpControl>(group.rank, std::move(connected.sockets));
}

}  // namespace

NetworkCore::Task::Task(std::shared_ptr<NetworkCore> core, const Fingerprint& what,
                        const CallContext& context, Body body)
    : call(what),
      begun_ns(running_ns()),
      deadline_ns(context.deadline_ns),
      core_(std::move(core)),
      part_of_(context.part_of),
      waits_at_once_(context.waits_at_once),
      body_(std::move(body)) {
  call.set_label(context.label);
}

// The buffers may go with the task: no thread may touch them afterwards.
NetworkCore::Task::~Task() {
  try {
    if (lane_ == nullptr || core_->done(*this)) return;
    core_->session().abort("it dropped a call that was not done");
    core_->finish(*this);
  } catch (const std::exception&) {
    // It ended, which is all that matters here; later calls tell why.
  }
}

int64_t NetworkCore::Task::waited_ns() const {
  return std::max<int64_t>(running_ns() - begun_ns, 1);
}

NetworkCore::NetworkCore(Group group, Store& store, const std::string& address, int64_t deadline_ns,
                         const BackendInfo& info)
    : info_(info),
      peers_(all_but(group.rank, group.size())),
      address_(address),
      link_(connect_link(info, store, group, address_, deadline_ns)),
      session_(std::move(group), link_.get()),
      own_messages_(session_.group()) {
  if (link_) {
    data_ = std::make_unique<TransportData>(info, session_.group(), address_, *link_, deadline_ns);
    link_->on_failure([data = data_.get()] { data->abort(); });
    session_.on_failure([data = data_.get()](const std::exception_ptr&) { data->abort(); });
  }
  collectives_.thread = start_quiet_thread([this] { work(collectives_); });
  if (link_) link_->on_survey([this] { return activity(); });
}

void NetworkCore::on_broken(std::function<void()> action) {
  if (!link_) return;
  const auto end_waits = [data = data_.get(), action = std::move(action)] {
    data->abort();
    action();
  };
  link_->on_failure(end_waits);
  session_.on_failure([end_waits](const std::exception_ptr&) { end_waits(); });
}

std::vector<std::string> NetworkCore::introduce(std::string_view own, int64_t deadline_ns) {
  std::vector<std::string> all(static_cast<size_t>(group().size()));
  all[static_cast<size_t>(group().rank)] = own;
  if (!link_) return all;
  link_->send_all(TcpControl::Frame::kNote, own);
  std::vector<std::string> theirs = take_notes(group(), *link_, peers_, deadline_ns);
  for (size_t i = 0; i < peers_.size(); ++i) {
    all[static_cast<size_t>(peers_[i])] = std::move(theirs[i]);
  }
  return all;
}

void NetworkCore::begin(Task& task) {
  const std::lock_guard lock(mutex_);
  task.call.sequence = session_.next_collective();
  push(collectives_, task);
}

void NetworkCore::number_message(Task& task) {
  const bool sends = task.call.operation == Operation::kSend;
  task.call.sequence = sends ? session_.next_sent(task.peer) : session_.next_received(task.peer);
}

void NetworkCore::begin_message(Task& task) {
  const std::lock_guard lock(mutex_);
  number_message(task);
  const bool sends = task.call.operation == Operation::kSend;
  Lane& lane = (sends ? sends_ : receives_)[task.peer];
  if (!lane.thread.joinable()) {
    lane.thread = start_quiet_thread([this, &lane] { work(lane); });
  }
  push(lane, task);
}

// Under the mutex.
void NetworkCore::push(Lane& lane, Task& task) {
  session_.throw_if_broken();
  task.state_ = Task::State::kQueued;
  task.lane_ = &lane;
  lane.queue.push_back(&task);
  if (!task.waits_at_once_) lane.changed.notify_one();
}

bool NetworkCore::done(const Task& task) {
  const std::lock_guard lock(mutex_);
  if (task.error_) std::rethrow_exception(task.error_);
  return task.state_ == Task::State::kDone;
}

void NetworkCore::finish(const Task& task) {
  // Polling interval for messages outside this core.
  constexpr std::chrono::milliseconds kPollInterval(1);
  std::unique_lock lock(mutex_);
  while (task.state_ != Task::State::kDone) {
    lock.unlock();
    const bool outside = progress_outside_ && progress_outside_();
    lock.lock();
    Lane* lane = task.lane_;
    if (task.state_ == Task::State::kDone || lane == nullptr) continue;
    if (outside) {
      lane->changed.notify_one();
      done_.wait_for(lock, kPollInterval);
    } else if (!lane->busy && lane->queue.front() == &task) {
      make_front(*lane, lock);
    } else {
      done_.wait(lock);
    }
  }
  if (task.error_) std::rethrow_exception(task.error_);
}

void NetworkCore::work(Lane& lane) {
  std::unique_lock lock(mutex_);
  for (;;) {
    lane.changed.wait(lock, [&] { return !lane.busy && (stopping_ || !lane.queue.empty()); });
    if (lane.queue.empty()) return;
    make_front(lane, lock);
  }
}

// Without the lock while the task is made; after it the task may be gone.
void NetworkCore::make_front(Lane& lane, std::unique_lock<std::mutex>& lock) {
  Task* task = lane.queue.front();
  lane.busy = true;
  lock.unlock();
  std::exception_ptr error;
  try {
    session_.guarded([&] {
      if (task->peer >= 0) return task->body_(*task, {});
      const std::vector<Fingerprint> calls = agree_on(*task);
      task->body_(*task, calls);
    });
  } catch (...) {
    error = std::current_exception();
  }
  lock.lock();
  lane.busy = false;
  lane.queue.pop_front();
  task->body_ = nullptr;
  task->error_ = error;
  task->state_ = Task::State::kDone;
  done_.notify_all();
  if (!lane.queue.empty() || stopping_) lane.changed.notify_one();
}

std::vector<std::string> NetworkCore::exchange(const Task& task, TcpControl::Frame frame,
                                               std::string_view own,
                                               const std::function<void()>& meanwhile) {
  std::vector<std::string> all(static_cast<size_t>(group().size()));
  all[static_cast<size_t>(group().rank)] = own;
  if (link_) link_->send_all(frame, own);
  if (meanwhile) meanwhile();
  if (!link_) return all;
  auto gathered = link_->gather(frame, peers_, task.deadline_ns);
  if (const auto* trouble = std::get_if<TcpControl::Trouble>(&gathered)) fail(task, *trouble);
  auto& theirs = std::get<std::vector<std::string>>(gathered);
  for (size_t i = 0; i < peers_.size(); ++i) {
    all[static_cast<size_t>(peers_[i])] = std::move(theirs[i]);
  }
  return all;
}

// Every rank sees the same fingerprints, and so finds the same mismatch by itself.
std::vector<Fingerprint> NetworkCore::agree_on(Task& task) {
  std::string own = as_bytes(task.call);
  own += task.attached_;
  task.exchanged_ = exchange(task, TcpControl::Frame::kFingerprint, own, [&] {
    if (task.preparation_) task.body_ = task.preparation_(task);
  });
  std::vector<Fingerprint> calls;
  for (size_t peer = 0; peer < task.exchanged_.size(); ++peer) {
    calls.push_back(from_bytes(group(), static_cast<int>(peer), task.exchanged_[peer]));
  }
  session_.require_agreement(calls);
  return calls;
}

const void* NetworkCore::Task::attached_by(int rank, int64_t bytes) const {
  const std::string& received = exchanged_.at(static_cast<size_t>(rank));
  if (received.size() != sizeof(Fingerprint) + static_cast<size_t>(bytes)) {
    throw Error(Code::kInternal, fmt::format("{}: rank {} sent {} with its fingerprint, not {}",
                                             describe(call), rank, received.size(), bytes));
  }
  return received.data() + sizeof(Fingerprint);
}

NetworkCore::ShownMessage::ShownMessage(NetworkCore& core, const Task& task) : core_(core) {
  const std::lock_guard lock(core_.mutex_);
  at_ = core_.messages_.insert(core_.messages_.end(), {task.call, task.peer});
}

NetworkCore::ShownMessage::~ShownMessage() {
  const std::lock_guard lock(core_.mutex_);
  core_.messages_.erase(at_);
}

void NetworkCore::send(const Task& task, const ConstBuffer& buffer) {
  const ShownMessage shown(*this, task);
  link_->send(task.peer, TcpControl::Frame::kMessage, as_bytes(task.call));
  if (buffer.count == 0) return;
  const auto outcome =
      data_->run(static_cast<uint32_t>(task.call.sequence), task.deadline_ns,
                 [&](const auto& api, auto* connections, const LockstepTransportCall& call) {
                   return api.send(connections, buffer.data, static_cast<size_t>(buffer.bytes()),
                                   task.peer, &call);
                 });
  check(task, outcome);
}

void NetworkCore::recv(const Task& task, const Buffer& buffer) {
  const ShownMessage shown(*this, task);
  const auto gathered =
      link_->gather(TcpControl::Frame::kMessage, std::span(&task.peer, 1), task.deadline_ns);
  if (const auto* trouble = std::get_if<TcpControl::Trouble>(&gathered)) fail(task, *trouble);
  const Fingerprint theirs =
      from_bytes(group(), task.peer, std::get<std::vector<std::string>>(gathered).front());
  require_same_message(group(), task.peer, theirs, group().rank, task.call);
  if (buffer.count == 0) return;
  const auto outcome =
      data_->run(static_cast<uint32_t>(task.call.sequence), task.deadline_ns,
                 [&](const auto& api, auto* connections, const LockstepTransportCall& call) {
                   return api.recv(connections, buffer.data, static_cast<size_t>(buffer.bytes()),
                                   task.peer, &call);
                 });
  check(task, outcome);
}

std::unique_ptr<TransportData::Exchange> NetworkCore::begin_exchange(const Task& task,
                                                                     uint32_t part,
                                                                     const Blocks& blocks) {
  LockstepTransportExchange* begun = nullptr;
  check(task,
        data_->run(static_cast<uint32_t>(task.call.sequence), task.deadline_ns,
                   [&](const auto& api, auto* connections, const LockstepTransportCall& call) {
                     return api.begin_exchange(connections, blocks.input, blocks.given.data(),
                                               blocks.output, blocks.taken.data(), part, &call,
                                               &begun);
                   }));
  return data_->own(begun);
}

void NetworkCore::check(const Task& task, const TransportData::Outcome& outcome) {
  if (outcome.status != LOCKSTEP_TRANSPORT_OK) fail_transfer(task, outcome.text);
}

void NetworkCore::fail_transfer(const Task& task, std::string_view what) {
  if (running_ns() >= task.deadline_ns) {
    // All ranks came to a collective, and then the data did not.
    fail_late(task, task.peer < 0 ? std::vector<int>{} : std::vector<int>{task.peer});
  }
  const auto trouble = link_->find_trouble(running_ns() + kExplainNs);
  if (trouble.kind != TcpControl::Trouble::Kind::kLate) fail(task, trouble);
  throw RankError(Code::kRankFailed, -1,
                  fmt::format("{}: a connection broke, and no rank says why: {}",
                              describe_in(group(), task.reported()), what),
                  "check the network between the hosts");
}

void NetworkCore::fail(const Task& task, const TcpControl::Trouble& trouble) {
  switch (trouble.kind) {
    case TcpControl::Trouble::Kind::kAborted:
      session_.fail_recorded(trouble.record, task.reported(), task.waited_ns());
    case TcpControl::Trouble::Kind::kStalled:
      session_.fail_stalled({task.call, task.peer}, task.reported());
    case TcpControl::Trouble::Kind::kGone:
      throw_rank_failed(group(), task.reported(), trouble.rank,
                        trouble.left ? "left: it destroyed its communicator"
                                     : "ended: its connection closed unexpectedly");
    case TcpControl::Trouble::Kind::kLate:
      break;
  }
  fail_late(task, trouble.missing);
}

void NetworkCore::fail_late(const Task& task, std::vector<int> awaited) {
  session_.fail_stalled({task.call, task.peer, std::move(awaited), task.waited_ns()},
                        task.reported());
}

// What this rank does, for peers that wait for it.
RankActivity NetworkCore::activity() {
  const std::lock_guard lock(mutex_);
  RankActivity activity;
  activity.arrived = activity.finished = session_.collectives();
  activity.waiting.assign(messages_.begin(), messages_.end());
  if (!collectives_.queue.empty()) {
    const Fingerprint& call = collectives_.queue.front()->call;
    activity.arrived = call.sequence;
    activity.finished = call.sequence - 1;
    activity.waiting.push_back({call, -1});
  }
  return activity;
}

void NetworkCore::shut_down() noexcept {
  bool unfinished = false;
  {
    const std::lock_guard lock(mutex_);
    if (stopping_) return;
    stopping_ = true;
    unfinished = !collectives_.queue.empty();
    collectives_.changed.notify_one();
    for (auto* lanes : {&sends_, &receives_}) {
      for (auto& [peer, lane] : *lanes) {
        unfinished = unfinished || !lane.queue.empty();
        lane.changed.notify_one();
      }
    }
  }
  if (unfinished) session_.abort("it destroyed its communicator with calls under way");
  collectives_.thread.join();
  for (auto* lanes : {&sends_, &receives_}) {
    for (auto& [peer, lane] : *lanes) lane.thread.join();
  }
  session_.close();
  if (link_) {
    link_->leave();
    link_->on_failure(nullptr);
  }
  data_.reset();
  link_.reset();
}

}  // namespace lockstep
