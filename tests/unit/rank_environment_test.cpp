#include "lockstep/rank_environment.hpp"

#include <unistd.h>

#include <map>
#include <set>
#include <string>

#include "support.hpp"

namespace lockstep::test::rank_environment_test {
namespace {

using Variables = std::map<std::string, std::string>;

RankEnvironment read(const Variables& variables) {
  return RankEnvironment::from([&](const char* name) -> const char* {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  });
}

Variables with(Variables variables, const Variables& changes) {
  for (const auto& [name, value] : changes) variables[name] = value;
  return variables;
}

Variables without(Variables variables, const std::string& name) {
  variables.erase(name);
  return variables;
}

void expect_refused(const Variables& variables, std::initializer_list<std::string> fragments) {
  expect_error(Code::kWorld, fragments, [&] { read(variables); });
}

const Variables kTorchrun = {{"RANK", "5"},
                             {"WORLD_SIZE", "8"},
                             {"LOCAL_RANK", "1"},
                             {"LOCAL_WORLD_SIZE", "4"},
                             {"GROUP_RANK", "1"},
                             {"MASTER_ADDR", "node0"},
                             {"MASTER_PORT", "29500"},
                             {"TORCHELASTIC_RUN_ID", "a-run"},
                             {"TORCHELASTIC_RESTART_COUNT", "2"}};

const Variables kOpenMpi = {
    {"OMPI_COMM_WORLD_RANK", "2"},       {"OMPI_COMM_WORLD_SIZE", "3"},
    {"OMPI_COMM_WORLD_LOCAL_RANK", "2"}, {"OMPI_COMM_WORLD_LOCAL_SIZE", "3"},
    {"OMPI_COMM_WORLD_NODE_RANK", "2"},  {"PMIX_NAMESPACE", "47644673"}};

const Variables kHydra = {
    {"PMI_RANK", "3"}, {"PMI_SIZE", "4"}, {"MPI_LOCALRANKID", "1"}, {"MPI_LOCALNRANKS", "2"}};

const Variables kSrun = {{"SLURM_JOB_ID", "1234"},
                         {"SLURM_STEP_ID", "0"},
                         {"SLURM_PROCID", "6"},
                         {"SLURM_STEP_NUM_TASKS", "7"},
                         {"SLURM_LOCALID", "0"},
                         {"SLURM_NODEID", "3"},
                         {"SLURM_STEP_TASKS_PER_NODE", "2(x3),1"},
                         {"SLURM_STEP_NODELIST", "n[01-03,07]"}};

TEST(RankEnvironment, AloneIsAWorldOfOne) {
  const auto world = read({});
  EXPECT_EQ(world.launcher, "none");
  EXPECT_EQ(world.rank, 0);
  EXPECT_EQ(world.world_size, 1);
  EXPECT_EQ(world.local_world_size, 1);
  EXPECT_TRUE(world.one_host());
  EXPECT_EQ(world.master_addr, "");
  EXPECT_EQ(world.session.size(), 32U);
  EXPECT_NE(world.session, read({}).session) << "two programs that run alone do not connect";
}

TEST(RankEnvironment, ReadsTorchrun) {
  const auto world = read(kTorchrun);
  EXPECT_EQ(world.launcher, "torchrun");
  EXPECT_EQ(world.rank, 5);
  EXPECT_EQ(world.world_size, 8);
  EXPECT_EQ(world.local_rank, 1);
  EXPECT_EQ(world.local_world_size, 4);
  EXPECT_EQ(world.node_rank, 1);
  EXPECT_EQ(world.restart_count, 2);
  EXPECT_EQ(world.master_addr, "node0");
  EXPECT_EQ(world.master_port, 29500);
  EXPECT_FALSE(world.one_host());
}

TEST(RankEnvironment, KnowsWhetherMpiCanBegin) {
  EXPECT_FALSE(read({}).under_mpi);
  EXPECT_FALSE(read(kTorchrun).under_mpi);
  EXPECT_TRUE(read(kOpenMpi).under_mpi);
  EXPECT_FALSE(read(kSrun).under_mpi) << "srun without --mpi=pmix";
  EXPECT_TRUE(read(with(kSrun, {{"PMIX_RANK", "6"}})).under_mpi);
}

TEST(RankEnvironment, ReadsWhatLockstepRunSets) {
  const auto world = read(with(kTorchrun, {{"LOCKSTEP_RUN", "run-1"},
                                           {"LOCKSTEP_SESSION", "abc"},
                                           {"LOCKSTEP_BOARD", "/dev/shm/board"},
                                           {"LOCKSTEP_STORE", "node0:1"},
                                           {"LOCKSTEP_TOKEN", "secret"},
                                           {"LOCKSTEP_HOST_CORES", "0-3"},
                                           {"LOCKSTEP_BACKEND", "gloo"},
                                           {"LOCKSTEP_TIMEOUT_S", "2.5"}}));
  EXPECT_EQ(world.launcher, "lockstep");
  EXPECT_EQ(world.session, "abc");
  EXPECT_EQ(world.board, "/dev/shm/board");
  EXPECT_EQ(world.store, "node0:1");
  EXPECT_EQ(world.token, "secret");
  EXPECT_EQ(world.host_cores, "0-3");
  EXPECT_EQ(world.backend, "gloo");
  EXPECT_EQ(world.timeout_s, 2.5);
  EXPECT_EQ(read({}).timeout_s, std::nullopt);
}

TEST(RankEnvironment, ByHandOneHostNeedsNoLocalRank) {
  std::string name(256, '\0');
  ASSERT_EQ(::gethostname(name.data(), name.size() - 1), 0);
  for (const std::string address :
       {"", "localhost", "127.0.0.1", "127.0.1.1", "::1", name.c_str()}) {
    const auto world = read({{"RANK", "2"}, {"WORLD_SIZE", "3"}, {"MASTER_ADDR", address}});
    EXPECT_EQ(world.launcher, "variables");
    EXPECT_EQ(world.local_rank, 2) << address;
    EXPECT_EQ(world.local_world_size, 3);
    EXPECT_EQ(world.node_rank, 0);
  }
  expect_refused({{"RANK", "2"}, {"WORLD_SIZE", "3"}, {"MASTER_ADDR", "10.9.8.7"}},
                 {"LOCAL_RANK", "MASTER_ADDR=10.9.8.7"});
  expect_refused(
      {{"RANK", "2"}, {"WORLD_SIZE", "3"}, {"MASTER_ADDR", "10.9.8.7"}, {"LOCAL_RANK", "0"}},
      {"LOCAL_WORLD_SIZE", "is not set"});
  EXPECT_EQ(
      read({{"RANK", "0"}, {"WORLD_SIZE", "1"}, {"MASTER_ADDR", "10.9.8.7"}}).local_world_size, 1);
}

TEST(RankEnvironment, TheNodeIsToldOrFollowsFromEqualHosts) {
  const Variables by_hand = without(without(kTorchrun, "GROUP_RANK"), "TORCHELASTIC_RUN_ID");
  EXPECT_EQ(read(by_hand).node_rank, 1);
  EXPECT_EQ(read(with(by_hand, {{"NODE_RANK", "3"}})).node_rank, 3);
  EXPECT_EQ(read(with(by_hand, {{"RANK", "0"}, {"LOCAL_RANK", "0"}})).node_rank, 0);
}

TEST(RankEnvironment, ReadsOpenMpi) {
  const auto world = read(kOpenMpi);
  EXPECT_EQ(world.launcher, "mpirun");
  EXPECT_EQ(world.rank, 2);
  EXPECT_EQ(world.world_size, 3);
  EXPECT_EQ(world.local_rank, 2);
  EXPECT_TRUE(world.one_host());
  EXPECT_EQ(world.node_rank, 0);
}

TEST(RankEnvironment, ReadsHydra) {
  const auto world = read(kHydra);
  EXPECT_EQ(world.launcher, "mpirun");
  EXPECT_EQ(world.rank, 3);
  EXPECT_EQ(world.local_rank, 1);
  EXPECT_EQ(world.local_world_size, 2);
  EXPECT_EQ(world.node_rank, 1);
}

TEST(RankEnvironment, ReadsAStepOfSlurm) {
  const auto world = read(kSrun);
  EXPECT_EQ(world.launcher, "srun");
  EXPECT_EQ(world.rank, 6);
  EXPECT_EQ(world.world_size, 7);
  EXPECT_EQ(world.local_rank, 0);
  EXPECT_EQ(world.local_world_size, 1);
  EXPECT_EQ(world.node_rank, 3);
  EXPECT_EQ(world.master_addr, "n01");
  EXPECT_GE(world.master_port, 12'000);
  EXPECT_LT(world.master_port, 32'000);
  EXPECT_NE(world.master_port, read(with(kSrun, {{"SLURM_STEP_ID", "1"}})).master_port);
  const auto told = read(with(kSrun, {{"MASTER_ADDR", "other"}, {"MASTER_PORT", "77"}}));
  EXPECT_EQ(told.master_addr, "other");
  EXPECT_EQ(told.master_port, 77);
}

TEST(RankEnvironment, ABatchScriptIsNoStep) {
  EXPECT_EQ(read({{"SLURM_JOB_ID", "1234"}, {"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "4"}}).launcher,
            "none");
}

TEST(RankEnvironment, TheNearestLauncherCounts) {
  EXPECT_EQ(read(with(kSrun, kOpenMpi)).launcher, "mpirun") << "mpirun inside an allocation";
  EXPECT_EQ(read(with(kOpenMpi, kTorchrun)).launcher, "torchrun");
  EXPECT_EQ(read(with(kSrun, kTorchrun)).rank, 5);
  EXPECT_EQ(read(with(kSrun, {{"PMI_RANK", "6"}, {"PMI_SIZE", "7"}})).launcher, "srun")
      << "srun sets PMI's variables too";
}

TEST(RankEnvironment, IncompleteVariablesAreNamed) {
  expect_refused({{"RANK", "0"}}, {"RANK is set, but WORLD_SIZE is not"});
  expect_refused({{"WORLD_SIZE", "2"}}, {"WORLD_SIZE is set, but RANK is not"});
  expect_refused({{"RANK", ""}, {"WORLD_SIZE", "2"}}, {"RANK is not"});
  for (const auto& [launcher, names] :
       {std::pair(kOpenMpi,
                  std::vector<std::string>{"OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
                                           "OMPI_COMM_WORLD_LOCAL_SIZE"}),
        std::pair(kHydra,
                  std::vector<std::string>{"PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"}),
        std::pair(kSrun, std::vector<std::string>{"SLURM_LOCALID", "SLURM_NODEID",
                                                  "SLURM_STEP_TASKS_PER_NODE"})}) {
    for (const auto& name : names) expect_refused(without(launcher, name), {name + " is not"});
  }
}

TEST(RankEnvironment, ContradictionsAreNamed) {
  const auto refused = [](const Variables& changes, std::initializer_list<std::string> fragments) {
    expect_refused(with(kTorchrun, changes), fragments);
  };
  refused({{"RANK", "8"}}, {"RANK=8", "WORLD_SIZE=8"});
  refused({{"RANK", "-1"}}, {"RANK=-1", "0 or more"});
  refused({{"RANK", "1x"}}, {"RANK=\"1x\"", "whole number"});
  refused({{"RANK", "99999999999999"}}, {"RANK=", "whole number"});
  refused({{"WORLD_SIZE", "0"}}, {"WORLD_SIZE=0", "1 or more"});
  refused({{"LOCAL_RANK", "4"}}, {"LOCAL_RANK=4", "LOCAL_WORLD_SIZE=4"});
  refused({{"LOCAL_WORLD_SIZE", "9"}}, {"LOCAL_WORLD_SIZE=9", "WORLD_SIZE=8"});
  refused({{"LOCAL_WORLD_SIZE", "8"}}, {"RANK=5", "LOCAL_RANK=1", "all 8 ranks"});
  refused({{"MASTER_PORT", "70000"}}, {"MASTER_PORT=70000", "1 to 65535"});
  refused({{"LOCKSTEP_TIMEOUT_S", "0"}}, {"LOCKSTEP_TIMEOUT_S=\"0\""});
  refused({{"LOCKSTEP_TIMEOUT_S", "nan"}}, {"LOCKSTEP_TIMEOUT_S"});
  refused({{"LOCKSTEP_TIMEOUT_S", "soon"}}, {"LOCKSTEP_TIMEOUT_S"});
  expect_refused(with(kSrun, {{"SLURM_NODEID", "4"}}), {"SLURM_NODEID=4", "2(x3),1"});
  expect_refused(with(kSrun, {{"SLURM_STEP_TASKS_PER_NODE", "2(x"}}),
                 {"SLURM_STEP_TASKS_PER_NODE=\"2(x\""});
}

TEST(RankEnvironment, RanksOfOneJobShareASessionAndOthersDoNot) {
  std::set<std::string> sessions;
  const auto job = [&](const Variables& variables, const Variables& another_rank) {
    const std::string session = read(variables).session;
    EXPECT_EQ(session.size(), 32U);
    EXPECT_EQ(session, read(with(variables, another_rank)).session);
    EXPECT_TRUE(sessions.insert(session).second) << "two jobs share a session";
  };
  const Variables torchrun_rank = {{"RANK", "2"}, {"LOCAL_RANK", "2"}, {"GROUP_RANK", "0"}};
  job(kTorchrun, torchrun_rank);
  job(with(kTorchrun, {{"TORCHELASTIC_RESTART_COUNT", "3"}}), torchrun_rank);
  job(with(kTorchrun, {{"TORCHELASTIC_RUN_ID", "b-run"}}), torchrun_rank);
  job(with(kTorchrun, {{"MASTER_PORT", "29501"}}), torchrun_rank);
  const Variables mpi_rank = {{"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_LOCAL_RANK", "0"}};
  job(kOpenMpi, mpi_rank);
  job(with(kOpenMpi, {{"PMIX_NAMESPACE", "47644674"}}), mpi_rank);
  job(kHydra, {{"PMI_RANK", "2"}, {"MPI_LOCALRANKID", "0"}});
  const Variables slurm_rank = {
      {"SLURM_PROCID", "1"}, {"SLURM_LOCALID", "1"}, {"SLURM_NODEID", "0"}};
  job(kSrun, slurm_rank);
  job(with(kSrun, {{"SLURM_STEP_ID", "1"}}), slurm_rank);
  job(with(kSrun, {{"SLURM_JOB_ID", "1235"}}), slurm_rank);
  job(with(kSrun, {{"SLURM_RESTART_COUNT", "1"}}), slurm_rank);
  const Variables hand = {{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_PORT", "29500"}};
  job(hand, {{"RANK", "1"}});
  job(with(hand, {{"MASTER_PORT", "29501"}}), {{"RANK", "1"}});
}

TEST(RankEnvironment, ReadsTheProcessesOwnVariables) {
  ::setenv("RANK", "1", 1);
  ::setenv("WORLD_SIZE", "2", 1);
  const auto world = RankEnvironment::from_env();
  ::unsetenv("RANK");
  ::unsetenv("WORLD_SIZE");
  EXPECT_EQ(world.rank, 1);
  EXPECT_EQ(world.world_size, 2);
}

}  // namespace
}  // namespace lockstep::test::rank_environment_test
