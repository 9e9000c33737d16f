// Homework 2, code 3: gradient accumulation and mixed precision together, one process per device.
// Start it with `lockstep run --nproc-per-node=2 homework2_combined`.

#include <torch/torch.h>

#include <optional>
#include <vector>

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
  auto options =
      course::parse_options({.name = "homework2_combined",
                             .about = "Accumulates gradients over micro-steps in mixed precision: "
                                      "lockstep run -n 2 homework2_combined --accum-steps 8",
                             .has_ranks = true,
                             .has_accumulation = true,
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
  course::MicroBatches micro_batches(batches, rows, options.accum_steps);
  // Gradients add up over the micro-steps: dividing each loss makes their sum a mean.
  const auto divisor = options.no_divide ? 1.0 : static_cast<double>(options.accum_steps);

  course::Run run(options, world);
  run.watch(ddp);
  run.watch(scaler);
  run.set_split({rows.count});

  // On a GPU all micro-steps and the update are recorded once and replayed as CUDA graphs.
  const auto capture = course::capture_options(options, world.device());
  int64_t step = 0;
  lockstep::CapturedStep train_step(
      [&](const std::vector<torch::Tensor>& all) {
        torch::Tensor loss_sum;
        for (int64_t micro = 0; micro < options.accum_steps; ++micro) {
          const bool last = micro + 1 == options.accum_steps;
          std::optional<lockstep::NoSync> no_sync;
          if (!last && !options.sync_every_step) no_sync.emplace(ddp);  // nothing is sent
          const auto [x, y] = micro_batches.get(all, micro);

          run.phase("forward");
          torch::Tensor loss;
          {
            const lockstep::Autocast amp(world.device(), precision.dtype, precision.lower);
            const auto out = ddp(x);
            if (last && course::plants_overflow(options, step, world)) course::plant_overflow(out);
            loss = torch::mse_loss(out, y);
          }
          run.note_forward(loss);
          run.phase("backward");
          scaler.scale(loss / divisor).backward();  // outside autocast; all-reduces if last
          loss_sum = loss_sum.defined() ? loss_sum + loss.detach() : loss.detach();
        }
        run.note_gradients(*net);
        run.phase("optimizer");
        scaler.step(*optimizer);  // unscales; skips the update where a gradient is not finite
        scaler.update();
        net->zero_grad(/*set_to_none=*/true);
        return loss_sum / options.accum_steps;
      },
      capture);
  run.watch(train_step);

  for (; step < options.steps; ++step) {
    micro_batches.draw(step);
    run.begin_step();
    const auto loss = train_step(micro_batches.all(capture.enabled));
    run.end_step(loss);
  }
  run.finish(*net, *optimizer, masters);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return lockstep::run_program(course::on_rank<train>, argc, argv);
}
