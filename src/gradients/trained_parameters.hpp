#pragma once

#include <torch/nn/module.h>
#include <torch/types.h>

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace lockstep {

/// A parameter that is trained, with its full name.
struct TrainedParameter {
  std::string name;
  torch::Tensor tensor;
};

/// The trained parameters, each once: libtorch lists a shared one for each of its owners.
std::vector<TrainedParameter> trained_in(const torch::nn::Module& module);

/// Whether a trained parameter was found under several names. Known only if a bug is planted.
bool is_tied(const torch::Tensor& parameter);

/// What a parameter looked like when its gradients began to be averaged.
struct ParameterForm {
  std::vector<int64_t> sizes;
  torch::ScalarType dtype = torch::kFloat;
  torch::Device device = torch::kCPU;
};

std::vector<ParameterForm> forms_of(std::span<const TrainedParameter> parameters);

/// A parameter whose gradients would not be averaged, and why: "was resized …".
struct ParameterChange {
  std::string name;
  std::string what;
};

/// Finds the first of `trained`, the module's parameters now, that is not in `known` or whose form
/// has changed.
std::optional<ParameterChange> find_change(std::span<const TrainedParameter> known,
                                           std::span<const ParameterForm> forms,
                                           const std::vector<TrainedParameter>& trained);

/// Counts the micro-steps since the last synchronised backward and notices whether the weights
/// changed meanwhile: such an update would use gradients that no other rank has seen.
///
/// What a module changes in its own forward or backward, as Embedding's max_norm does, is not an
/// update: only changes between the backward of one micro-step and the next forward count.
class AccumulationWindow {
 public:
  explicit AccumulationWindow(std::span<const TrainedParameter> parameters)
      : parameters_(parameters) {}

  /// An unsynchronised backward has ended.
  void add_micro_step();

  /// A forward has ended, inside the window or not.
  void forward_ended();

  /// The window of the ranks that this one follows in a join has that many micro-steps.
  void follow(int64_t micro_steps);

  /// A synchronised backward has ended, or the gradients were dropped.
  void close() { micro_steps_ = 0; }

  int64_t micro_steps() const { return micro_steps_; }

  /// Whether the weights changed since the last micro-step.
  bool weights_changed() const { return micro_steps_ > 0 && read_marks() != marks_; }

  /// Whether no gradient of the window is left.
  bool gradients_dropped() const;

  /// Whether each is undefined or, as after the zero_grad() of libtorch 1.13, filled with zeros.
  /// Reads them all, and waits for a GPU. Zeros do not prove that they were cleared: a rank's loss
  /// may have none but zero gradients.
  bool gradients_cleared() const;

 private:
  // What an update changes: libtorch's version counter and, since torch::optim bypasses it, the
  // first element of a CPU parameter. Reading a GPU's would have to wait for it.
  struct Mark {
    uint32_t version = 0;
    double first = 0;
    bool operator==(const Mark&) const = default;
  };

  std::vector<Mark> read_marks() const;

  std::span<const TrainedParameter> parameters_;
  int64_t micro_steps_ = 0;
  std::vector<Mark> marks_;  // [parameter], after the last micro-step or forward
};

}  // namespace lockstep
