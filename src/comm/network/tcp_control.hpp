#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <variant>
#include <vector>

#include "comm/control_session.hpp"
#include "net/socket.hpp"
#include "net/store.hpp"

namespace lockstep {

/// A connection between every two ranks of a group.
struct TcpRendezvous {
  std::vector<Socket> sockets;  ///< [group rank]; this rank's own is empty
  std::string address;          ///< this rank's, in digits
};

/// Connects all ranks, each listening at its `address` (in digits, or "localhost") for those above
/// it. Only a rank that can read the store is admitted. kRendezvous at the deadline names the ranks
/// that did not come.
TcpRendezvous rendezvous(Store& store, const Group& group, const std::string& address,
                         int64_t deadline_ns);

/// The control link of ranks on any hosts: small messages over TCP, apart from the transport's own
/// connections.
///
/// Why not over Gloo: a wait of Gloo's that ends in a timeout closes the connections to *all*
/// peers, does not say who was missing, and cannot tell a rank that died from one that gave up. A
/// thread of this class reads all sockets, so that a failure notice interrupts a transfer.
class TcpControl final : public ControlLink {
 public:
  enum class Frame : uint8_t { kFingerprint, kMessage, kNote, kFinalNotice };

  /// Why frames did not come.
  struct Trouble {
    enum class Kind {
      kAborted,  ///< a peer gave up: `record`
      kStalled,  ///< a peer's call has reached its deadline, and it asks what all ranks do
      kGone,     ///< the connection of `rank` ended
      kLate,     ///< the deadline came
    } kind = Kind::kLate;
    int rank = -1;
    bool left = false;  ///< kGone: it said so, with nothing wrong
    AbortRecord record = {};
    std::vector<int> missing = {};  ///< kLate: the ranks that have sent nothing
  };

  /// One connection to each peer; sockets[rank] is empty.
  TcpControl(int rank, std::vector<Socket> sockets);

  /// Says that this rank leaves, unless it has sent another final notice.
  ~TcpControl() override;
  TcpControl(const TcpControl&) = delete;
  TcpControl& operator=(const TcpControl&) = delete;

  /// Never waits: what a connection does not take at once goes as soon as the peer has read.
  void send(int to, Frame frame, std::string_view payload);
  void send_all(Frame frame, std::string_view payload);

  /// The next frame of this kind from each of these peers. What a peer sent before it failed still
  /// counts; otherwise an abort or a stall comes first, then an ended connection, then the
  /// deadline.
  std::variant<std::vector<std::string>, Trouble> gather(Frame frame, std::span<const int> peers,
                                                         int64_t deadline_ns);

  /// After a transfer failed: why, as soon as a peer's final notice or end tells; else kLate.
  Trouble find_trouble(int64_t deadline_ns);

  void publish(const AbortRecord& record) override;
  StallReport survey(const StalledCall& own) override;

  /// Says that this rank leaves with nothing wrong.
  void leave() { send_notice({}); }

  /// What this rank does, for peers that ask; called in the thread that reads, too.
  void on_survey(std::function<RankActivity()> answer);

  /// `action` runs, in the thread that reads, when a transfer has become hopeless: a peer has given
  /// up, or ended unexpectedly and transfers did not notice for a while. At once if that is so
  /// already. A null one ends this, and waits for one that runs.
  void on_failure(std::function<void()> action);

 private:
  /// The final message of a rank. Only the first one counts.
  struct FinalNotice {
    enum class Kind : uint8_t { kLeft, kAborted, kStalled } kind = Kind::kLeft;
    AbortRecord record = {};     // kAborted
    RankActivity activity = {};  // kStalled: what the rank does
    int64_t waited_ns = 0;       // kStalled: of the rank whose deadline came; 0: an answer
    std::vector<int32_t> awaited =
        {};  // kStalled: for whom that call waits; none: as activity says

    std::string encode() const;
    static FinalNotice decode(std::string_view bytes);
  };

  struct Peer {
    Socket socket;
    std::string unsent;  // under send_mutex_: of frames that were sent
    std::string input;
    std::array<std::deque<std::string>, 3> frames;  // [Frame]
    int64_t calls = 0;                              // frames of kFingerprint, taken ones too
    std::optional<FinalNotice> notice;
    bool closed = false;
  };

  void send_notice(const FinalNotice& notice);
  void receive_notice(Peer& peer, std::string_view payload);
  void write(Peer& peer, std::string_view bytes);
  static size_t write_some(const Peer& peer, std::string_view bytes);
  void write_unsent(Peer& peer);
  std::vector<short> awaited_events();
  void read_all();
  void read_from(Peer& peer);
  void end(Peer& peer);
  void take_frames(Peer& peer);
  std::optional<Trouble> reported() const;
  std::optional<Trouble> ended(int group_rank) const;
  static bool has_cause(const Peer& peer);
  void act_on_failure();
  bool wait(std::unique_lock<std::mutex>& lock, int64_t deadline_ns);
  bool all_have_answered() const;

  const int rank_;
  std::mutex send_mutex_;     // held while a frame is written
  bool notice_sent_ = false;  // under send_mutex_: the final notice was sent
  std::mutex mutex_;          // guards what follows
  std::condition_variable changed_;
  std::vector<Peer> peers_;                // [group rank]; sockets and inputs belong to the reader
  std::optional<FinalNotice> own_notice_;  // the notice that was sent
  std::mutex action_mutex_;                // held while an action runs; guards both
  std::function<void()> on_failure_;
  std::function<RankActivity()> answer_;
  Wake wake_;  // of the reader: there is something to write, or it shall stop
  std::atomic<bool> stopping_ = false;
  std::atomic<bool> has_unsent_ = false;  // set and cleared under send_mutex_
  int64_t act_at_ns_ = 0;    // of the reader: when to act on a peer that ended; 0: not at all
  bool has_frames_ = false;  // of the reader: those who wait are woken once for all that came
  std::thread reader_;
};

}  // namespace lockstep
