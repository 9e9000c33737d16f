#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <list>
#include <map>
#include <optional>
#include <utility>

#include "base/random.hpp"
#include "comm/arguments.hpp"
#include "comm/network/network_backend.hpp"
#include "comm/shm/shm_control.hpp"
#include "comm/two_level/host_map.hpp"
#include "comm/two_level/two_level_moves.hpp"
#include "lockstep/error.hpp"

namespace lockstep {
namespace {

/// Ranks of several hosts: the control plane is that of Gloo, between all ranks, and data moves
/// through shared memory inside a host. See Note [Two levels].
class TwoLevelBackend final : public NetworkBackend {
 public:
  TwoLevelBackend(std::shared_ptr<Store> store, Group group, std::string address,
                  int64_t deadline_ns)
      : NetworkBackend(*find_backend("gloo"), std::move(store), std::move(group),
                       std::move(address), deadline_ns) {}
  ~TwoLevelBackend() override { core().shut_down(); }
  TwoLevelBackend(const TwoLevelBackend&) = delete;
  TwoLevelBackend& operator=(const TwoLevelBackend&) = delete;

  /// The ranks tell each other where they are, and those of a host connect. Collective.
  void connect_inside(const std::string& identity, int64_t deadline_ns);
  /// The same where that is known. `inside`: the ranks of this host; null: one. Collective.
  void use(HostMap hosts, std::unique_ptr<Backend> inside, const CallContext& context);

  std::string_view name() const override { return moves_ ? "two_level" : "gloo"; }
  std::unique_ptr<Work> send(const ConstBuffer& buffer, int to, int tag,
                             const CallContext& context) override;
  std::unique_ptr<Work> recv(const Buffer& buffer, int from, int tag,
                             const CallContext& context) override;

 protected:
  NetworkCore::Body prepare_all_reduce(const Task& task, const Buffer& buffer,
                                       ReduceOp op) override {
    if (!moves_) return NetworkBackend::prepare_all_reduce(task, buffer, op);
    return moves_->all_reduce(task, buffer, op);
  }
  void move_broadcast(const Task& task, const Buffer& buffer, int root) override {
    if (!moves_) return NetworkBackend::move_broadcast(task, buffer, root);
    moves_->broadcast(task, buffer, root);
  }
  void move_reduce(const Task& task, const Buffer& buffer, int root, ReduceOp op,
                   Calls calls) override {
    if (!moves_) return NetworkBackend::move_reduce(task, buffer, root, op, calls);
    moves_->reduce(task, buffer, root, op, calls);
  }
  void move_reduce_scatter(const Task& task, const ConstBuffer& input, const Buffer& output,
                           ReduceOp op, Calls calls) override;
  void move_all_gather(const Task& task, const ConstBuffer& input, const Buffer& output) override;
  void move_blocks(const Task& task, const ConstBuffer& input, const Buffer& output,
                   const BlockExchange& blocks) override;
  void add(std::span<const void* const> inputs, const Buffer& output, ReduceOp op,
           Calls calls) const override {
    if (!moves_) return NetworkBackend::add(inputs, output, op, calls);
    moves_->add(inputs, output, op, calls);
  }
  std::unique_ptr<Backend> make_part(const Task& task, const Part& part) override;
  std::shared_ptr<RegisteredMemory> make_memory(const Task& task, int64_t bytes) override;

 private:
  class LocalMessage;

  /// The local rank of another rank of this host; nothing for this rank and those of other hosts.
  std::optional<int> neighbour(int rank) const;

  // Where the ranks of a host do not follow each other, their blocks are in no one region: all
  // ranks then exchange blocks over the link.
  bool has_regions() const { return moves_ && hosts_->in_order(); }

  std::optional<HostMap> hosts_;
  std::unique_ptr<Backend> inside_;    // of collectives; null: alone on this host
  std::unique_ptr<Backend> messages_;  // the same ranks; used by the threads that send and receive
  std::shared_ptr<std::list<LocalMessage*>> under_way_;  // local messages that were begun
  std::optional<TwoLevelMoves> moves_;                   // none if no host has several ranks
};

/// A message between two ranks of one host. Its outcome is reported to the whole group.
class TwoLevelBackend::LocalMessage final : public Backend::Work {
 public:
  /// `neighbours`: the group ranks of this host.
  using List = std::list<LocalMessage*>;
  LocalMessage(std::shared_ptr<NetworkCore> core, std::shared_ptr<List> under_way,
               std::vector<int> neighbours, const Fingerprint& what, int peer,
               const CallContext& context)
      : core_(std::move(core)),
        under_way_(std::move(under_way)),
        neighbours_(std::move(neighbours)),
        task_(core_, what, context) {
    task_.peer = peer;
    core_->number_message(task_);
  }
  ~LocalMessage() override {
    under_way_->remove(this);
    if (begun_ && !done_) core_->session().abort("it dropped a message that was not done");
  }
  LocalMessage(const LocalMessage&) = delete;
  LocalMessage& operator=(const LocalMessage&) = delete;

