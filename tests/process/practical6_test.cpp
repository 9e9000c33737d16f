// practical6_ddp as a user starts it: alone, and with several ranks under `lockstep run`.
// That its numbers are PyTorch's is tested in tests/parity/practical6_parity.py.

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <regex>
#include <set>
#include <thread>

#include "comm/shm/shm_rendezvous.hpp"
#include "lockstep/detail/board.hpp"
#include "lockstep/rank_environment.hpp"
#include "lockstep/record.hpp"
#include "net/socket.hpp"
#include "program_support.hpp"

namespace lockstep::test {
namespace {

// A model small enough that a run is mostly start-up.
Arguments small(const Arguments& more) {
  return join({"--steps", "4", "--batch", "12", "--dim", "8", "--hidden", "16", "--depth", "1"},
              more);
}

ChildResult run_ranks(int ranks, const Arguments& arguments, const Arguments& launcher_flags = {}) {
  return run("lockstep", join(join(join({"run", "-n", std::to_string(ranks)}, launcher_flags),
                                   {kBin + "practical6_ddp"}),
                              arguments));
}

// The job's record; the program, told to be quiet, prints nothing.
RunRecord record_of(int ranks, const Arguments& more) {
  const ScratchFolder folder;
  const ChildResult result = run_ranks(
      ranks, small(join(more, {"--quiet", "--json", folder.file("record.json")})), {"--quiet"});
  EXPECT_EQ(result.exit_code, 0) << result.errors;
  EXPECT_EQ(result.output, "");
  EXPECT_EQ(result.errors, "");
  return read_record(folder.file("record.json"));
}

void expect_losses_near(const RunRecord& actual, const RunRecord& expected, double tolerance) {
  ASSERT_EQ(actual.losses.size(), expected.losses.size());
  for (size_t i = 0; i < actual.losses.size(); ++i) {
    EXPECT_NEAR(actual.losses[i], expected.losses[i], tolerance * expected.losses[i])
        << "step " << i;
  }
}

TEST(Practical6, TheRecordIsThatOfTheWholeJob) {
  const RunRecord record = record_of(3, {"--batch", "13"});
  EXPECT_EQ(record.program, "practical6_ddp");
  EXPECT_EQ(record.world_size, 3);
  EXPECT_EQ(record.split, (std::vector<int64_t>{5, 4, 4})) << "the first ranks one row more";
  EXPECT_EQ(record.effective_batch, 13);
  ASSERT_EQ(record.devices.size(), 3U);
  for (size_t rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(record.devices[rank].name, "cpu:" + std::to_string(rank));
    EXPECT_GT(record.devices[rank].final_bytes, 0);
    EXPECT_GE(record.devices[rank].peak_bytes, record.devices[rank].final_bytes);
    EXPECT_GT(record.devices[rank].sent_bytes_per_step, 0);
  }
  ASSERT_EQ(record.ranks.size(), 3U);
  EXPECT_EQ(record.ranks[2].host, record.host.at("name"));
  for (const auto& rank : record.ranks) EXPECT_GT(rank.step_ms, 0);
  EXPECT_EQ(record.losses.size(), 4U);
  EXPECT_EQ(record.step_ms.n + record.warmup_steps, 4);
  EXPECT_GT(record.samples_per_s, 0);
  EXPECT_EQ(record.options.at("backend"), "auto");
  EXPECT_EQ(record.options.at("bucket-mib"), "25");
}

TEST(Practical6, TheRecordShowsTheBucketsOfTheLastStep) {
  const int64_t weights = ((8 + 1) * 16 + (16 + 1) * 16 + (16 + 1) * 8) * 4;
  const RunRecord one = record_of(2, {});
  ASSERT_EQ(one.buckets.size(), 1U) << "all of this model fits the first bucket";
  EXPECT_EQ(one.buckets[0].parameters, 6);
  EXPECT_GE(one.buckets[0].bytes, weights);
  EXPECT_EQ(one.all_reduces.count, 1);
  EXPECT_EQ(one.all_reduces.bytes, one.buckets[0].bytes);

  const RunRecord many = record_of(2, {"--bucket-mib", "0.0005"});
  ASSERT_GT(many.buckets.size(), 1U);
  EXPECT_EQ(many.all_reduces.count, static_cast<double>(many.buckets.size()));
  int64_t parameters = 0;
  for (size_t i = 0; i < many.buckets.size(); ++i) {
    EXPECT_EQ(many.buckets[i].index, static_cast<int>(i));
    EXPECT_GE(many.buckets[i].finished_ms, many.buckets[i].launched_ms);
    EXPECT_GE(many.buckets[i].launched_ms, i == 0 ? 0 : many.buckets[i - 1].launched_ms);
    parameters += many.buckets[i].parameters;
  }
  EXPECT_EQ(parameters, 6);
  EXPECT_GT(many.backward_ms, 0);
  EXPECT_GT(many.comm_ms, 0);
  EXPECT_GT(many.exposed_comm_ms, 0);
}

TEST(Practical6, TheLossesDoNotDependOnTheRanks) {
  const RunRecord one = record_of(1, {});
  for (const int ranks : {2, 3, 5}) expect_losses_near(record_of(ranks, {}), one, 1e-5);
}

TEST(Practical6, EveryRankHoldsTheSame) {
  const RunRecord record = record_of(3, {});
  const auto& devices = record.devices;
  EXPECT_EQ(devices[0].final_bytes, devices[1].final_bytes) << "no device 0 that holds more";
  EXPECT_EQ(devices[0].final_bytes, devices[2].final_bytes);
}

TEST(Practical6, GivesTheSameThroughEveryBackend) {
  const RunRecord one = record_of(1, {});
  for (const char* backend : {"shm", "gloo"}) {
    const RunRecord record = record_of(2, {"--backend", backend});
    EXPECT_EQ(record.options.at("backend"), backend);
    expect_losses_near(record, one, 1e-5);
  }
  expect_losses_near(record_of(1, {"--backend", "self"}), one, 0);
}

TEST(Practical6, ComparesReplicasWhereAskedTo) {
  const RunRecord unchecked = record_of(2, {});
  const RunRecord checked = record_of(2, {"--check-replicas", "1"});
  EXPECT_EQ(checked.losses, unchecked.losses) << "looking changes nothing";
}

TEST(Practical6, CompressedGradientsAreNearAndSmaller) {
  const RunRecord plain = record_of(2, {});
  for (const char* dtype : {"bf16", "fp16"}) {
    const RunRecord record = record_of(2, {"--compress", dtype});
    expect_losses_near(record, plain, 2e-2);
    EXPECT_NE(record.losses, plain.losses) << dtype << " rounds";
    // Half, but for what is sent once, such as the order of the buckets.
    EXPECT_LT(static_cast<double>(record.devices[0].sent_bytes_per_step),
              0.6 * static_cast<double>(plain.devices[0].sent_bytes_per_step));
  }
}

TEST(Practical6, TrainsTheTransformer) {
  const Arguments flags = {"--model",  "transformer", "--dim", "32",
                           "--hidden", "16",          "--lr",  "0.1"};
  const RunRecord one = record_of(1, flags);
  EXPECT_LT(one.losses.back(), one.losses.front());
  expect_losses_near(record_of(2, flags), one, 1e-5);
}

TEST(Practical6, TheConsoleShowsWhereEveryRankIsWithoutBeingAsked) {
  for (const Arguments& flags : {Arguments{}, Arguments{"--ranks", "all"}}) {
    const ChildResult result = run_ranks(2, small({}), flags);
    ASSERT_EQ(result.exit_code, 0) << result.errors;
    const size_t first = result.output.find("Rank: 0 | Local Rank: 0 | Device: cpu:0 (");
    const size_t second = result.output.find("Rank: 1 | Local Rank: 1 | Device: cpu:1 (");
    ASSERT_NE(second, std::string::npos) << result.output;
    EXPECT_LT(first, second) << "by rank";
    EXPECT_EQ(count(result.output, "Rank: 1 | Local Rank: 1 | "), 1U) << result.output;
  }
}

TEST(Practical6, RankZeroSpeaksForTheJob) {
  const ChildResult result = run_ranks(2, small({}), {"--ranks", "all"});
  ASSERT_EQ(result.exit_code, 0) << result.errors;
  EXPECT_EQ(count(result.output, "step 4/4"), 1U) << result.output;
  EXPECT_EQ(count(result.output, "practical6_ddp | ranks: 2 | backend: shm"), 1U) << result.output;
  EXPECT_EQ(count(result.output, "samples/s"), 1U) << result.output;
  EXPECT_EQ(count(result.output, "slowest rank: "), 1U) << result.output;
  EXPECT_EQ(count(result.output, "exposed"), 1U) << result.output;
}

TEST(Practical6, AloneItIsAWorldOfOne) {
  const ChildResult result = run("practical6_ddp", small({"--json", "-"}));
  ASSERT_EQ(result.exit_code, 0) << result.errors;
  const RunRecord record = record_from_json(nlohmann::json::parse(result.output));
  EXPECT_EQ(record.world_size, 1);
  EXPECT_EQ(record.split, (std::vector<int64_t>{12}));
  EXPECT_NE(result.errors.find("Rank: 0 | Local Rank: 0 | Device: cpu:0"), std::string::npos);
}

TEST(Practical6, OneTimelineHasAllRanks) {
  const ScratchFolder folder;
  const ChildResult result =
      run_ranks(2, small({"--quiet", "--bucket-mib", "0.0005", "--trace", folder.file("t.json")}));
  ASSERT_EQ(result.exit_code, 0) << result.errors;
  EXPECT_EQ(folder.count(), 1U) << "rank 0 alone writes";
  const auto trace = nlohmann::json::parse(read_bytes(folder.file("t.json")));
  std::map<std::pair<int, std::string>, int> spans;  // [rank, name]
  std::map<std::pair<int, int>, std::string> rows;   // [rank, row]
  std::map<int, std::set<int>> buckets_on_row;       // [rank] -> rows
  for (const auto& event : trace.at("traceEvents")) {
    const int rank = event.at("pid").get<int>();
    const auto name = event.at("name").get<std::string>();
    if (name == "thread_name") {
      rows[{rank, event.at("tid").get<int>()}] = event.at("args").at("name").get<std::string>();
    } else if (event.at("ph") == "X") {
      ++spans[{rank, name}];
      EXPECT_GE(event.at("dur").get<double>(), 0);
      if (name.find("bucket ") != std::string::npos && name != "wait for buckets")
        buckets_on_row[rank].insert(event.at("tid").get<int>());
    }
  }
  for (const int rank : {0, 1}) {
    for (const char* part : {"forward", "backward", "optimizer"}) {
      EXPECT_EQ((spans[{rank, part}]), 4) << part << " of rank " << rank;
    }
    EXPECT_EQ((rows[{rank, 0}]), "cpu:" + std::to_string(rank));
    EXPECT_EQ((rows[{rank, 1}]), "communication");
    EXPECT_EQ(buckets_on_row[rank], (std::set<int>{1})) << "rank " << rank;
  }
}

// The launcher's board, while the job runs: both ranks train, and their clocks run.
TEST(Practical6, CanBeWatchedWhileItRuns) {
  std::atomic<bool> ended = false;
  ChildResult result;
  std::thread job([&] {
    result = run_ranks(2, small({"--quiet", "--steps", "3000"}));
    ended = true;
  });
  RankStatus seen[2];
  std::string path;
  while (!ended && (seen[0].step == 0 || seen[1].step == 0)) {
    for (const auto& entry : list_boards()) {
      if (entry.state != BoardState::kLive || entry.info.ranks != 2) continue;
      try {
        const Board board = Board::open(entry.path);
        if (board.status(0).program != "practical6_ddp") continue;
        path = entry.path;
        for (const int rank : {0, 1}) seen[rank] = board.status(rank);
      } catch (const Error&) {
        continue;  // it has just ended
      }
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  job.join();
  EXPECT_EQ(result.exit_code, 0) << result.errors;
  for (const int rank : {0, 1}) {
    EXPECT_GT(seen[rank].pid, 0);
    EXPECT_EQ(seen[rank].phase, Phase::kTraining);
    EXPECT_GT(seen[rank].step, 0);
    EXPECT_TRUE(std::isfinite(seen[rank].loss));
    EXPECT_GT(seen[rank].busy_ns, 0);
    EXPECT_GT(seen[rank].communicating_ns, 0);
    EXPECT_GT(seen[rank].collective.sequence, 0);
    ASSERT_EQ(seen[rank].devices.size(), 1U);
    EXPECT_EQ(seen[rank].devices[0].name, "cpu:" + std::to_string(rank));
    EXPECT_GT(seen[rank].devices[0].live_bytes, 0);
  }
  EXPECT_NE(seen[0].pid, seen[1].pid);
  EXPECT_FALSE(path.empty());
  EXPECT_FALSE(std::filesystem::exists(path)) << "the launcher removes it";
}

// Exit 2 and the message with a remedy, from rank 0 alone although every rank finds the mistake.
void expect_refusal(int ranks, const Arguments& arguments, const std::string& code,
                    const std::string& part) {
  const ScratchFolder logs;  // kept after failures: not in the user's folder
  const ChildResult result = run_ranks(ranks, arguments, {"--log-dir", logs.file("logs")});
  EXPECT_EQ(result.exit_code, 2) << result.errors;
  EXPECT_EQ(result.output, "");
  EXPECT_EQ(count(result.errors, "[rank 0] error[" + code + "]"), 1U) << result.errors;
  EXPECT_EQ(count(result.errors, "] error["), 1U) << result.errors;
  EXPECT_NE(result.errors.find(part), std::string::npos) << result.errors;
  EXPECT_NE(result.errors.find("[rank 0] help: "), std::string::npos) << result.errors;
}

TEST(Practical6Refuses, FewerRowsThanRanks) {
  expect_refusal(3, small({"--batch", "2"}), "LS0008", "--batch 2 cannot be divided over 3 ranks");
}

TEST(Practical6Refuses, FilesThatDoNotFit) {
  const ScratchFolder folder;
  const std::string weights = folder.file("w.safetensors");
  ASSERT_EQ(run("practical6_ddp", small({"--quiet", "--save", weights})).exit_code, 0);
  expect_refusal(2, small({"--quiet", "--init", weights, "--hidden", "17"}), "LS0006",
                 "the model's is");
}

// Under plain srun ranks name their session after values that every user of the machine can see.
// Whoever binds the socket of that name first must not keep them from finding each other.
TEST(Practical6, UnderSrunTheSocketsNameCannotBeForeseen) {
  const std::map<std::string, std::string> step = {
      {"SLURM_PROCID", "0"},  {"SLURM_STEP_NUM_TASKS", "2"},
      {"SLURM_LOCALID", "0"}, {"SLURM_STEP_TASKS_PER_NODE", "2"},
      {"SLURM_NODEID", "0"},  {"SLURM_JOB_ID", std::to_string(::getpid())},
      {"SLURM_STEP_ID", "0"}, {"SLURM_STEP_NODELIST", "localhost"}};
  const auto known = RankEnvironment::from([&step](const char* name) -> const char* {
    const auto found = step.find(name);
    return found == step.end() ? nullptr : found->second.c_str();
  });
  const auto taken = listen_at(socket_name(known.session));
  ASSERT_NE(taken, nullptr);
  const Socket store_taken = listen_unix("store-" + known.session);

  const ScratchFolder folder;
  std::string script = "export XDG_CONFIG_HOME=" + folder.file("config");
  for (const auto& [name, value] : step) script += "; export " + name + "=" + value;
  script += "; SLURM_PROCID=1 SLURM_LOCALID=1 \"$@\" & first=$!; \"$@\" && wait $first";
  for (const char* backend : {"shm", "gloo"}) {
    const cli::Interrupts interrupts;
    const ChildResult result = cli::run_child(
        {.program = "/bin/sh",
         .arguments = join({"-c", script, "sh", kBin + "practical6_ddp"},
                           small({"--quiet", "--timeout", "20", "--backend", backend}))},
        interrupts);
    EXPECT_EQ(result.exit_code, 0) << backend << "\n" << result.errors;
  }
}

// Started alone: what is wrong with a flag does not depend on the ranks.
TEST(Practical6Refuses, BadFlagsAndValues) {
  const auto refused = [](const Arguments& flags, const std::string& part) {
    const ChildResult result = run("practical6_ddp", small(flags));
    EXPECT_EQ(result.exit_code, 2) << result.errors;
    EXPECT_EQ(result.output, "");
    EXPECT_NE(result.errors.find("error[LS0001]"), std::string::npos) << result.errors;
    EXPECT_NE(result.errors.find(part), std::string::npos) << result.errors;
    EXPECT_NE(result.errors.find("help: "), std::string::npos) << result.errors;
  };
  refused({"--backend", "glo"}, "did you mean gloo?");
  refused({"--compress", "int8"}, "off, bf16, fp16");
  refused({"--timeout", "0"}, "--timeout 0");
  refused({"--timeout", "nan"}, "--timeout");
  refused({"--check-replicas", "-1"}, "--check-replicas -1");
  refused({"--bucket-mib", "0"}, "--bucket-mib 0");
  refused({"--model", "cnn"}, "mlp, transformer");
  refused({"--model", "transformer", "--dim", "24"}, "such as 32");
  refused({"--model", "transformer", "--dim", "32", "--hidden", "100"}, "such as 128");
}

TEST(Practical6Refuses, ABackendThatCannotReachAll) {
  expect_refusal(2, small({"--backend", "self"}), "LS0018", "self serves one rank");
}

// ---- Injected faults -------------------------------------------------------------------------

ChildResult run_with_fault(const std::string& fault, const Arguments& flags = {}) {
  return run_ranks(3, small({"--quiet"}), join({"--inject", fault, "--timeout", "2"}, flags));
}

void expect_blame(const ChildResult& result, int exit_code, const Arguments& words) {
  EXPECT_EQ(result.exit_code, exit_code) << result.errors;
  for (const auto& word : words) {
    EXPECT_NE(result.errors.find(word), std::string::npos) << word << " in\n" << result.errors;
  }
}

TEST(InjectedFault, KillsTheRankInItsStep) {
  expect_blame(run_with_fault("kill@rank=1,step=3"), 137,
               {"rank 1 was killed by signal 9", "step 2"});
}

TEST(InjectedFault, EndsTheRankWithItsCode) {
  expect_blame(run_with_fault("exit@rank=2,step=2,code=7"), 7, {"rank 2"});
}

TEST(InjectedFault, StopsTheRank) {
  expect_blame(run_with_fault("stop@rank=1,step=2"), 1, {"rank 1 is stopped (SIGSTOP)"});
}

TEST(InjectedFault, MakesRanksDisagree) {
  expect_blame(run_with_fault("mismatch@rank=0,step=2"), 1, {"different", "injected mismatch"});
}

TEST(InjectedFault, IsGoneAfterARestart) {
  const ChildResult result = run_with_fault("kill@rank=1,step=3", {"--max-restarts", "1"});
  expect_blame(result, 0, {"restart 1 of 1"});
}

// A rank that sleeps outside any collective shows where, and the bundle holds what is known.
TEST(InjectedFault, AStalledRankShowsItsStackAndLeavesABundle) {
  const ScratchFolder folder;
  const ChildResult result =
      run_with_fault("slow@rank=1,step=2,ms=60000", {"--log-dir", folder.file("logs")});
  expect_blame(result, 1, {"rank 1", "its stack, innermost first: ", "nanosleep", "crash.json"});
  std::string bundle;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder.file("logs"))) {
    if (entry.path().filename() == "crash.json") bundle = entry.path();
  }
  ASSERT_FALSE(bundle.empty());
  std::ifstream file(bundle);
  const auto json = nlohmann::json::parse(file);
  ASSERT_EQ(json["ranks"].size(), 3U);
  EXPECT_FALSE(json["ranks"][1]["stack"].empty());
  EXPECT_FALSE(json["ranks"][1]["last_collectives"].empty());
  EXPECT_EQ(json["ranks"][1]["step"], 1);
  for (const auto& rank : json["ranks"]) {
    const auto versions = rank["versions"].get<std::string>();
    EXPECT_TRUE(std::regex_search(versions, std::regex("libtorch [12]\\.[0-9]"))) << versions;
  }
  EXPECT_EQ(json["plan"]["faults provoked"]["source"], "--inject");
  EXPECT_NE(json["failure"].get<std::string>().find("rank 1"), std::string::npos);
  for (const auto& [name, value] : json["environment"].items()) {
    EXPECT_EQ(name.find("TOKEN"), std::string::npos) << value;
  }
}

}  // namespace
}  // namespace lockstep::test
