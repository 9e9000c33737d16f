#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

/// What a stage does with one micro-batch. A backward is one action, or two where the gradient of
/// the input, which the stage before waits for, comes first and those of the weights later.
enum class ActionKind : uint8_t { kForward, kBackward, kBackwardInput, kBackwardWeight };

struct Action {
  ActionKind kind = ActionKind::kForward;
  int stage = 0;
  int micro_batch = 0;

  bool operator==(const Action&) const = default;
};

char letter(ActionKind kind);              ///< F, B, I or W
std::string action_name(ActionKind kind);  ///< "forward", "backward", "input gradient", …

/// Who does what, in which order. A place is a logical device or a rank; it may have several
/// stages. Times are not part of it: a place begins its next action when what that needs is there.
struct Schedule {
  std::string name;  ///< "1f1b"
  int micro_batches = 1;
  std::vector<int> place_of_stage;           ///< [stage]
  std::vector<std::vector<Action>> actions;  ///< [place]

  int stages() const { return static_cast<int>(place_of_stage.size()); }
  int places() const { return static_cast<int>(actions.size()); }
};

/// Each micro-batch goes forward and backward through all stages before the next begins: nothing
/// overlaps. The measure of what a pipeline gains.
Schedule sequential(int stages, int micro_batches);

/// All forwards, then all backwards.
Schedule gpipe(int stages, int micro_batches);

/// A backward as early as possible, then one forward for each backward: the same time as gpipe, but
/// stage s of P holds at most P - s micro-batches. Fewer micro-batches than stages are allowed.
Schedule one_f_one_b(int stages, int micro_batches);

/// Stage s lies on place s % places, `chunks` stages on each: a smaller bubble for more messages.
/// micro_batches must be a multiple of the rounds they go in, max(1, micro_batches / places).
Schedule interleaved(int places, int micro_batches, int chunks);

/// 1f1b with split backwards (ZB-H1): weight gradients fill the time in which a place would wait.
/// No stage holds more micro-batches than 1f1b's first, min(micro_batches, stages).
Schedule zero_bubble(int stages, int micro_batches);

/// One of "sequential", "gpipe", "1f1b", "interleaved", "zero-bubble". With "interleaved" the
/// stages lie on stages / chunks places. kSchedule: an unknown name (with the one meant) or numbers
/// that do not fit.
Schedule make_schedule(std::string_view name, int stages, int micro_batches, int chunks = 2);
std::vector<std::string> schedule_names();

/// The same work where stage s lies on place place_of_stage[s], numbered from 0 without a gap: the
/// lists of places that fall together are merged in the order in which their actions would begin.
Schedule on_places(const Schedule& schedule, std::span<const int> place_of_stage);

/// Refuses (kSchedule, naming place and action) a list that runs an action twice or never, on
/// another place than its stage's, or in an order that can never end: before its own forward, in a
/// circle of places that wait for each other.
void validate(const Schedule& schedule);

/// Time one stage takes, and the time of its messages. A whole backward takes input + weight.
struct StageTimes {
  double forward = 1;
  double backward_input = 1;
  double backward_weight = 1;
  double send_forward = 0;   ///< of its output to the next stage, where that is another place
  double send_backward = 0;  ///< of its input's gradient to the stage before
};

struct PlannedAction {
  Action action;
  double begin = 0;
  double end = 0;
};

/// What a schedule would take.
struct Simulation {
  std::vector<std::vector<PlannedAction>> timeline;  ///< [place], in order
  double makespan = 0;
  double bubble = 0;                    ///< share of the places' time in which they wait
  std::vector<int> peak_micro_batches;  ///< [stage] that it holds activations of at once, at most
};

/// Plays the schedule with these times ([stage]). A message costs its sender nothing: it arrives
/// after its time. Refuses what validate() refuses.
Simulation simulate(const Schedule& schedule, std::span<const StageTimes> times);

/// A timeline as a grid of places and time slots: "cpu:0 | F0 F1 .. B0---", one row a place, with a
/// legend. Where a place has several stages a cell names its stage too: F1.0. An action is as wide
/// as it lasts, at least one column.
struct GridOptions {
  std::vector<std::string> place_names = {};  ///< empty: "place 0", …
  double tick = 0;                            ///< time of a column; 0: of about the shortest action
  std::optional<Action> marked = {};          ///< pointed out: where a step failed
  int width = 120;                            ///< characters of a row; the rest is cut. 0: no limit
};
std::string format_grid(const Schedule& schedule, const Simulation& simulation,
                        const GridOptions& options = {});

/// Layers per stage: the same number in each, the first layers % stages one more. kSchedule, here
/// and below, where there are fewer layers than stages.
std::vector<int64_t> cut_by_count(int64_t layers, int64_t stages);

/// Layers per stage, such that the costliest stage costs least. Every stage gets a layer.
std::vector<int64_t> cut_by_cost(std::span<const double> cost, int64_t stages);

}  // namespace lockstep
