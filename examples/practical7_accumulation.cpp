// Practical 7, first half: gradients of several micro-steps are added up before one optimizer step.
// Start it with `lockstep run --nproc-per-node=2 practical7_accumulation`.

#include <torch/torch.h>

#include <optional>

#include "course/course.hpp"
#include "lockstep/lockstep.hpp"

namespace {

int train(int argc, char** argv) {
  const auto options =
      course::parse_options({.name = "practical7_accumulation",
                             .about = "Accumulates gradients over micro-steps: "
                                      "lockstep run -n 2 practical7_accumulation --accum-steps 8",
                             .has_ranks = true,
                             .has_accumulation = true},
                            argc, argv);

  const auto world = lockstep::World::from_env(course::world_options(options));
  const lockstep::UseDevice home(world.device());
  course::print_rank(world, options);

  torch::manual_seed(static_cast<uint64_t>(options.seed));
  course::Model net(options);
  net->to(world.device().torch_device());
  course::load_initial_weights(*net, options);
  const auto optimizer = course::make_optimizer(net->parameters(), options);
  lockstep::DistributedDataParallel ddp(net, world.comm(), course::ddp_options(options));

  const course::Batches batches(options, world.device().torch_device());
  const auto rows = course::rows_of_rank(options.batch, world.rank(), world.size());
  if (options.virtual_shards == 0) ddp.set_weight(static_cast<double>(rows.count));
  // Gradients add up over the micro-steps: dividing each loss makes their sum a mean.
  const auto divisor = options.no_divide ? 1.0 : static_cast<double>(options.accum_steps);

  course::Run run(options, world, {rows.count});
  run.watch(ddp);
  run.add("model", *net).add("optimizer", *optimizer, *net);  // with --checkpoint
  const course::MseLoss criterion(run);
  for (int64_t step = run.resume(); step < options.steps; ++step) {
    run.step(batches.draw(step, rows), [&](const course::StepBatches& micro_batches) {
      torch::Tensor loss_sum;
      for (int64_t micro = 0; micro < options.accum_steps; ++micro) {
        const bool last = micro + 1 == options.accum_steps;
        std::optional<lockstep::NoSync> no_sync;
        if (!last && !options.sync_every_step) no_sync.emplace(ddp);  // nothing is sent

        const auto [x, y] = micro_batches.get(micro);
        torch::Tensor loss;
        if (options.virtual_shards == 0) {
          loss = criterion(ddp(x), y);
          (loss / divisor).backward();  // adds to the gradients; all-reduces them if last
        } else {  // part by part: the same bits on any number of ranks (docs/same_bits.md)
          const auto loss_of_part = [&](const torch::Tensor& part_x, const torch::Tensor& part_y) {
            return criterion(ddp(part_x), part_y) / divisor;
          };
          loss = ddp.backward_parts(x, y, loss_of_part) * divisor;
        }
        run.after_micro_step(micro);
        loss_sum = loss_sum.defined() ? loss_sum + loss.detach() : loss.detach();
      }
      run.before_update();
      optimizer->step();  // one update for all micro-steps
      net->zero_grad(/*set_to_none=*/true);
      return loss_sum / options.accum_steps;
    });
    if (run.is_preempted()) return lockstep::kExitPreempted;
  }
  run.finish(*net, *optimizer);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return lockstep::run_program(course::on_rank<train>, argc, argv);
}
