// Practical 7, second half: matrix products in a lower precision, with a scaled loss.
// Start it with `lockstep run --nproc-per-node=2 practical7_amp`.

#include <torch/torch.h>

#include "course/course.hpp"
#include "lockstep/lockstep.hpp"

namespace {

int train(int argc, char** argv) {
  auto options = course::parse_options(
      {.name = "practical7_amp",
       .about = "Trains in mixed precision: lockstep run -n 2 practical7_amp --amp bf16",
       .has_ranks = true,
       .has_amp = true},
      argc, argv);

  const auto world = lockstep::World::from_env(course::world_options(options));
  const lockstep::UseDevice home(world.device());
  const auto precision = course::choose_precision(options, world.device());
  course::print_rank(world, options);

  torch::manual_seed(static_cast<uint64_t>(options.seed));
  course::Model net(options);
  net->to(world.device().torch_device());
  course::load_initial_weights(*net, options);
  const auto masters = course::make_masters(*net, options);  // float32, with --master-weights
  const auto optimizer = course::make_optimizer(net->parameters(), options, masters);
  lockstep::DistributedDataParallel ddp(net, world.comm(), course::ddp_options(options));
  lockstep::GradScaler scaler({.enabled = precision.lower && !options.no_scaler});
  scaler.name_parameters(*net);

  const course::Batches batches(options, world.device().torch_device());
  const auto rows = course::rows_of_rank(options.batch, world.rank(), world.size());
  if (options.virtual_shards == 0) ddp.set_weight(static_cast<double>(rows.count));

  course::Run run(options, world, {rows.count});
  run.watch(ddp);
  run.watch(scaler);
  run.add("model", *net).add("optimizer", *optimizer, *net).add("scaler", scaler);
  if (masters) run.add("masters", *masters, *net);  // all of these with --checkpoint
  const course::MseLoss criterion(run);
  for (int64_t step = run.resume(); step < options.steps; ++step) {
    run.step(batches.draw(step, rows), [&](const course::StepBatches& batch) {
      const auto [x, y] = batch.get(0);
      const auto loss_of = [&](const torch::Tensor& some_x, const torch::Tensor& some_y) {
        const lockstep::Autocast amp(world.device(), precision.dtype, precision.lower);
        return criterion(ddp(some_x), some_y);  // in full precision, as autocast decides
      };
      torch::Tensor loss;
      if (options.virtual_shards == 0) {
        loss = loss_of(x, y);
        scaler.scale(loss).backward();  // small gradients survive a short exponent
      } else {  // part by part: the same bits on any number of ranks (docs/same_bits.md)
        loss = ddp.backward_parts(x, y, loss_of, {.scaler = &scaler});
      }
      run.before_update();
      scaler.step(*optimizer);  // unscales; skips the update if a gradient is not finite
      scaler.update();          // a smaller scale after a skipped step, a larger one now and then
      net->zero_grad(/*set_to_none=*/true);
      return loss;
    });
    if (run.is_preempted()) return lockstep::kExitPreempted;
  }
  run.finish(*net, *optimizer, masters);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return lockstep::run_program(course::on_rank<train>, argc, argv);
}
