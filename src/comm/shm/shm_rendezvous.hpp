#pragma once

#include <sys/types.h>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/backend.hpp"
#include "comm/peer_process.hpp"
#include "comm/shm/shm_control.hpp"
#include "comm/shm/shm_memory.hpp"

namespace lockstep {

// Unix sockets between ranks of one host. They carry no data, only which ranks are present
// and the descriptors of shared memory.

/// Version of the control block and of the messages: ranks of different versions refuse each other.
inline constexpr int64_t kShmLayoutVersion = 3;

enum class MessageKind : uint32_t {
  kHello,    ///< a member to rank 0: [rank, size, layout version]
  kPresent,  ///< rank 0 to members: the ranks that are here
  kWelcome,  ///< rank 0 to members, when all are here: their process ids; the control block
  kRefused,  ///< rank 0 to a member: why, as text; [the rank at fault], if any
  kSegment,  ///< allocate: [sequence]; the memory
  kChild,    ///< split: [sequence]; the child's control block and connections
  kGaveUp,   ///< a member to rank 0: its deadline came before all ranks had
};

struct SocketMessage {
  MessageKind kind = MessageKind::kHello;
  std::vector<int64_t> numbers;
  std::string text;
  std::vector<OwnedDescriptor> descriptors;
};

/// What came of looking for a message.
enum class Received { kMessage, kNothing, kClosed, kRubbish };

/// Two connected ends.
std::pair<OwnedDescriptor, OwnedDescriptor> make_socket_pair();

/// Returns false if the peer is gone or takes no more. `descriptors` stay the caller's.
bool send_message(int socket, MessageKind kind, const std::vector<int64_t>& numbers,
                  const std::string& text = "", const std::vector<int>& descriptors = {});

/// Takes a message if there is one.
Received receive_message(int socket, SocketMessage& message);

/// An abstract name, which needs no file, that jobs of other users or sessions do not have.
std::string socket_name(const std::string& session);

/// Returns null if somebody else listens at this name.
OwnedDescriptor listen_at(const std::string& name);

/// Returns null if nobody listens at this name.
OwnedDescriptor connect_to(const std::string& name);

/// Returns null if no connection waits to be accepted.
OwnedDescriptor accept_from(int listener);

/// The process at the other end; nothing if it is another user's.
std::optional<pid_t> peer_process(int socket);

/// Waits until one of the sockets can be read or the deadline has come.
void wait_readable(const std::vector<int>& sockets, int64_t deadline_ns);

/// What a rank needs to talk to the others of its group. Rank 0 is the leader: it makes memory and
/// hands it to the members, over one connection each.
struct ShmMembership {
  Group group;
  std::shared_ptr<MappingPool> pool;
  std::shared_ptr<Mapping> control;
  std::vector<OwnedDescriptor> members;  // [rank]; the leader's, null for itself
  OwnedDescriptor leader;                // a member's
  std::vector<PeerProcess> processes;    // [rank]
};

/// The rendezvous of processes is a socket named after the session. A kRendezvous error says which
/// ranks came and which did not, or why this rank was refused.
ShmMembership rendezvous_of_processes(const ShmOptions& options);

/// Threads of this process: [rank].
std::vector<ShmMembership> rendezvous_of_threads(int size);

}  // namespace lockstep
