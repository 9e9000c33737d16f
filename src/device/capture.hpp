#pragma once

#include <c10/core/Stream.h>

#include <functional>
#include <memory>
#include <string>

namespace lockstep {

/// A training step that is being captured: work queued on its stream is recorded into CUDA graphs
/// instead of being executed. What a component does on the host happens once, during the capture;
/// through this interface it registers what must happen at each replay.
///
/// A process captures one step at a time. Builds without CUDA never capture.
class Capture {
 public:
  virtual ~Capture() = default;

  /// The capture that records the calling thread's current stream, or null. Autograd's threads,
  /// which work on the step's stream, see it too; other ranks in this process do not.
  static Capture* current();

  /// The stream that is recorded.
  virtual c10::Stream stream() const = 0;

  /// Makes each replay, the first one included, run `work` before (after) its graphs, in the order
  /// of these calls. It runs on the replaying thread with the captured stream as the current one.
  virtual void before_replay(std::function<void()> work) = 0;
  virtual void after_replay(std::function<void()> work) = 0;

  /// Ends the current graph and starts the next. Each replay runs `work` between the two, with the
  /// captured stream as the current one, so that communication keeps its deadlines and checks. Any
  /// thread that works for the captured step may call this.
  virtual void between_graphs(std::function<void()> work) = 0;

  /// Runs `undo` after a capture that failed, to revert what the host did for work that will never
  /// run. The last one registered runs first.
  virtual void if_dropped(std::function<void()> undo) = 0;

  /// Keeps an object alive as long as the graphs.
  virtual void keep(std::shared_ptr<const void> what) = 0;

  /// Guard: marks a capture as the current one.
  class Current {
   public:
    explicit Current(Capture& capture);
    ~Current();
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;
  };
};

/// Throws (kCapture) if a step is being captured, for operations that cannot be part of one. `what`
/// is the subject of the message, `remedy` says what to do instead.
void require_not_capturing(const std::string& what, const std::string& remedy);

}  // namespace lockstep