  /// `begin(context)` begins it in shared memory.
  template <class Begin>
  void start(const CallContext& context, Begin&& begin) {
    guarded([&] {
      CallContext part = context;
      part.part_of = &task_.reported();
      inner_ = begin(part);
      begun_ = true;
      under_way_->push_back(this);
    });
  }

  /// Moves all of a list on: they share one engine. Returns whether some are left.
  static bool progress(List& under_way) {
    while (!under_way.empty()) {
      LocalMessage& first = *under_way.front();
      try {
        if (!first.advance()) return true;
      } catch (const Error&) {
        under_way.remove(&first);  // its own wait throws it again
      }
    }
    return false;
  }

  bool advance() override {
    if (!done_) guarded([&] { settle(inner_->advance()); });
    return done_;
  }

  void wait() override {
    if (done_ || advance()) return;
    guarded([&] {
      inner_->wait();
      settle(true);
    });
  }

 private:
  void settle(bool done) {
    done_ = done;
    if (done) {
      shown_.reset();
      under_way_->remove(this);
    } else if (!shown_) {
      shown_.emplace(*core_, task_);
    }
  }

  // A rank of another host may be why it fails. What the two sides called is known here.
  template <class Action>
  void guarded(Action&& action) {
    core_->session().guarded([&] {
      try {
        action();
      } catch (const CollectiveError& error) {
        if (!error.record().fingerprints.empty()) throw_in_group(error.record());
        core_->fail_transfer(task_, error.message());
      } catch (const RankError& error) {
        core_->fail_transfer(task_, error.message());
      }
    });
  }

  // The record numbers the ranks of this host.
  [[noreturn]] void throw_in_group(const AbortRecord& record) const {
    std::vector<int32_t> ranks;
    for (const int32_t rank : record.ranks)
      ranks.push_back(neighbours_.at(static_cast<size_t>(rank)));
    throw_mismatch(core_->group(), record.fingerprints, ranks);
  }

