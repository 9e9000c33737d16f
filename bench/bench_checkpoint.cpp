// How long a save holds a step up: save() against the bare copy of the same tensors, which is its
// floor, and against a save that is not asynchronous. Prints one table.
//
// usage: bench_checkpoint [MIB_OF_WEIGHTS [REPETITIONS]]

#include <fmt/format.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <functional>

#include "lockstep/clock.hpp"
#include "lockstep/lockstep.hpp"
#include "lockstep/table.hpp"

namespace {

double milliseconds(const std::function<void()>& work) {
  const int64_t begin_ns = lockstep::monotonic_ns();
  work();
  return static_cast<double>(lockstep::monotonic_ns() - begin_ns) / 1e6;
}

std::string median_of(const std::vector<double>& times) {
  const lockstep::Stats stats = lockstep::summarize(times);
  return fmt::format("{:.1f} ({:.1f} to {:.1f})", stats.median, stats.min, stats.max);
}

int measure(int argc, char** argv) {
  const int64_t mib = argc > 1 ? std::atoll(argv[1]) : 64;
  const int64_t repetitions = argc > 2 ? std::atoll(argv[2]) : 10;
  torch::nn::Sequential net;
  for (int64_t i = 0; i < mib / 4; ++i) net->push_back(torch::nn::Linear(1024, 1024));  // 4 MiB
  lockstep::AdamW optimizer(net->parameters());
  for (const auto& parameter : net->parameters()) {
    parameter.mutable_grad() = torch::randn_like(parameter);
  }
  optimizer.step();

  std::vector<torch::Tensor> from, to;
  for (const auto& parameter : net->parameters()) {
    for (int copies = 0; copies < 3; ++copies) {  // weight and two averages
      from.push_back(torch::randn_like(parameter));
      to.push_back(torch::randn_like(parameter));
    }
  }
  const auto folder =
      std::filesystem::temp_directory_path() / fmt::format("lockstep-bench-{}", ::getpid());
  std::vector<double> copy, held_up, blocking, written;
  {
    lockstep::Checkpoint in_background(folder / "a", {.keep = 1});
    lockstep::Checkpoint at_once(folder / "b", {.keep = 1, .asynchronous = false});
    for (auto* each : {&in_background, &at_once}) {
      each->add("model", *net).add("optimizer", optimizer, *net);
      each->save(0);  // allocates the copies
      each->finish();
    }
    for (int64_t step = 1; step <= repetitions; ++step) {
      const torch::NoGradGuard no_grad;
      copy.push_back(milliseconds([&] {
        for (size_t i = 0; i < from.size(); ++i) to[i].copy_(from[i]);
      }));
      held_up.push_back(milliseconds([&] { in_background.save(step); }));
      written.push_back(milliseconds([&] { in_background.finish(); }));
      blocking.push_back(milliseconds([&] { at_once.save(step); }));
    }
  }
  std::filesystem::remove_all(folder);
  lockstep::Table table(fmt::format("a save of {} MiB, milliseconds: median (least to most) of {}",
                                    3 * mib, repetitions),
                        {{"what"}, {"time", lockstep::Align::kRight}});
  table.add_row({"copy of the tensors: the floor", median_of(copy)});
  table.add_row({"step held up by an asynchronous save", median_of(held_up)});
  table.add_row({"written and flushed after that", median_of(written)});
  table.add_row({"step held up by a save that is not asynchronous", median_of(blocking)});
  fmt::print("{}", table.terminal(false));
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return lockstep::run_program(measure, argc, argv);
}
