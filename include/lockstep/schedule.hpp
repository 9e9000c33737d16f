#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

/// What a stage does with one micro-batch. A backward is one action, or two: first the gradient of
/// the input, which the previous stage waits for, and later those of the weights.
enum class ActionKind : uint8_t { kForward, kBackward, kBackwardInput, kBackwardWeight };

/// Work of one stage on one micro-batch.
struct Action {
  ActionKind kind = ActionKind::kForward;
  int stage = 0;
  int micro_batch = 0;

  bool operator==(const Action&) const = default;
};

char letter(ActionKind kind);              ///< F, B, I or W
std::string action_name(ActionKind kind);  ///< "forward", "backward", "input gradient", …

/// Which pipeline rank runs which actions in which order. A pipeline rank is a logical device, or a
/// process of an axis; it may have several stages. A schedule has no times: a rank begins its next
/// action as soon as it has what the action needs.
struct Schedule {
  std::string name;  ///< "1f1b"
  int micro_batches = 1;
  std::vector<int> rank_of_stage;            ///< [stage]
  std::vector<std::vector<Action>> actions;  ///< [rank]

  int stages() const { return static_cast<int>(rank_of_stage.size()); }
  int ranks() const { return static_cast<int>(actions.size()); }
};

/// Each micro-batch goes forward and backward through all stages before the next begins: nothing
/// overlaps. The baseline for what a pipeline gains.
Schedule sequential(int stages, int micro_batches);

/// All forwards, then all backwards.
Schedule gpipe(int stages, int micro_batches);

/// A backward as early as possible, then one forward for each backward: takes as long as gpipe, but
/// stage s of P holds at most P - s micro-batches. Fewer micro-batches than stages are allowed.
Schedule one_f_one_b(int stages, int micro_batches);

/// Stage s is on rank s % ranks, with `chunks` stages on each: a smaller bubble, but more messages.
/// micro_batches must be a multiple of the number of rounds, max(1, micro_batches / ranks).
Schedule interleaved(int ranks, int micro_batches, int chunks);

/// 1f1b with split backwards (ZB-H1): weight gradients fill the time in which a rank would wait.
/// No stage holds more micro-batches than 1f1b's first, min(micro_batches, stages).
Schedule zero_bubble(int stages, int micro_batches);

/// Makes "sequential", "gpipe", "1f1b", "interleaved" or "zero-bubble". "interleaved" uses
/// stages / chunks ranks. Throws kSchedule for an unknown name (and suggests the one meant) and for
/// numbers that do not fit.
Schedule make_schedule(std::string_view name, int stages, int micro_batches, int chunks = 2);
std::vector<std::string> schedule_names();

/// The same work with stage s on rank rank_of_stage[s]; ranks are numbered from 0 without a gap.
/// Lists that come together on a rank are merged in the order in which their actions would begin.
Schedule on_ranks(const Schedule& schedule, std::span<const int> rank_of_stage);

/// Refuses (kSchedule, naming rank and action) a list that runs an action twice or never, on
/// another rank than its stage's, before its own forward, or in an order that deadlocks.
void validate(const Schedule& schedule);

/// Times of one stage's actions and messages. A whole backward takes input + weight.
struct StageTimes {
  double forward = 1;
  double backward_input = 1;
  double backward_weight = 1;
  double send_forward = 0;   ///< of its output to the next stage, if that is on another rank
  double send_backward = 0;  ///< of its input's gradient to the previous stage
};

/// When an action begins and ends in a simulation.
struct PlannedAction {
  Action action;
  double begin = 0;
  double end = 0;
};

/// How long a schedule takes, and what it holds in memory.
struct Simulation {
  std::vector<std::vector<PlannedAction>> timeline;  ///< [rank], in order
  double makespan = 0;
  double bubble = 0;                    ///< share of the ranks' time that they spend waiting
  std::vector<int> peak_micro_batches;  ///< [stage] whose activations it holds at once, at most
};

/// Plays the schedule with these times ([stage]). A message does not occupy its sender; it arrives
/// after its time. Refuses what validate() refuses.
Simulation simulate(const Schedule& schedule, std::span<const StageTimes> times);

/// Prints a timeline as a grid, "cpu:0 | F0 F1 .. B0---", with a row for each rank and a legend.
/// Where a rank has several stages a cell names its stage too: F1.0. The width of a cell shows how
/// long the action lasts; it is at least one column.
struct GridOptions {
  std::vector<std::string> rank_names = {};  ///< empty: "rank 0", …
  double tick = 0;                           ///< time of a column; 0: about the shortest action's
  std::optional<Action> marked = {};         ///< pointed out, as where a step failed
  int width = 120;                           ///< characters of a row; the rest is cut. 0: no limit
};
std::string format_grid(const Schedule& schedule, const Simulation& simulation,
                        const GridOptions& options = {});

/// Layers per stage: the same number in each, and one more in the first layers % stages. Throws
/// kSchedule, as does cut_by_cost(), where there are fewer layers than stages.
std::vector<int64_t> cut_by_count(int64_t layers, int64_t stages);

/// Layers per stage that minimize the cost of the costliest stage. Every stage gets a layer.
std::vector<int64_t> cut_by_cost(std::span<const double> cost, int64_t stages);

}  // namespace lockstep
