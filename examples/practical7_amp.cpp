// Practical 7, second half: matrix products in a lower precision, with a scaled loss.
// Start it with `lockstep run --nproc-per-node=2 practical7_amp`.

#include <torch/torch.h>

#include "course/batches.hpp"
#include "course/model.hpp"
#include "course/options.hpp"
#include "course/precision.hpp"
#include "course/rank_program.hpp"
#include "course/run.hpp"
#include "course/setup.hpp"
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
  ddp.set_weight(static_cast<double>(rows.count));
  course::MicroBatches micro_batches(batches, rows, 1);

  course::Run run(options, world);
  run.watch(ddp);
  run.watch(scaler);
  run.set_split({rows.count});

  // On a GPU the step is recorded once and replayed as CUDA graphs; the GPU itself decides there
  // whether an update is skipped.
  int64_t step = 0;
  lockstep::CapturedStep train_step(
      [&](const torch::Tensor& x, const torch::Tensor& y) {
        run.phase("forward");
        torch::Tensor loss;
        {
          const lockstep::Autocast amp(world.device(), precision.dtype, precision.lower);
          const auto out = ddp(x);
          if (course::plants_overflow(options, step, world)) course::plant_overflow(out);
          loss = torch::mse_loss(out, y);  // in full precision, as autocast decides
        }
        run.note_forward(loss);
        run.phase("backward");
        scaler.scale(loss).backward();  // small gradients survive a short exponent
        run.note_gradients(*net);
        run.phase("optimizer");
        scaler.step(*optimizer);  // unscales; skips the update where a gradient is not finite
        scaler.update();          // a smaller scale after a skipped step, a larger one now and then
        net->zero_grad(/*set_to_none=*/true);
        return loss;
      },
      course::capture_options(options, world.device()));
  run.watch(train_step);

  for (; step < options.steps; ++step) {
    micro_batches.draw(step);
    run.begin_step();
    const auto [x, y] = micro_batches.get(0);
    const auto loss = train_step(x, y);
    run.end_step(loss);
  }
  run.finish(*net, *optimizer, masters);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return lockstep::run_program(course::on_rank<train>, argc, argv);
}
