#pragma once

#include <c10/core/Stream.h>

#include <functional>
#include <memory>
#include <string>

namespace lockstep {

/// A training step that is being captured: work queued on its stream is recorded into CUDA graphs
/// instead of being done. What a component does on the host happens once, now, and not when the
/// graphs are replayed; through this it says what must happen each time.
///
/// One step is captured at a time in a process. Never there in builds without CUDA.
class Capture {
 public:
  virtual ~Capture() = default;

  /// The capture that records the calling thread's current stream; null: none does. Autograd's
  /// threads, which work on the step's stream, see it too; other ranks of this process do not.
  static Capture* current();

  /// The stream that is recorded.
  virtual c10::Stream stream() const = 0;

  /// Runs on the replaying thread before (after) the graphs of each replay, the first one included,
  /// in the order in which it was given; not now. The captured stream is the thread's current one.
  virtual void before_replay(std::function<void()> work) = 0;
  virtual void after_replay(std::function<void()> work) = 0;

  /// Ends the graph recorded so far and begins the next: in each replay `work` runs between the
  /// two, with the captured stream as the thread's current one; not now. So communication keeps its
  /// deadlines and its checks. Any thread may ask for it that works for the captured step.
  virtual void between_graphs(std::function<void()> work) = 0;

  /// Runs if the capture fails, after it has ended: undoes what was done on the host for work that
  /// will never be done. Last come, first undone.
  virtual void if_dropped(std::function<void()> undo) = 0;

  /// Keeps something alive as long as the graphs.
  virtual void keep(std::shared_ptr<const void> what) = 0;

  /// Guard: this capture goes on.
  class Current {
   public:
    explicit Current(Capture& capture);
    ~Current();
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;
  };
};

/// Refuses, while a step is captured, what cannot be part of it (kCapture): `what` names it as the
/// subject of a sentence, `remedy` says what to do instead. Nothing where none is captured.
void require_not_capturing(const std::string& what, const std::string& remedy);

}  // namespace lockstep
