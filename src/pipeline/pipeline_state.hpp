#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "lockstep/pipeline.hpp"
#include "pipeline/place.hpp"

namespace lockstep {

/// Everything behind a Pipeline. Its places are those of this process: all of them, each on a
/// device's worker; or one, on the calling thread, where the others are ranks of an axis.
class Pipeline::State {
 public:
  State(std::vector<torch::nn::Sequential> modules, const Devices& devices, Schedule schedule,
        PipelineOptions options);
  State(std::vector<torch::nn::Sequential> modules, const Communicator& axis, Device& device,
        Schedule schedule, PipelineOptions options);

  torch::Tensor step(const torch::Tensor& x, const torch::Tensor& y, const PipelineStep& how);
  torch::Tensor evaluate(const torch::Tensor& x);
  void for_each_stage(const char* name, const std::function<void(int stage)>& work);
  StepTrace trace() const;
  LinkStats links() const;

  /// Steps whose gradients were applied without having been averaged; 0: none.
  int64_t spoiled_steps() const;

  PlacedStage& local(int stage) const;

  const Schedule schedule;
  std::vector<int> local_stages;               // ascending
  mutable std::optional<StepTrace> last_step;  // read from the devices when first asked for

 private:
  void require_options(size_t modules) const;
  void require_same_schedule() const;
  void require_same_loss(const Communicator& comm) const;
  void require_modules_apart(const std::vector<torch::nn::Sequential>& modules) const;
  void add_stages(Place& place, std::vector<torch::nn::Sequential>& modules);
  int world_rank() const;

  StepPlan plan_rows(const torch::Tensor& x, const torch::Tensor& y, bool trains);
  void agree_on_rows(int64_t& rows, bool trains) const;
  bool has_last() const { return local_stages.back() + 1 == schedule.stages(); }
  void weigh_micro_batches(StepPlan& plan, bool synchronise);
  std::vector<double> read_loss_weights(const StepPlan& plan) const;
  void warn_of_ignored_targets(const StepPlan& plan);
  void warn_of_losses(const std::vector<torch::Tensor>& losses);
  void go_on_backward(const torch::Tensor& x, const torch::Tensor& y, const StepPlan& plan);
  torch::Tensor share_loss(const torch::Tensor& mine) const;
  const Device& last_device() const;

  // Other ranks shall not wait for one that left a call with an error.
  template <class Call>
  auto or_abort(const Call& call) const;

  // Runs `work` for every local place, on its device, after the caller's work there and before what
  // the caller does next; all of it has ended when this returns or throws.
  void run_places(const char* name, const std::function<void(Place&)>& work);
  void run_on_workers(const char* name, const std::function<void(Place&)>& work);
  void run_here(const std::function<void(Place&)>& work);

  const PipelineOptions options_;
  std::optional<Devices> devices_;                      // where all stages are in this process
  std::optional<Communicator> axis_;                    // where they are ranks
  std::shared_ptr<const Communicator> axis_of_stages_;  // the same, for notes on their parameters
  DeviceRng seeds_;                                     // of steps
  Exchange exchange_;
  std::vector<std::unique_ptr<Wire>> wires_;  // [local place]
  std::vector<std::unique_ptr<Place>> places_;
  bool last_step_synchronised_ = true;
  bool warned_of_loss_ = false;
};

}  // namespace lockstep
