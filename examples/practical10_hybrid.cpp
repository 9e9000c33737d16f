// Practical 10: data parallel over processes, the model in stages on several devices, micro-batches
// that flow through them. Start it with `lockstep run --nproc-per-node=2 practical10_hybrid`.

#include <torch/torch.h>

#include <memory>
#include <vector>

#include "course/course.hpp"
#include "course/hybrid.hpp"
#include "course/pipeline_meter.hpp"
#include "lockstep/lockstep.hpp"

namespace {

int train(int argc, char** argv) {
  auto options = course::parse_options(
      {.name = "practical10_hybrid",
       .about = "Trains in stages, data parallel over processes: "
                "lockstep run -n 2 practical10_hybrid --stages 2 --micro-batches 4",
       .has_ranks = true,
       .has_pipeline = true,
       .never_captured = "a pipeline works on threads and streams of its own"},
      argc, argv);
  const auto plan = course::plan_hybrid(options);

  // Of R ranks, rank r has the devices r, r + R, r + 2 R, …: one for each stage.
  const auto world =
      lockstep::World::from_env(course::world_options(options, plan.devices_per_rank()));
  const lockstep::UseDevice home(world.device());
  const auto precision = course::choose_precision(options, world.device());
  const lockstep::Mesh mesh(world.comm(), plan.axes());
  const auto links = course::measure_links(plan, world, mesh);  // for the report's predictions

  // Ranks of one pipeline take the same rows.
  const course::Batches batches(options, world.device().torch_device());
  const auto rows = course::rows_of_rank(options.batch, mesh.coordinate("dp"), plan.data);

  // The model, a list of layers in the host's memory, is cut into stages. Each stage then moves to
  // its own device, so that a device holds nothing else.
  course::Layers model(options, mesh.axis("tp"));
  const auto cut = course::cut_model(options, model, world, precision, rows.count);
  const auto stages = lockstep::split_stages(model.layers(), cut.layers_per_stage);
  lockstep::PipelineOptions how{
      .loss = [](const auto& out, const auto& y) { return torch::mse_loss(out, y); },
      .recompute = plan.recompute,
      .bucket_cap_bytes = course::bucket_cap_bytes(options),
      .nonfinite = course::nonfinite_answer(options),
      .virtual_shards = options.virtual_shards};  // docs/same_bits.md
  if (plan.data > 1) how.data = mesh.axis("dp");  // the ranks with the same stages
  const auto pipeline =
      plan.over_ranks
          ? std::make_unique<lockstep::Pipeline>(stages, mesh.axis("pp"), world.device(),
                                                 plan.schedule, how)
          : std::make_unique<lockstep::Pipeline>(stages, world.devices(), plan.schedule, how);
  course::print_placement(*pipeline, plan, world, options);

  lockstep::GradScaler scaler(
      {.enabled = precision.lower, .model_parallel = mesh.plane({"pp", "tp"})});
  scaler.name_parameters(*model.net());
  course::HybridOptimizer optimizer(*pipeline, scaler, options);

  // The first rank of a pipeline answers for its rows and loss.
  const bool first = mesh.coordinate("pp") == 0 && mesh.coordinate("tp") == 0;
  course::Run run(options, world,
                  first ? std::vector<int64_t>{rows.count} : std::vector<int64_t>{});
  run.watch(scaler);
  run.watch(*pipeline,
            {plan, cut, links, mesh, rows.count, [&] { return model.tensor_traffic(); }});
  run.add("model", *pipeline).add("scaler", scaler);  // with --checkpoint
  for (auto* each : optimizer.optimizers()) run.add("optimizer", *each, *pipeline);
  for (int64_t step = run.resume(); step < options.steps; ++step) {
    run.step(batches.draw(step, rows), [&](const course::StepBatches& micro_steps) {
      torch::Tensor loss_sum;
      for (int64_t micro = 0; micro < options.accum_steps; ++micro) {
        const auto [x, y] = micro_steps.get(micro);
        const lockstep::Autocast amp(world.device(), precision.dtype, precision.lower);
        // Every micro-batch goes forward and backward through all stages, as the schedule says.
        // Each stage's gradients are averaged over `dp` once, when its last backward has ended.
        const auto loss =
            pipeline->step(x, y,
                           {.loss_factor = 1.0 / static_cast<double>(options.accum_steps),
                            .synchronise = micro + 1 == options.accum_steps,
                            .scaler = &scaler});
        run.after_pipeline_step(micro);
        loss_sum = loss_sum.defined() ? loss_sum + loss : loss;
      }
      optimizer.step();  // every stage on its device
      return loss_sum / options.accum_steps;
    });
    if (run.is_preempted()) return lockstep::kExitPreempted;
  }
  if (!options.save.empty()) {
    model.collect(mesh.axis("pp"), cut.layers_per_stage, plan.schedule.rank_of_stage);
  }
  run.finish(*model.net());
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return lockstep::run_program(course::on_rank<train>, argc, argv);
}
