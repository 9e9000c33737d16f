#include "comm/shm/shm_meeting.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <numeric>
#include <thread>

#include "base/running_clock.hpp"
#include "comm/shm/shm_socket.hpp"
#include "lockstep/error.hpp"
#include "lockstep/units.hpp"

namespace lockstep {
namespace {

constexpr int64_t kLayoutVersion = 2;  // of the control block and of the messages

constexpr const char* kHelp =
    "start all ranks of the job within the deadline, with one session and one world size; "
    "`lockstep run` does that";

[[noreturn]] void fail_meeting(const std::string& message) {
  throw Error(Code::kRendezvous, message, kHelp);
}

// The launcher follows `blamed`: the rank that is at fault, and not one of those that waited for
// it.
[[noreturn]] void fail_meeting_of(int64_t blamed, const std::string& message,
                                  std::vector<std::string> notes = {}) {
  throw RankError(Code::kRendezvous, static_cast<int>(blamed), message, kHelp, std::move(notes));
}

bool holds(const std::vector<int64_t>& ranks, int64_t rank) {
  return std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
}

std::vector<int64_t> missing_beside(const std::vector<int64_t>& present, int64_t size) {
  std::vector<int64_t> missing;
  for (int64_t rank = 0; rank < size; ++rank) {
    if (!holds(present, rank)) missing.push_back(rank);
  }
  return missing;
}

[[noreturn]] void fail_held_by_another_user(const std::string& session) {
  throw Error(Code::kRendezvous,
              fmt::format("another user's process holds the socket of session {}", session),
              "set LOCKSTEP_TOKEN to a secret of your own for all ranks, or start them with "
              "`lockstep run`: other users cannot foresee the socket's name then");
}

std::string who_came(const std::vector<int64_t>& present, int64_t size) {
  return fmt::format("rank{} {} came, missing: {}", present.size() == 1 ? "" : "s",
                     fmt::join(present, ", "), fmt::join(missing_beside(present, size), ", "));
}

Group world_group(int rank, int size) {
  Group group;
  group.rank = rank;
  group.world_ranks.resize(static_cast<size_t>(size));
  std::iota(group.world_ranks.begin(), group.world_ranks.end(), 0);
  return group;
}

// Rank 0's side: takes connections until everybody is there.
class Host {
 public:
  explicit Host(const ShmOptions& options)
      : options_(options),
        begun_ns_(running_ns()),
        members_(static_cast<size_t>(options.size)),
        pids_(static_cast<size_t>(options.size), 0) {
    listener_ = listen_at(socket_name(options.session));
    if (listener_ == nullptr) {
      const auto holder = connect_to(socket_name(options.session));
      if (holder && !peer_process(holder->get())) fail_held_by_another_user(options.session);
      fail_meeting(fmt::format("somebody is rank 0 of session {} already", options.session));
    }
    pids_[0] = ::getpid();
  }

  ShmMembership meet() {
    while (static_cast<int>(present().size()) < options_.size) {
      if (running_ns() >= options_.deadline_ns) give_up();
      wait_readable(watched(), options_.deadline_ns);
      while (auto connection = accept_from(listener_->get())) {
        // Another user's process is not even answered.
        if (peer_process(connection->get())) strangers_.push_back(std::move(connection));
      }
      hear_strangers();
      hear_members();
    }
    return welcome();
  }

 private:
  std::vector<int64_t> present() const {
    std::vector<int64_t> ranks = {0};
    for (size_t rank = 1; rank < members_.size(); ++rank) {
      if (members_[rank]) ranks.push_back(static_cast<int64_t>(rank));
    }
    return ranks;
  }

  std::vector<int> watched() const {
    std::vector<int> sockets = {listener_->get()};
    for (const auto& stranger : strangers_) sockets.push_back(stranger->get());
    for (const auto& member : members_) {
      if (member) sockets.push_back(member->get());
    }
    return sockets;
  }

  // Those who connected but have not yet said who they are.
  void hear_strangers() {
    std::vector<OwnedDescriptor> silent;
    for (auto& stranger : strangers_) {
      SocketMessage message;
      const Received received = receive_message(stranger->get(), message);
      if (received == Received::kNothing) {
        silent.push_back(std::move(stranger));
      } else if (received == Received::kMessage && message.kind == MessageKind::kHello &&
                 message.numbers.size() == 3) {
        admit(std::move(stranger), message.numbers);
      }
    }
    strangers_ = std::move(silent);
  }

