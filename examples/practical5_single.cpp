// Practical 5, part 1: training on one device. The baseline that practical5_dp is compared with.

#include <torch/torch.h>

#include "course/course.hpp"
#include "lockstep/lockstep.hpp"

namespace {

int train(int argc, char** argv) {
  const auto options = course::parse_options(
      {.name = "practical5_single",
       .about = "Trains on the first logical device of --devices, with its share of the machine."},
      argc, argv);

  // With cpu:2 on two cores the first device has one core: what one of two devices can do alone.
  const auto plans = lockstep::plan_devices(options.devices, lockstep::detect_hardware());
  const lockstep::Devices devices({plans.front()});
  const lockstep::UseDevice home(devices[0]);

  torch::manual_seed(static_cast<uint64_t>(options.seed));
  course::Mlp net(options);
  net->to(devices[0].torch_device());
  course::load_initial_weights(*net, options);
  const auto optimizer = course::make_optimizer(net->parameters(), options);
  const course::Batches batches(options, devices[0].torch_device());

  course::Run run(options, devices);
  run.add("model", *net).add("optimizer", *optimizer, *net);  // with --checkpoint
  for (int64_t step = run.resume(); step < options.steps; ++step) {
    run.step(batches.get_batch(step), [&](const torch::Tensor& x, const torch::Tensor& y) {
      net->zero_grad(/*set_to_none=*/true);
      const auto out = net->forward(x);
      const auto loss = torch::mse_loss(out, y);
      loss.backward();
      optimizer->step();
      return loss;
    });
    if (run.is_preempted()) return lockstep::kExitPreempted;
  }
  run.finish(*net);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return lockstep::run_program(train, argc, argv);
}
