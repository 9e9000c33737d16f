#pragma once

#include <array>
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

#include "comm/gloo/gloo_farewell.hpp"
#include "net/socket.hpp"
#include "net/wake.hpp"

namespace lockstep {

/// Small messages between the ranks of a group, beside Gloo's own connections: the calls they make,
/// and the last words of a rank that fails.
///
/// Why not over Gloo: a wait of Gloo's that ends in a timeout closes the connections to *all*
/// peers, does not say who was missing, and cannot tell a rank that died from one that gave up. A
/// thread of this class reads all sockets, so that news of a failure interrupts a transfer. Any
/// thread may call any function.
class GlooLink {
 public:
  enum class Frame : uint8_t { kCall, kMessage, kNote, kFarewell };

  /// Why frames did not come.
  struct Trouble {
    enum class Kind { kTold, kGone, kLate } kind = Kind::kLate;
    int place = -1;            ///< kTold: who said `farewell`; kGone: whose connection ended
    bool left = false;         ///< kGone: it said so, with nothing wrong
    Farewell farewell;         ///< kTold
    std::vector<int> missing;  ///< kLate: who has sent nothing
  };

  /// One connection to each peer; sockets[rank] is empty.
  GlooLink(int rank, std::vector<Socket> sockets);

  /// Says farewell (kLeft) where no other was said.
  ~GlooLink();
  GlooLink(const GlooLink&) = delete;
  GlooLink& operator=(const GlooLink&) = delete;

  /// Never waits: frames are small and few, and a peer that is gone is noticed when waited for.
  void send(int to, Frame frame, std::string_view payload);
  void send_all(Frame frame, std::string_view payload);

  /// To all peers. Only the first farewell counts; one that this rank says as its own decision
  /// (kAborted) ends its own waits too.
  void say_farewell(const Farewell& farewell);

  /// The next frame of this kind from each of these peers. What a peer sent before it failed still
  /// counts; otherwise a farewell with a cause comes first, then an ended connection, then the
  /// deadline.
  std::variant<std::vector<std::string>, Trouble> gather(Frame frame, std::span<const int> peers,
                                                         int64_t deadline_ns);

  /// After a transfer failed: why, as soon as any peer's last words or end tell, or kLate.
  Trouble find_trouble(int64_t deadline_ns);

  /// How this rank answers a roll call (kStuck) of a peer; called in the thread that reads.
  void on_roll_call(std::function<RankActivity()> answer);

  /// What came of a roll call, in which this rank has asked or answered.
  struct RollCall {
    std::vector<RankActivity> activities;  ///< [place]; silent where no answer came
    std::vector<int> awaited;              ///< where throw_stalled() begins
    int64_t waited_ns = 0;                 ///< the longest of them
  };

  /// Waits until every peer has said farewell or is gone, and gives their answers.
  RollCall take_roll_call(int64_t deadline_ns);

  /// The first peer whose connection ended without a farewell, or -1.
  int first_gone();

  /// `action` runs, in the thread that reads, when a transfer has become hopeless: a peer's
  /// farewell has a cause, or a peer ended without one and transfers did not notice for a while. At
  /// once where that is so already. A null one ends this, and waits for one that runs.
  void on_failure(std::function<void()> action);

 private:
  struct Peer {
    Socket socket;
    std::string input;
    std::array<std::deque<std::string>, 3> frames;  // [Frame]
    int64_t calls = 0;                              // frames of kCall, taken ones too
    std::optional<Farewell> farewell;
    bool closed = false;
  };

  void read_all();
  void read_from(Peer& peer);
  void end(Peer& peer);
  void take_frames(Peer& peer);
  void hear_farewell(Peer& peer, std::string_view payload);
  std::optional<Trouble> told() const;
  std::optional<Trouble> ended(int place) const;
  static bool has_cause(const Peer& peer);
  void act_on_failure();
  bool wait(std::unique_lock<std::mutex>& lock, int64_t deadline_ns);
  bool all_have_spoken() const;

  const int rank_;
  std::mutex send_mutex_;       // held while a frame is written
  bool farewell_said_ = false;  // under send_mutex_
  std::mutex mutex_;            // guards what follows
  std::condition_variable changed_;
  std::vector<Peer> peers_;               // [place]; sockets and inputs belong to the reader
  std::optional<Farewell> own_farewell_;  // the one that was said
  std::mutex action_mutex_;               // held while an action runs; guards both
  std::function<void()> on_failure_;
  std::function<RankActivity()> answer_;
  Wake stop_;
  int64_t act_at_ns_ = 0;  // of the reader: when to act on a peer that ended; 0: not at all
  std::thread reader_;
};

}  // namespace lockstep
