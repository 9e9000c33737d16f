// Practical 6: the same training in several processes, one per device, through
// DistributedDataParallel. Start it with `lockstep run --nproc-per-node=2 practical6_ddp`.

#include <torch/torch.h>

#include "course/course.hpp"
#include "lockstep/lockstep.hpp"

namespace {

int train(int argc, char** argv) {
  const auto options = course::parse_options(
      {.name = "practical6_ddp",
       .about = "Trains through DistributedDataParallel, one process per device: "
                "lockstep run -n 2 practical6_ddp",
       .has_ranks = true},
      argc, argv);

  const auto world = lockstep::World::from_env(course::world_options(options));
  const lockstep::UseDevice home(world.device());
  course::print_rank(world, options);

  torch::manual_seed(static_cast<uint64_t>(options.seed));
  course::Model net(options);
  net->to(world.device().torch_device());
  course::load_initial_weights(*net, options);
  const auto optimizer = course::make_optimizer(net->parameters(), options);
  const course::Batches batches(options, world.device().torch_device());

  lockstep::DistributedDataParallel ddp(net, world.comm(), course::ddp_options(options));

  // The batch is divided by hand, batch / world_size rows for each: this rank takes its own block.
  const auto rows = course::rows_of_rank(options.batch, world.rank(), world.size());
  // Each rank's loss is a mean over its rows. Weighted by the number of rows, the ranks' gradients
  // average to that of the whole batch, even if some ranks have one row more.
  if (options.virtual_shards == 0) ddp.set_weight(static_cast<double>(rows.count));

  course::Run run(options, world, {rows.count});
  run.watch(ddp);
  run.add("model", *net).add("optimizer", *optimizer, *net);  // with --checkpoint
  const course::MseLoss criterion(run);
  for (int64_t step = run.resume(); step < options.steps; ++step) {
    run.step(batches.get_rows(step, rows), [&](const torch::Tensor& x, const torch::Tensor& y) {
      net->zero_grad(/*set_to_none=*/true);
      torch::Tensor loss;
      if (options.virtual_shards == 0) {
        const auto out = ddp(x);
        loss = criterion(out, y);  // of this rank's rows
        loss.backward();           // buckets of gradients are all-reduced while this runs
      } else {  // part by part: the same bits on any number of ranks (docs/same_bits.md)
        const auto loss_of_part = [&](const torch::Tensor& part_x, const torch::Tensor& part_y) {
          return criterion(ddp(part_x), part_y);
        };
        loss = ddp.backward_parts(x, y, loss_of_part);
      }
      run.before_update();
      optimizer->step();  // the same update on every rank
      return loss;
    });
    if (run.is_preempted()) return lockstep::kExitPreempted;
  }
  run.finish(*net);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return lockstep::run_program(course::on_rank<train>, argc, argv);
}