  // hello: [rank, size, layout version].
  void admit(OwnedDescriptor connection, const std::vector<int64_t>& hello) {
    const int64_t rank = hello[0];
    std::string reason;
    if (hello[2] != kLayoutVersion) {
      reason = fmt::format("rank {} uses layout {} of lockstep's shared memory, rank 0 uses {}",
                           rank, hello[2], kLayoutVersion);
    } else if (hello[1] != options_.size) {
      reason = fmt::format("rank {} came with world size {}, rank 0 has {}", rank, hello[1],
                           options_.size);
    } else if (rank < 1 || rank >= options_.size) {
      reason = fmt::format("there is no rank {} in a world of {}", rank, options_.size);
    } else if (members_[static_cast<size_t>(rank)]) {
      reason = fmt::format("rank {} is here already: process {}", rank,
                           pids_[static_cast<size_t>(rank)]);
    }
    if (!reason.empty()) {
      send_message(connection->get(), MessageKind::kRefused, {}, reason);
      if (refused_.size() < 4) refused_.push_back("refused: " + reason);
      return;
    }
    pids_[static_cast<size_t>(rank)] = peer_process(connection->get()).value_or(0);
    members_[static_cast<size_t>(rank)] = std::move(connection);
    tell(MessageKind::kPresent, present(), "");
  }

  void hear_members() {
    for (size_t rank = 1; rank < members_.size(); ++rank) {
      if (!members_[rank]) continue;
      SocketMessage message;
      const Received received = receive_message(members_[rank]->get(), message);
      if (received == Received::kNothing) continue;
      const std::string who = fmt::format("rank {} (process {})", rank, pids_[rank]);
      if (received == Received::kMessage && message.kind == MessageKind::kGaveUp) {
        fail_missing(fmt::format("{} gave up before all ranks had met", who));
      }
      members_[rank].reset();
      fail_all(static_cast<int64_t>(rank), who + " ended before all ranks had met", {});
    }
  }

  void tell(MessageKind kind, const std::vector<int64_t>& numbers, const std::string& text) {
    for (const auto& member : members_) {
      if (member) send_message(member->get(), kind, numbers, text);
    }
  }

  [[noreturn]] void give_up() {
    fail_missing(fmt::format("not all {} ranks met within {}", options_.size,
                             format_seconds(static_cast<double>(running_ns() - begun_ns_) * 1e-9)));
  }

  [[noreturn]] void fail_missing(const std::string& what) {
    const std::vector<int64_t> here = present();
    fail_all(missing_beside(here, options_.size).front(),
             fmt::format("{}: {}", what, who_came(here, options_.size)), refused_);
  }

  [[noreturn]] void fail_all(int64_t blamed, const std::string& what,
                             std::vector<std::string> notes) {
    tell(MessageKind::kRefused, {blamed}, what);
    fail_meeting_of(blamed, what, std::move(notes));
  }

  ShmMembership welcome() {
    OwnedDescriptor control;
    try {
      control = ShmControl::make(options_.size);
    } catch (const Error& error) {
      tell(MessageKind::kRefused, {}, error.message());
      throw;
    }
    for (const auto& member : members_) {
      if (member) send_message(member->get(), MessageKind::kWelcome, pids_, "", {control->get()});
    }
    ShmMembership membership;
    membership.group = world_group(0, options_.size);
    membership.pool = std::make_shared<MappingPool>();
    membership.control = membership.pool->map(std::move(control));
    membership.members = std::move(members_);
    for (const int64_t pid : pids_) membership.processes.emplace_back(static_cast<pid_t>(pid));
    return membership;
  }

