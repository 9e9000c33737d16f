// Practical 5, part 2: the same training through DataParallel, on several devices of one process.

#include <torch/torch.h>

#include "course/course.hpp"
#include "lockstep/lockstep.hpp"

namespace {

int train(int argc, char** argv) {
  const auto options = course::parse_options(
      {.name = "practical5_dp",
       .about = "Trains through DataParallel on all logical devices of --devices.",
       .has_print_shapes = true,
       .never_captured = "DataParallel works on threads and streams of its own"},
      argc, argv);

  const lockstep::Devices devices(options.devices);
  const lockstep::UseDevice home(devices[0]);  // the loop below runs on device 0

  torch::manual_seed(static_cast<uint64_t>(options.seed));
  course::Mlp net(options);
  net->to(devices[0].torch_device());
  course::load_initial_weights(*net, options);
  const auto optimizer = course::make_optimizer(net->parameters(), options);
  const course::Batches batches(options, devices[0].torch_device());

  lockstep::DataParallel parallel(net, devices);

  course::Run run(options, devices);
  run.add("model", *net).add("optimizer", *optimizer, *net);  // with --checkpoint
  for (int64_t step = run.resume(); step < options.steps; ++step) {
    const auto batch = batches.get_batch(step);  // the whole batch: DataParallel divides it
    run.step(batch, [&](const torch::Tensor& x, const torch::Tensor& y) {
      net->zero_grad(/*set_to_none=*/true);
      const auto out = parallel(x);               // gathered on device 0
      const auto loss = torch::mse_loss(out, y);  // so this is the loss of the whole batch
      loss.backward();                            // gradients are summed onto net's parameters
      optimizer->step();
      return loss;
    });
    run.set_split(parallel.split(batch.x));
    if (run.is_preempted()) return lockstep::kExitPreempted;
  }
  run.finish(*net);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return lockstep::run_program(train, argc, argv);
}
