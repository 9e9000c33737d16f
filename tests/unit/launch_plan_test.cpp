// Flags, variables and facts to a plan: pure, so every rule is checked here.

#include <gtest/gtest.h>
#include <signal.h>

#include <map>

#include "base/lists.hpp"
#include "launch/attempt.hpp"
#include "launch/flags.hpp"
#include "launch/plan.hpp"
#include "launch/slurm.hpp"
#include "support.hpp"

namespace lockstep::test::launch_plan_test {
namespace {

using Words = std::map<std::string, std::string>;

struct World {
  Words variables;
  std::vector<int> cores = {0, 1, 2, 3};
  int gpus = 0;

  LaunchPlan plan(const Words& flags, std::vector<std::string> program = {"./train"}) const {
    const auto lookup = [this](const char* name) -> const char* {
      const auto found = variables.find(name);
      return found == variables.end() ? nullptr : found->second.c_str();
    };
    return make_plan(collect_settings(flags, lookup), program,
                     {.cores = cores,
                      .count_gpus = [this] { return gpus; },
                      .random = "abc123",
                      .temporary_folder = "/tmp",
                      .user = 7,
                      .lookup = lookup});
  }
};

std::string fact(const LaunchPlan& plan, const std::string& name) {
  for (const auto& entry : plan.facts) {
    if (entry.name == name) return entry.value + " from " + entry.source;
  }
  return "no such fact";
}

TEST(LaunchPlan, RanksThatAreAskedToStopHaveTimeToSave) {
  const LaunchPlan usual = World().plan({});
  EXPECT_EQ(fact(usual, "from SIGTERM to SIGKILL"), "5 s from default");
  EXPECT_EQ(fact(usual, "the same, asked to stop by SIGTERM"), "25 s from default");
  const LaunchPlan given = World().plan({{"grace", "7"}});
  EXPECT_EQ(fact(given, "from SIGTERM to SIGKILL"), "7 s from --grace");
  EXPECT_EQ(fact(given, "the same, asked to stop by SIGTERM"), "7 s from --grace");
}

TEST(LaunchPlan, OneRankWithAllCoresByDefault) {
  const LaunchPlan plan = World().plan({});
  EXPECT_EQ(plan.local_world_size, 1);
  EXPECT_EQ(plan.threads, 4);
  EXPECT_EQ(plan.slots[0].cores, (std::vector<int>{0, 1, 2, 3}));
  EXPECT_FALSE(plan.nnodes.several());
  EXPECT_EQ(plan.node_rank, 0);
  EXPECT_EQ(plan.master_addr, "127.0.0.1");
  EXPECT_EQ(plan.master_port, 0) << "any free one, never a fixed one";
  EXPECT_EQ(plan.run_name, "train-abc123");
  EXPECT_EQ(plan.log_folder, "/tmp/lockstep-7-train-abc123");
  EXPECT_FALSE(plan.keep_logs);
  EXPECT_EQ(plan.command, (std::vector<std::string>{"./train"}));
  EXPECT_EQ(fact(plan, "ranks on this host"), "1 from default");
}

TEST(LaunchPlan, RanksShareTheCores) {
  const LaunchPlan two = World().plan({{"nproc-per-node", "2"}});
  EXPECT_EQ(two.threads, 2);
  EXPECT_EQ(two.slots[1].cores, (std::vector<int>{2, 3}));
  const LaunchPlan five = World().plan({{"nproc-per-node", "5"}});
  EXPECT_EQ(five.threads, 1);
  EXPECT_TRUE(five.slots[4].cores.empty()) << "more ranks than cores share all of them";
  const LaunchPlan loose = World().plan({{"nproc-per-node", "2"}, {"no-pin", ""}});
  EXPECT_TRUE(loose.slots[0].cores.empty());
  EXPECT_EQ(loose.threads, 2);
}

TEST(LaunchPlan, TheUsersThreadsWin) {
  const World user{.variables = {{"OMP_NUM_THREADS", "3"}}};
  EXPECT_EQ(user.plan({{"nproc-per-node", "2"}}).threads, 3);
  EXPECT_EQ(fact(user.plan({}), "threads per rank"), "3 from OMP_NUM_THREADS");
  EXPECT_EQ(user.plan({{"threads", "2"}}).threads, 2);
}

TEST(LaunchPlan, KindsOfRankCounts) {
  EXPECT_EQ(World().plan({{"nproc-per-node", "cpu"}}).local_world_size, 4);
  EXPECT_EQ(World().plan({{"nproc-per-node", "auto"}}).local_world_size, 4);
  const World gpus{.variables = {}, .gpus = 2};
  EXPECT_EQ(gpus.plan({{"nproc-per-node", "auto"}}).local_world_size, 2);
  EXPECT_EQ(gpus.plan({{"nproc-per-node", "gpu"}}).local_world_size, 2);
  test::expect_error(Code::kDeviceMissing, {"--nproc-per-node gpu"}, [] {
    World().plan({{"nproc-per-node", "gpu"}});
  });
}

TEST(LaunchPlan, VariablesOfTorchrunFillInForFlags) {
  const World user{.variables = {{"PET_NPROC_PER_NODE", "3"}, {"PET_MAX_RESTARTS", "2"}}};
  const LaunchPlan plan = user.plan({{"max-restarts", "1"}});
  EXPECT_EQ(plan.local_world_size, 3);
  EXPECT_EQ(plan.max_restarts, 1) << "a flag wins over its variable";
  EXPECT_EQ(fact(plan, "ranks on this host"), "3 from PET_NPROC_PER_NODE");
  const World standalone{.variables = {{"PET_STANDALONE", "1"}, {"PET_NNODES", "4"}}};
  EXPECT_FALSE(standalone.plan({}).nnodes.several());
  test::expect_error(Code::kUsage, {"PET_NO_PYTHON", "maybe"}, [] {
    const World odd{.variables = {{"PET_NO_PYTHON", "maybe"}}};
    odd.plan({});
  });
}

TEST(LaunchPlan, PythonFilesAndModulesGetPython) {
  const LaunchPlan script = World().plan({}, {"dir/train.py", "--lr", "1"});
  EXPECT_EQ(script.command,
            (std::vector<std::string>{"python3", "-u", "dir/train.py", "--lr", "1"}));
  EXPECT_EQ(script.script, "dir/train.py");
  EXPECT_EQ(script.run_name, "train-abc123");
  EXPECT_EQ(World().plan({{"module", ""}}, {"pkg.train"}).command,
            (std::vector<std::string>{"python3", "-u", "-m", "pkg.train"}));
  EXPECT_EQ(World().plan({{"no-python", ""}}, {"./train.py"}).command,
            (std::vector<std::string>{"./train.py"}));
  const World other{.variables = {{"PYTHON_EXEC", "/opt/python"}}};
  EXPECT_EQ(other.plan({}, {"train.py"}).command[0], "/opt/python");
}

TEST(LaunchPlan, SeveralHostsUseTheEndpoint) {
  const LaunchPlan plan = World().plan({{"nnodes", "2:2"},
                                        {"rdzv-endpoint", "node0"},
                                        {"rdzv-conf", "join_timeout=7,read_timeout=1"}});
  EXPECT_EQ(plan.nnodes, (HostCount{2, 2}));
  EXPECT_EQ(plan.node_rank, -1) << "by order of arrival";
  EXPECT_EQ(plan.endpoint_host, "node0");
  EXPECT_EQ(plan.endpoint_port, 29400);
  EXPECT_EQ(plan.join_timeout_s, 7);
  const LaunchPlan by_master = World().plan(
      {{"nnodes", "2"}, {"node-rank", "1"}, {"master-addr", "10.0.0.1"}, {"master-port", "1234"}});
  EXPECT_EQ(by_master.node_rank, 1);
  EXPECT_EQ(by_master.endpoint_host, "10.0.0.1");
  EXPECT_EQ(by_master.endpoint_port, 1234);
  const LaunchPlan six = World().plan({{"nnodes", "2"}, {"rdzv-endpoint", "[::1]:5"}});
  EXPECT_EQ(six.endpoint_host, "::1");
  EXPECT_EQ(six.endpoint_port, 5);
  EXPECT_EQ(World().plan({{"nnodes", "2"}, {"rdzv-endpoint", "fe80::1"}}).endpoint_host, "fe80::1");
}

struct BadPlan {
  Words flags;
  std::string fragment;
};

TEST(LaunchPlan, EveryBadValueIsNamed) {
  const std::vector<BadPlan> plans = {
      {{{"nproc-per-node", "two"}}, "--nproc-per-node \"two\" is neither a number nor auto"},
      {{{"nproc-per-node", "0"}}, "--nproc-per-node \"0\" is not a whole number from 1 to 4096"},
      {{{"nproc-per-node", "-1"}}, "from 1 to 4096"},
      {{{"nnodes", "3:1"}}, "--nnodes \"3:1\" is neither a number of hosts from 1 to 2048"},
      {{{"nnodes", "0:2"}}, "--nnodes \"0:2\""},
      {{{"nnodes", "1:"}}, "--nnodes \"1:\""},
      {{{"nnodes", "1:2:3"}}, "--nnodes 1:3 for one to three hosts"},
      {{{"nnodes", "1:4"}}, "1 to 4 hosts need a rendezvous endpoint"},
      {{{"nnodes", "x"}}, "--nnodes \"x\""},
      {{{"nnodes", "2"}}, "2 hosts need a rendezvous endpoint"},
      {{{"nnodes", "2"}, {"node-rank", "2"}, {"rdzv-endpoint", "a"}}, "--node-rank \"2\""},
      {{{"node-rank", "1"}}, "there is one host"},
      {{{"nnodes", "2"}, {"rdzv-endpoint", "a:port"}}, "no port from 1 to 65535: \"port\""},
      {{{"nnodes", "2"}, {"rdzv-endpoint", "a:"}}, "ends where a port should be"},
      {{{"nnodes", "2"}, {"rdzv-endpoint", ":5"}}, "names no host"},
      {{{"nnodes", "2"}, {"rdzv-endpoint", "[::1"}}, "has no ]"},
      {{{"nnodes", "2"}, {"rdzv-endpoint", "a"}, {"rdzv-conf", "x"}}, "KEY=VALUE"},
      {{{"nnodes", "2"}, {"rdzv-endpoint", "a"}, {"backend", "shm"}}, "works on one host only"},
      {{{"rdzv-backend", "etcd"}}, "--rdzv-backend \"etcd\""},
      {{{"backend", "ncl"}}, "write auto, shm, gloo, two_level, nccl or ipc"},
      {{{"backend", "mpi"}}, "use mpirun -n N PROGRAM --backend mpi"},
      {{{"grace", "soon"}}, "--grace \"soon\""},
      {{{"grace", "nan"}}, "--grace \"nan\""},
      {{{"timeout", "0"}}, "--timeout \"0\""},
      {{{"timeout", "-3"}}, "--timeout \"-3\""},
      {{{"step-timeout", "0"}}, "--step-timeout \"0\" is less than 1 s"},
      {{{"max-restarts", "-1"}}, "--max-restarts \"-1\""},
      {{{"threads", "0"}}, "--threads \"0\""},
      {{{"ranks", "some"}}, "write --ranks all or --ranks 0,3"},
      {{{"ranks", "0,7"}}, "names rank 7"},
      {{{"tee", "4"}}, "--tee \"4\""},
      {{{"redirects", "5:1"}}, "--redirects \"5:1\""},
      {{{"local-ranks-filter", "a"}}, "--local-ranks-filter \"a\""},
      {{{"run-path", ""}}, "--run-path"},
      {{{"module", ""}, {"no-python", ""}}, "contradict"},
      {{{"master-port", "70000"}}, "--master-port \"70000\""},
  };
  for (const auto& bad : plans) {
    test::expect_error(Code::kUsage, {bad.fragment}, [&] { World().plan(bad.flags); });
  }
  test::expect_error(Code::kUsage, {"needs a program"}, [] { World().plan({}, {}); });
}

TEST(LaunchPlan, FlagsWithoutEffectAreNoted) {
  const LaunchPlan plan = World().plan(
      {{"start-method", "spawn"}, {"monitor-interval", "5"}, {"rdzv-endpoint", "x:0"}});
  ASSERT_EQ(plan.notes.size(), 3U);
  EXPECT_EQ(plan.notes[0], "--monitor-interval has no effect: exits are seen at once");
  EXPECT_EQ(plan.notes[2], "--rdzv-endpoint has no effect: there is one host");
}

TEST(LaunchPlan, TheStartLineSaysWhatEachRankGets) {
  EXPECT_NE(start_line(World().plan({{"nproc-per-node", "4"}}))
                .find("4 ranks, 1 thread and 1 core each, backend auto, logs after a failure in "
                      "/tmp/lockstep-7-train-abc123"),
            std::string::npos);
  EXPECT_NE(start_line(World().plan({{"nproc-per-node", "8"}})).find("4 cores shared"),
            std::string::npos);
  const LaunchPlan kept = World().plan({{"log-dir", "here"}});
  EXPECT_TRUE(kept.keep_logs);
  EXPECT_NE(start_line(kept).find("logs in here/train-abc123"), std::string::npos);
}

TEST(ConsolePlan, RankZeroAndEverybodysErrors) {
  const ConsolePlan plan = World().plan({{"nproc-per-node", "3"}}).console;
  EXPECT_EQ(decide_shown(plan, 0, 0, Stream::kOut), Shown::kLive);
  EXPECT_EQ(decide_shown(plan, 0, 0, Stream::kErr), Shown::kLive);
  EXPECT_EQ(decide_shown(plan, 2, 2, Stream::kOut), Shown::kHidden);
  EXPECT_EQ(decide_shown(plan, 2, 2, Stream::kErr), Shown::kHeld);
}

TEST(ConsolePlan, RanksFiltersTeeAndRedirects) {
  const auto shown = [](const Words& flags, int rank, Stream stream) {
    Words all = flags;
    all["nproc-per-node"] = "3";
    return decide_shown(World().plan(all).console, rank, rank, stream);
  };
  EXPECT_EQ(shown({{"ranks", "all"}}, 2, Stream::kOut), Shown::kLive);
  EXPECT_EQ(shown({{"ranks", "1-2"}}, 2, Stream::kOut), Shown::kLive);
  EXPECT_EQ(shown({{"ranks", "1-2"}}, 0, Stream::kOut), Shown::kHidden);
  EXPECT_EQ(shown({{"local-ranks-filter", "1"}}, 1, Stream::kOut), Shown::kLive);
  EXPECT_EQ(shown({{"local-ranks-filter", "1"}}, 0, Stream::kErr), Shown::kHidden);
  EXPECT_EQ(shown({{"tee", "1"}}, 2, Stream::kOut), Shown::kLive);
  EXPECT_EQ(shown({{"tee", "1"}}, 2, Stream::kErr), Shown::kHeld);
  EXPECT_EQ(shown({{"redirects", "3"}}, 0, Stream::kOut), Shown::kHidden);
  EXPECT_EQ(shown({{"redirects", "0:2,1:3"}}, 0, Stream::kOut), Shown::kLive);
  EXPECT_EQ(shown({{"redirects", "0:2,1:3"}}, 0, Stream::kErr), Shown::kHidden);
  EXPECT_EQ(shown({{"redirects", "3"}, {"tee", "0:1"}}, 0, Stream::kOut), Shown::kLive);
}

std::map<std::string, std::string> environment_of(const LaunchPlan& plan,
                                                  const AttemptEnvironment& environment,
                                                  int local_rank,
                                                  const std::vector<std::string>& inherited) {
  std::map<std::string, std::string> variables;
  for (const auto& entry : worker_environment(plan, environment, local_rank, inherited)) {
    const size_t equals = entry.find('=');
    variables[entry.substr(0, equals)] = entry.substr(equals + 1);
  }
  return variables;
}

TEST(WorkerEnvironment, IsTorchrunsContractAndOurs) {
  const LaunchPlan plan = World().plan({{"nproc-per-node", "2"},
                                        {"nnodes", "2"},
                                        {"rdzv-endpoint", "n0"},
                                        {"rdzv-id", "job"},
                                        {"timeout", "2.5"},
                                        {"backend", "gloo"},
                                        {"max-restarts", "3"}});
  AttemptEnvironment environment;
  environment.layout.node_rank = 1;
  environment.layout.local_world_sizes = {3, 2};
  environment.layout.hosts = {"n0", "n1"};
  environment.layout.master_addr = "10.0.0.1";
  environment.layout.master_port = 4242;
  environment.layout.session = "5e55";
  environment.layout.store = "n0:777";
  environment.layout.attempt = 2;
  environment.board = "/dev/shm/b";
  environment.logs = "/logs/2";
  environment.token = "secret";
  const auto variables = environment_of(plan, environment, 1, {"HOME=/me", "RANK=9", "A=b=c"});
  const std::map<std::string, std::string> expected = {
      {"RANK", "4"},
      {"LOCAL_RANK", "1"},
      {"WORLD_SIZE", "5"},
      {"LOCAL_WORLD_SIZE", "2"},
      {"GROUP_RANK", "1"},
      {"GROUP_WORLD_SIZE", "2"},
      {"ROLE_RANK", "4"},
      {"ROLE_NAME", "default"},
      {"ROLE_WORLD_SIZE", "5"},
      {"MASTER_ADDR", "10.0.0.1"},
      {"MASTER_PORT", "4242"},
      {"TORCHELASTIC_RESTART_COUNT", "2"},
      {"TORCHELASTIC_MAX_RESTARTS", "3"},
      {"TORCHELASTIC_RUN_ID", "job"},
      {"TORCHELASTIC_USE_AGENT_STORE", "False"},
      {"TORCHELASTIC_ERROR_FILE", "/logs/2/rank4.error.json"},
      {"TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"},
      {"OMP_NUM_THREADS", "2"},
      {"LOCKSTEP_RUN", "train-abc123"},
      {"LOCKSTEP_SESSION", "5e55"},
      {"LOCKSTEP_BOARD", "/dev/shm/b"},
      {"LOCKSTEP_HOST_CORES", "0-3"},
      {"LOCKSTEP_TIMEOUT_S", "2.5"},
      {"LOCKSTEP_BACKEND", "gloo"},
      {"LOCKSTEP_STORE", "n0:777"},
      {"LOCKSTEP_TOKEN", "secret"},
      {"HOME", "/me"},
      {"A", "b=c"},
  };
  for (const auto& [name, value] : expected) EXPECT_EQ(variables.at(name), value) << name;
}

TEST(WorkerEnvironment, AnOuterLaunchersVariablesAreNotPassedOn) {
  AttemptEnvironment environment;
  environment.layout.local_world_sizes = {1};
  const auto variables =
      environment_of(World().plan({}), environment, 0,
                     {"LOCKSTEP_STORE=x", "LOCKSTEP_TOKEN=y", "TORCH_NCCL_ASYNC_ERROR_HANDLING=0"});
  EXPECT_FALSE(variables.contains("LOCKSTEP_STORE"));
  EXPECT_FALSE(variables.contains("LOCKSTEP_TOKEN"));
  EXPECT_EQ(variables.at("TORCH_NCCL_ASYNC_ERROR_HANDLING"), "0") << "the user's own choice";
}

TEST(NumberList, ReadsAndWrites) {
  EXPECT_EQ(format_number_list({0, 1, 2, 5, 7, 8}), "0-2,5,7-8");
  EXPECT_EQ(*parse_number_list("3,0-1,1"), (std::vector<int>{0, 1, 3}));
  EXPECT_EQ(*parse_number_list("2147483646-2147483647"),
            (std::vector<int>{2147483646, 2147483647}));
  EXPECT_EQ(parse_number_list("0-40000,40001-60000"), parse_number_list("0-60000"));
  for (const char* bad : {"", ",", "1,", "a", "-1", "3-1", "1-", "0-99999", "1 2"}) {
    EXPECT_FALSE(parse_number_list(bad)) << bad;
  }
  EXPECT_EQ(name_ranks({2}), "rank 2");
  EXPECT_EQ(name_ranks({0, 1, 3}), "ranks 0, 1 and 3");
  EXPECT_EQ(name_ranks({0, 1, 2, 3, 4, 5, 6, 7, 9}), "ranks 0-7,9");
}

TEST(LaunchPlan, SignalsStopTheRanksOrArePassedOn) {
  const LaunchPlan plan = World().plan({});
  EXPECT_EQ(fact(plan, "signals that stop the ranks"),
            "SIGTERM,SIGINT,SIGHUP,SIGQUIT from default");
  EXPECT_EQ(fact(plan, "signals passed on to the ranks"), "SIGUSR1,SIGUSR2 from default");
  const LaunchPlan chosen = World().plan({{"signals-to-handle", "SIGTERM,USR2,SIGUSR2,SIGWINCH"}});
  EXPECT_EQ(chosen.signals, (std::vector<int>{SIGTERM, SIGUSR2, SIGWINCH}));
  EXPECT_TRUE(chosen.notes.empty()) << "it has an effect";
  for (const char* bad : {"", "SIGKILL", "SIGTERM,", "SIGSEGV", "10", "term"}) {
    test::expect_error(Code::kUsage, {"--signals-to-handle", "SIGUSR1"}, [&] {
      World().plan({{"signals-to-handle", bad}});
    });
  }
}

TEST(LaunchPlan, TheSilenceOfALostHostCanBeChosen) {
  const Words two = {{"nnodes", "2"}, {"rdzv-endpoint", "node0"}};
  EXPECT_EQ(World().plan(two).host_timeout_s, 10);
  Words patient = two;
  patient["host-timeout"] = "120";
  EXPECT_EQ(World().plan(patient).host_timeout_s, 120);
  patient["host-timeout"] = "1";
  test::expect_error(Code::kUsage, {"--host-timeout \"1\"", "less than 3 s"},
                     [&] { World().plan(patient); });
  EXPECT_EQ(World().plan(two).heartbeat_s, 1);
  patient["heartbeat"] = "5";
  patient["host-timeout"] = "14";
  test::expect_error(Code::kUsage, {"--host-timeout \"14\" is less than 15 s", "--host-timeout 50"},
                     [&] { World().plan(patient); });
  patient["host-timeout"] = "15";
  EXPECT_EQ(World().plan(patient).heartbeat_s, 5);
  patient.erase("host-timeout");
  test::expect_error(Code::kUsage, {"the default of --host-timeout \"10\" is less than 15 s"},
                     [&] { World().plan(patient); });
  patient["heartbeat"] = "0.01";
  test::expect_error(Code::kUsage, {"--heartbeat \"0.01\" is less than 0.1 s"},
                     [&] { World().plan(patient); });
}

TEST(LaunchPlan, ElasticHostsHaveALastCall) {
  Words flags = {{"nnodes", "1:3"}, {"rdzv-endpoint", "node0"}};
  const LaunchPlan plan = World().plan(flags);
  EXPECT_EQ(plan.nnodes, (HostCount{1, 3}));
  EXPECT_TRUE(plan.nnodes.several());
  EXPECT_EQ(plan.last_call_s, 30);
  EXPECT_EQ(plan.join_timeout_s, 300);
  EXPECT_EQ(fact(plan, "hosts"), "1 to 3 from --nnodes");
  EXPECT_NE(start_line(plan).find("on each of 1 to 3 hosts"), std::string::npos);
  flags["rdzv-conf"] = "last_call_timeout=3,join_timeout=20";
  EXPECT_EQ(World().plan(flags).last_call_s, 3);
  EXPECT_EQ(World().plan(flags).join_timeout_s, 20);
  EXPECT_EQ(fact(World().plan(flags), "wait for each further host"), "3 s from --rdzv-conf");
  flags["last-call"] = "5";
  EXPECT_EQ(World().plan(flags).last_call_s, 5) << "a flag of lockstep wins";
  Words fixed = flags;
  fixed["nnodes"] = "3";
  EXPECT_EQ(World().plan(fixed).notes.at(0),
            "--last-call has no effect: the number of hosts is fixed");
  Words hasty = {{"nnodes", "1:3"}, {"rdzv-endpoint", "node0"}, {"join-timeout", "20"}};
  EXPECT_EQ(World().plan(hasty).last_call_s, 10) << "within the time for all";
  flags["last-call"] = "20";
  test::expect_error(Code::kUsage, {"20 s, is not shorter than", "--join-timeout 300"},
                     [&] { World().plan(flags); });
  flags["last-call"] = "-1";
  test::expect_error(Code::kUsage, {"--last-call \"-1\""}, [&] { World().plan(flags); });
  Words two = {{"nnodes", "2"}, {"rdzv-endpoint", "node0"}, {"join-timeout", "0"}};
  test::expect_error(Code::kUsage, {"--join-timeout \"0\""}, [&] { World().plan(two); });
}

SlurmJob slurm_job() {
  SlurmJob job;
  job.job_id = "77";
  job.in_step = true;
  job.hosts = {"n4", "n5"};
  job.tasks_per_node = {1, 1};
  job.node_rank = 1;
  job.here = "n5";
  job.port = 23456;
  return job;
}

TEST(Cluster, AStepOfLaunchersNeedsNoFlags) {
  Settings settings;
  const ClusterStart start = apply_slurm(slurm_job(), settings);
  EXPECT_TRUE(start.srun.empty());
  EXPECT_EQ(start.announcement, "SLURM job 77: host 1 of 2 (n5)");
  EXPECT_EQ(settings.at("nnodes").text, "2");
  EXPECT_EQ(settings.at("node-rank").text, "1");
  EXPECT_EQ(settings.at("rdzv-endpoint").text, "n4:23456");
  EXPECT_EQ(settings.at("rdzv-id").text, "77");
  Settings flags = {{"nnodes", {"3", "--nnodes"}}};
  apply_slurm(slurm_job(), flags);
  EXPECT_EQ(flags.at("nnodes").text, "3") << "a flag wins";
}

TEST(Cluster, AnAllocationOfSeveralHostsGoesThroughSrun) {
  SlurmJob job = slurm_job();
  job.in_step = false;
  job.node_rank = 0;
  job.tasks_per_node = {4, 4};
  Settings settings;
  const ClusterStart start = apply_slurm(job, settings);
  ASSERT_FALSE(start.srun.empty());
  EXPECT_EQ(start.srun[0], "srun");
  EXPECT_EQ(settings.at("nproc-per-node").text, "4") << "tasks of the allocation are ranks";
  Settings alone = {{"standalone", {"1", "--standalone"}}};
  EXPECT_TRUE(apply_slurm(job, alone).srun.empty());
  Settings elastic = {{"nnodes", {"1:2", "--nnodes"}}};
  EXPECT_FALSE(apply_slurm(job, elastic).srun.empty()) << "a launcher on each, of which one may go";
  elastic["rdzv-endpoint"] = {"n4:1", "--rdzv-endpoint"};
  EXPECT_TRUE(apply_slurm(job, elastic).srun.empty()) << "started by hand";
  Settings fixed = {{"nnodes", {"2", "--nnodes"}}};
  EXPECT_TRUE(apply_slurm(job, fixed).srun.empty()) << "started by hand";
}

TEST(Cluster, AnElasticStepKeepsItsRange) {
  Settings settings = {{"nnodes", {"1:2", "--nnodes"}}};
  apply_slurm(slurm_job(), settings);
  EXPECT_EQ(settings.at("nnodes").text, "1:2");
  EXPECT_EQ(settings.at("node-rank").text, "1");
  EXPECT_EQ(settings.at("rdzv-endpoint").text, "n4:23456");
}

// `salloc -N 1 lockstep run`: the command runs where it was typed, not on the node.
TEST(Cluster, AnAllocationOfAnotherHostGoesThroughSrun) {
  SlurmJob job = slurm_job();
  job.in_step = false;
  job.hosts = {"n4"};
  job.tasks_per_node = {2};
  job.node_rank = 0;
  job.here = "";
  Settings settings;
  const ClusterStart start = apply_slurm(job, settings);
  ASSERT_FALSE(start.srun.empty()) << "the ranks would run on the login node";
  EXPECT_EQ(start.srun[1], "--nodes=1");
  EXPECT_EQ(start.announcement,
            "SLURM job 77: srun starts a launcher on n4, since this host is not part of the job");
  Settings alone = {{"standalone", {"1", "--standalone"}}};
  const ClusterStart here = apply_slurm(job, alone);
  EXPECT_TRUE(here.srun.empty());
  EXPECT_EQ(here.announcement, "SLURM job 77 has n4, but --standalone runs the ranks on this host");
  job.here = "n4";
  Settings on_node;
  EXPECT_TRUE(apply_slurm(job, on_node).srun.empty());
  EXPECT_EQ(apply_slurm(job, on_node).announcement, "SLURM job 77 on n4");
}

TEST(Cluster, SeveralLaunchersOnAHostAreRefused) {
  SlurmJob job = slurm_job();
  job.tasks_per_node = {1, 2};
  test::expect_error(Code::kLaunch, {"2 launchers on one host", "--ntasks-per-node=1"}, [&] {
    Settings settings;
    apply_slurm(job, settings);
  });
}

TEST(LaunchPlan, FaultsAreCheckedAgainstTheJob) {
  const LaunchPlan plan = World().plan({{"nproc-per-node", "2"}, {"inject", "kill@rank=1,step=5"}});
  ASSERT_EQ(plan.faults.size(), 1U);
  EXPECT_EQ(fact(plan, "faults provoked"), "kill@rank=1,step=5 from --inject");
  const auto refused = [](const Words& flags, const std::string& reason) {
    test::expect_error(Code::kUsage, {reason}, [&] { World().plan(flags); });
  };
  refused({{"nproc-per-node", "2"}, {"inject", "kill@rank=2,step=5"}}, "names rank 2");
  refused({{"inject", "nan@rank=0,step=5"}}, "needs gradients that ranks average");
  refused({{"nproc-per-node", "2"}, {"inject", "netcut@rank=0,step=5"}}, "--backend gloo");
  refused({{"inject", "kil@rank=0,step=5"}}, "there is no fault \"kil\"");
}

}  // namespace
}  // namespace lockstep::test::launch_plan_test
