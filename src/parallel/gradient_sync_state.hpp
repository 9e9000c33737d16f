#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "lockstep/distributed_data_parallel.hpp"
#include "parallel/model_sync.hpp"
#include "parallel/reducer.hpp"

namespace lockstep {

/// Lets ranks have different numbers of steps: before each forward all ranks say whether they still
/// have data.
class JoinProtocol {
 public:
  explicit JoinProtocol(const JoinOptions& options) : options_(options) {}

  /// An active rank's next forward; gives the rank whose buffers count. Collective.
  int begin_step(GradientSync::State& state, bool synchronise);

  /// This rank's loop has ended: follows the others until theirs have too. Collective.
  void follow(GradientSync::State& state);

 private:
  struct Round {
    bool anybody = false;      // still has data
    bool everybody = true;     // still has data
    bool synchronise = false;  // the round's backward
    bool trains = false;       // its forward
    bool buffers = false;      // its forward's buffers travel
    int last_active = 0;       // the highest rank that still has data
  };

  Round exchange(GradientSync::State& state, bool active, bool synchronise);

  JoinOptions options_;
  int last_active_ = 0;  // of the last round that anybody trained in
};

struct GradientSync::State {
  State(std::shared_ptr<torch::nn::Module> trained, const Communicator& ranks,
        const DdpOptions& chosen);

  bool trains() const;
  bool shares_buffers() const;
  void share_buffers(int root);
  void compare_if_due();
  void check_if_due();
  void share_in_each_replay(Capture& capture, bool shares_buffers);

  std::shared_ptr<torch::nn::Module> module;
  const Communicator comm;
  const DdpOptions options;
  std::optional<Reducer> reducer;
  int no_sync_depth = 0;
  bool last_forward_synchronised = true;  // only then do buffers travel before the next
  int64_t checked_at_step = 0;
  JoinProtocol* joining = nullptr;  // inside join()
};

}  // namespace lockstep