  const ShmOptions& options_;
  int64_t begun_ns_;
  OwnedDescriptor listener_;
  std::vector<OwnedDescriptor> strangers_;
  std::vector<OwnedDescriptor> members_;  // [rank]; null: not here yet
  std::vector<int64_t> pids_;             // [rank]
  std::vector<std::string> refused_;
};

// Rank 0 may come later: tries again until the deadline.
OwnedDescriptor find_host(const ShmOptions& options) {
  const std::string name = socket_name(options.session);
  auto pause = std::chrono::microseconds(200);
  for (;;) {
    auto connection = connect_to(name);
    if (connection && !peer_process(connection->get())) {
      fail_held_by_another_user(options.session);
    }
    if (connection) return connection;
    if (running_ns() >= options.deadline_ns) {
      fail_meeting_of(0, fmt::format("rank {} of {} found no rank 0 of session {}", options.rank,
                                     options.size, options.session));
    }
    std::this_thread::sleep_for(pause);
    pause = std::min(pause * 2, std::chrono::microseconds(10'000));
  }
}

// A member's deadline has come. Rank 0 is at fault where it took no notice of this rank, or of all.
[[noreturn]] void give_up(const ShmOptions& options, const Descriptor& host,
                          const std::vector<int64_t>& present) {
  send_message(host.get(), MessageKind::kGaveUp, {});
  const std::vector<int64_t> missing = missing_beside(present, options.size);
  if (missing.empty() || !holds(present, options.rank)) {
    fail_meeting_of(0, fmt::format("rank {}: rank 0 does not answer: not all {} ranks met",
                                   options.rank, options.size));
  }
  fail_meeting_of(missing.front(), fmt::format("rank {}: not all {} ranks met: {}", options.rank,
                                               options.size, who_came(present, options.size)));
}

ShmMembership join(const ShmOptions& options) {
  OwnedDescriptor host = find_host(options);
  send_message(host->get(), MessageKind::kHello, {options.rank, options.size, kLayoutVersion});
  std::vector<int64_t> present = {0};
  for (;;) {
    SocketMessage message;
    const Received received = receive_message(host->get(), message);
    if (received == Received::kNothing) {
      if (running_ns() >= options.deadline_ns) give_up(options, *host, present);
      wait_readable({host->get()}, options.deadline_ns);
    } else if (received != Received::kMessage) {
      fail_meeting_of(0,
                      fmt::format("rank {}: rank 0 ended before all ranks had met", options.rank));
    } else if (message.kind == MessageKind::kRefused && message.numbers.size() == 1) {
      fail_meeting_of(message.numbers[0], message.text);
    } else if (message.kind == MessageKind::kRefused) {
      fail_meeting(message.text);
    } else if (message.kind == MessageKind::kPresent) {
      present = message.numbers;
    } else if (message.kind == MessageKind::kWelcome && message.descriptors.size() == 1) {
      ShmMembership membership;
      membership.group = world_group(options.rank, options.size);
      membership.pool = std::make_shared<MappingPool>();
      membership.control = membership.pool->map(std::move(message.descriptors[0]));
      membership.leader = std::move(host);
      for (const int64_t pid : message.numbers) {
        membership.processes.emplace_back(static_cast<pid_t>(pid));
      }
      return membership;
    }
  }
}

void check_size(int size) {
  if (size >= 1 && size <= kShmRanks) return;
  throw Error(Code::kBackend, fmt::format("the backend shm cannot serve {} ranks", size),
              fmt::format("it serves 1 to {}; use gloo for more", kShmRanks));
}

}  // namespace

ShmMembership meet_processes(const ShmOptions& options) {
  check_size(options.size);
  if (options.rank < 0 || options.rank >= options.size) {
    fail_meeting(fmt::format("there is no rank {} in a world of {}", options.rank, options.size));
  }
  return options.rank == 0 ? Host(options).meet() : join(options);
}

std::vector<ShmMembership> meet_threads(int size) {
  check_size(size);
  auto pool = std::make_shared<MappingPool>();
  const auto control = pool->map(ShmControl::make(size));
  std::vector<ShmMembership> ranks(static_cast<size_t>(size));
  for (int rank = 0; rank < size; ++rank) {
    ShmMembership& membership = ranks[static_cast<size_t>(rank)];
    membership.group = world_group(rank, size);
    membership.pool = pool;
    membership.control = control;
    membership.processes.assign(static_cast<size_t>(size), PeerProcess(::getpid()));
    ranks[0].members.emplace_back();
    if (rank > 0) {
      auto [leader_end, member_end] = make_socket_pair();
      ranks[0].members.back() = std::move(leader_end);
      membership.leader = std::move(member_end);
    }
  }
  return ranks;
}

}  // namespace lockstep