  std::shared_ptr<NetworkCore> core_;
  std::shared_ptr<List> under_way_;
  const std::vector<int> neighbours_;  // [local rank]
  NetworkCore::Task task_;
  std::unique_ptr<Backend::Work> inner_;
  std::optional<NetworkCore::ShownMessage> shown_;  // from the first wait on
  bool begun_ = false;
  bool done_ = false;
};

// The rendezvous of a host speaks of its local ranks; everybody else of those of the group.
std::unique_ptr<Backend> connect_host(const ShmOptions& options) {
  try {
    return make_shm_backend(options);
  } catch (const RankError& error) {
    const int blamed = error.blamed_rank();
    throw RankError(error.code(), blamed < 0 ? -1 : options.group->world_rank(blamed),
                    fmt::format("ranks {} of one host, numbered from 0 among themselves: {}",
                                fmt::join(options.group->world_ranks, ", "), error.message()),
                    error.help(), error.notes());
  }
}

void TwoLevelBackend::connect_inside(const std::string& identity, int64_t deadline_ns) {
  // The first rank of a host names its rendezvous, which no other user can guess.
  const std::string session = random_hex(32);
  std::vector<std::string> identities;
  std::vector<std::string> sessions;
  for (const std::string& reply : core().introduce(session + identity, deadline_ns)) {
    const size_t length = std::min(session.size(), reply.size());
    sessions.push_back(reply.substr(0, length));
    identities.push_back(reply.substr(length));
  }
  // A host with more ranks than shared memory serves counts as several.
  std::map<std::string, int> ranks_of;
  for (std::string& host : identities) {
    const int before = ranks_of[host]++;
    host += fmt::format("/{}", before / kShmRanks);
  }
  HostMap hosts(identities, rank());
  Group there{hosts.local_rank(), {}, group().name};
  for (const int rank : hosts.members(hosts.host())) {
    there.world_ranks.push_back(group().world_rank(rank));
  }
  std::unique_ptr<Backend> inside;
  if (there.size() > 1) {
    inside =
        connect_host({.session = sessions[static_cast<size_t>(hosts.members(hosts.host()).front())],
                      .rank = there.rank,
                      .size = there.size(),
                      .deadline_ns = deadline_ns,
                      .group = there});
  }
  use(std::move(hosts), std::move(inside), {.deadline_ns = deadline_ns});
}

void TwoLevelBackend::use(HostMap hosts, std::unique_ptr<Backend> inside,
                          const CallContext& context) {
  hosts_ = std::move(hosts);
  inside_ = std::move(inside);
  if (inside_) messages_ = inside_->split(0, hosts_->local_rank(), group().name, context);
  if (hosts_->largest() > 1) moves_.emplace(core(), *hosts_, inside_.get());
  if (!inside_) return;
  under_way_ = std::make_shared<LocalMessage::List>();
  core().while_waiting([list = under_way_] { return LocalMessage::progress(*list); });
  core().on_broken([inside = inside_.get(), messages = messages_.get()] {
    inside->abort("its group of several hosts has ended");
    messages->abort("its group of several hosts has ended");
  });
}

std::optional<int> TwoLevelBackend::neighbour(int rank) const {
  if (rank == this->rank() || hosts_->host_of(rank) != hosts_->host()) return std::nullopt;
  return hosts_->local_rank_of(rank);
}

std::unique_ptr<Backend::Work> TwoLevelBackend::send(const ConstBuffer& buffer, int to, int tag,
                                                     const CallContext& context) {
  check_message(group(), buffer.count, to);
  const auto peer = neighbour(to);
  if (!peer) return NetworkBackend::send(buffer, to, tag, context);
  core().session().throw_if_broken();
  auto message = std::make_unique<LocalMessage>(
      shared_core(), under_way_, hosts_->members(hosts_->host()),
      make_message_fingerprint(Operation::kSend, 0, buffer, tag, context.label), to, context);
  message->start(
      context, [&](const CallContext& part) { return messages_->send(buffer, *peer, tag, part); });
  return message;
}

std::unique_ptr<Backend::Work> TwoLevelBackend::recv(const Buffer& buffer, int from, int tag,
                                                     const CallContext& context) {
  check_message(group(), buffer.count, from);
  const auto peer = neighbour(from);
  if (!peer) return NetworkBackend::recv(buffer, from, tag, context);
  core().session().throw_if_broken();
  const ConstBuffer expected{buffer.data, buffer.count, buffer.dtype};
  auto message = std::make_unique<LocalMessage>(
      shared_core(), under_way_, hosts_->members(hosts_->host()),
      make_message_fingerprint(Operation::kRecv, 0, expected, tag, context.label), from, context);
  message->start(
      context, [&](const CallContext& part) { return messages_->recv(buffer, *peer, tag, part); });
  return message;
}

void TwoLevelBackend::move_reduce_scatter(const Task& task, const ConstBuffer& input,
                                          const Buffer& output, ReduceOp op, Calls calls) {
  if (!has_regions()) return NetworkBackend::move_reduce_scatter(task, input, output, op, calls);
  moves_->reduce_scatter(task, input, output, op, calls);
}

void TwoLevelBackend::move_all_gather(const Task& task, const ConstBuffer& input,
                                      const Buffer& output) {
  if (!has_regions()) return NetworkBackend::move_all_gather(task, input, output);
  moves_->all_gather(task, input, output,
                     std::vector<int64_t>(static_cast<size_t>(size()), input.count));
}

void TwoLevelBackend::move_blocks(const Task& task, const ConstBuffer& input, const Buffer& output,
                                  const BlockExchange& blocks) {
  if (!has_regions()) return NetworkBackend::move_blocks(task, input, output, blocks);
  if (blocks.same_for_all()) return moves_->all_gather(task, input, output, blocks.taken);
  moves_->exchange(task, input, output, blocks);
}

// Ranks of one host need no link, and ranks alone on their hosts have only that.
std::unique_ptr<Backend> TwoLevelBackend::make_part(const Task& task, const Part& part) {
  std::vector<std::string> identities;
  for (const int rank : part.members) identities.push_back(std::to_string(hosts_->host_of(rank)));
  HostMap hosts(identities, part.group.rank);
  std::unique_ptr<Backend> inside;
  if (inside_) {
    moves_->call_inside(task, [&](const CallContext& context) {
      inside = inside_->split(part.color, part.group.rank, part.group.name, context);
    });
  }
  if (hosts.hosts() == 1 && inside) return inside;
  if (hosts.largest() == 1) return NetworkBackend::make_part(task, part);
  if (hosts.local_size() == 1) inside.reset();
  auto made =
      std::make_unique<TwoLevelBackend>(part.store, part.group, address(), task.deadline_ns);
  made->use(std::move(hosts), std::move(inside), {.deadline_ns = task.deadline_ns});
  return made;
}

std::shared_ptr<RegisteredMemory> TwoLevelBackend::make_memory(const Task& task, int64_t bytes) {
  if (!inside_) return NetworkBackend::make_memory(task, bytes);
  std::shared_ptr<RegisteredMemory> memory;
  moves_->call_inside(
      task, [&](const CallContext& context) { memory = inside_->allocate(bytes, context); });
  return memory;
}

}  // namespace

std::unique_ptr<Backend> make_two_level_backend(const TwoLevelOptions& options) {
  const NetworkOptions& network = options.network;
  auto made =
      std::make_unique<TwoLevelBackend>(network.store, Group::world(network.rank, network.size),
                                        network.address, network.deadline_ns);
  made->connect_inside(options.host, network.deadline_ns);
  return made;
}

}  // namespace lockstep
