// The command line of `lockstep run`, a word per line, and after an empty line the environment.

#include <CLI/CLI.hpp>

#include "cli/run.hpp"
#include "fuzz.hpp"
#include "launch/plan.hpp"
#include "lockstep/cli_parse.hpp"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace lockstep;
  using namespace lockstep::fuzz;
  Input input(data, size);
  std::vector<std::string> words = {"lockstep", "run"};
  while (!input.empty()) {
    std::string word(input.until('\n'));
    if (word.empty()) break;
    words.emplace_back(word.c_str());  // a word ends at its first NUL
  }
  const Variables variables(input.rest());
  const auto lookup = [&](const char* name) { return variables.find(name); };
  accepts([&] {
    CLI::App app("", "lockstep");
    const cli::RunFlags flags(app);
    app.set_help_flag();  // it would end this process
    flags.command()->set_help_flag();
    const cli::ProgramLine line = cli::cut_at_program(words, {flags.command()});
    parse_or_throw(app, static_cast<int>(line.flags.size()), line.flag_pointers().data());
    const LaunchPlan plan = make_plan(collect_settings(flags.given(), lookup), line.program,
                                      {.cores = {0, 1, 2, 3},
                                       .count_gpus = [] { return 2; },
                                       .random = "abc123",
                                       .temporary_folder = "/tmp",
                                       .user = 7,
                                       .lookup = lookup});
    require(plan.local_world_size >= 1 && plan.local_world_size <= 4096, "ranks are bounded");
    require(plan.slots.size() == static_cast<size_t>(plan.local_world_size),
            "every rank has a slot");
    require(plan.nnodes.least >= 1 && plan.nnodes.least <= plan.nnodes.most, "hosts are counted");
    require(plan.node_rank < plan.nnodes.most, "a host is one of the job");
    require(plan.grace_s >= 0 && plan.max_restarts >= 0, "times and restarts are not negative");
    require(!plan.command.empty(), "there is a program");
    describe_plan(plan);
    start_line(plan);
    for (int rank = 0; rank < plan.local_world_size; ++rank) {
      decide_shown(plan.console, rank, rank, Stream::kErr);
    }
  });
  return 0;
}
