#include "launch/slurm.hpp"

#include <map>
#include <string>

#include "base/slurm_lists.hpp"
#include "support.hpp"

namespace lockstep::test::slurm_test {
namespace {

using Variables = std::map<std::string, std::string>;
using Texts = std::vector<std::string>;
using Counts = std::vector<int>;

std::optional<SlurmJob> read(const Variables& variables, const std::string& host = "login") {
  const auto lookup = [&](const char* name) -> const char* {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  };
  return read_slurm(lookup, host);
}

Texts hosts(const std::string& text) {
  return expand_slurm_hosts("LIST", text);
}

TEST(SlurmHosts, AreExpanded) {
  EXPECT_EQ(hosts("gpu2"), Texts{"gpu2"});
  EXPECT_EQ(hosts("a,b-c,d.e"), (Texts{"a", "b-c", "d.e"}));
  EXPECT_EQ(hosts("n[01-03,07],gpu2"), (Texts{"n01", "n02", "n03", "n07", "gpu2"}));
  EXPECT_EQ(hosts("n[8-11]"), (Texts{"n8", "n9", "n10", "n11"}));
  EXPECT_EQ(hosts("n[098-101]"), (Texts{"n098", "n099", "n100", "n101"}));
  EXPECT_EQ(hosts("r[1-2]n[0,3]x"), (Texts{"r1n0x", "r1n3x", "r2n0x", "r2n3x"}));
  EXPECT_EQ(hosts("n[1-65536]").size(), 65536U);
  EXPECT_EQ(hosts("n[2147483646-2147483647]").size(), 2U) << "the largest int ends the list";
}

TEST(SlurmHosts, AnythingElseIsNamed) {
  for (const char* bad :
       {"", ",", "a,", "n[", "n]", "n[]", "n[1", "n[1-]", "n[-1]", "n[3-1]", "n[a]", "n]1[",
        "n[1,]", "n[1-99999999]", "n[0-999]m[0-999]", "n[99999999999]", "n[1-2][", "n[[1]]"}) {
    expect_error(Code::kWorld, {"LIST=\"" + std::string(bad) + "\"", "n[01-03,07],gpu2"},
                 [&] { hosts(bad); });
  }
}

// Few bytes must not ask for much memory or time.
TEST(SlurmHosts, ExpansionsAreBounded) {
  const std::string many = "[1-65000]";
  std::string brackets = "n";
  for (int i = 0; i < 50; ++i) brackets += many;
  const std::string zeros(3000, '0');
  for (const auto& text :
       Texts{brackets, "n[" + zeros + "1-65000]", "n[1-65536,7]", "a,n[1-65536]"}) {
    expect_error(Code::kWorld, {"LIST"}, [&] { hosts(text); });
  }
}

TEST(SlurmCounts, AreExpanded) {
  EXPECT_EQ(expand_slurm_counts("LIST", "4"), Counts{4});
  EXPECT_EQ(expand_slurm_counts("LIST", "2(x3),1"), (Counts{2, 2, 2, 1}));
  EXPECT_EQ(expand_slurm_counts("LIST", "1,2(x2)"), (Counts{1, 2, 2}));
  for (const char* bad : {"", "0", "-1", "x", "2(x", "2(x)", "2(x0)", "2(3)", "2(x3", "2(x3)1",
                          "2,", "2(x999999999)"}) {
    expect_error(Code::kWorld, {"LIST=\"" + std::string(bad) + "\"", "2(x3),1"},
                 [&] { expand_slurm_counts("LIST", bad); });
  }
}

const Variables kStep = {{"SLURM_JOB_ID", "77"},
                         {"SLURM_STEP_ID", "3"},
                         {"SLURM_STEP_NUM_TASKS", "2"},
                         {"SLURM_PROCID", "1"},
                         {"SLURM_NODEID", "1"},
                         {"SLURM_STEP_NODELIST", "n[4,6]"},
                         {"SLURM_STEP_TASKS_PER_NODE", "1(x2)"},
                         {"SLURM_JOB_NODELIST", "n[4-7]"},
                         {"SLURM_CPUS_PER_TASK", "8"}};

TEST(SlurmJob, OutsideThereIsNone) {
  EXPECT_FALSE(read({}));
  EXPECT_FALSE(read({{"SLURM_JOB_ID", "77"}})) << "no list of nodes";
}

TEST(SlurmJob, AStepIsReadFromItsOwnVariables) {
  const auto job = read(kStep);
  ASSERT_TRUE(job);
  EXPECT_TRUE(job->in_step);
  EXPECT_EQ(job->job_id, "slurm-77.3");
  EXPECT_EQ(job->nnodes(), 2);
  EXPECT_EQ(job->hosts, (Texts{"n4", "n6"}));
  EXPECT_EQ(job->endpoint_host(), "n4");
  EXPECT_EQ(job->tasks_per_node, (Counts{1, 1}));
  EXPECT_EQ(job->node_rank, 1);
  EXPECT_EQ(job->task, 1);
  EXPECT_EQ(job->cpus_per_task, 8);
  EXPECT_NE(job->port, slurm_port("77", "3", 0)) << "launchers and ranks do not share a port";
  EXPECT_NE(job->port, slurm_port("77", "4", 0)) << "nor with those of the next step";
  EXPECT_EQ(job->gpus, 0);
}

TEST(SlurmJob, AnAllocationIsReadFromTheJobs) {
  const auto job = read({{"SLURM_JOB_ID", "77"},
                         {"SLURM_PROCID", "0"},
                         {"SLURM_JOB_NODELIST", "n[4-7]"},
                         {"SLURM_TASKS_PER_NODE", "2(x4)"},
                         {"SLURM_GPUS_ON_NODE", "8"}});
  ASSERT_TRUE(job);
  EXPECT_EQ(job->gpus, 8);
  EXPECT_FALSE(job->in_step);
  EXPECT_EQ(job->nnodes(), 4);
  EXPECT_EQ(job->node_rank, 0);
  EXPECT_EQ(job->tasks_per_node, (Counts{2, 2, 2, 2}));
  EXPECT_FALSE(job->cpus_per_task);
  EXPECT_FALSE(read({{"SLURM_JOB_ID", "77"}, {"SLURM_NODELIST", "n1"}})->in_step);
}

// As SLURM 22.05 sets them: salloc where it was typed, and sbatch on the first node.
TEST(SlurmJob, TellsWhetherThisHostIsPartOfTheJob) {
  const Variables salloc = {{"SLURM_JOB_ID", "77"},
                            {"SLURM_JOB_NODELIST", "n[4-5]"},
                            {"SLURM_SUBMIT_HOST", "login"},
                            {"SLURM_TASKS_PER_NODE", "1(x2)"}};
  EXPECT_EQ(read(salloc, "login")->here, "");
  EXPECT_EQ(read(salloc, "n4")->here, "n4") << "typed on a node of the allocation";
  EXPECT_EQ(read(salloc, "n5.cluster.example")->here, "n5");
  EXPECT_EQ(read(salloc, "n45")->here, "");
  Variables sbatch = salloc;
  sbatch["SLURMD_NODENAME"] = "n5";
  sbatch["SLURM_NODEID"] = "0";
  EXPECT_EQ(read(sbatch, "another-name")->here, "n5") << "slurmd knows its node's name";
  sbatch["SLURMD_NODENAME"] = "n9";
  EXPECT_EQ(read(sbatch, "n9")->here, "") << "a job inside another job, which has n9";
  EXPECT_EQ(read(kStep)->here, "n6");
}

// salloc's shell on the first node is a step of one task; the whole allocation is meant.
TEST(SlurmJob, AnInteractiveStepStandsForItsAllocation) {
  Variables shell = kStep;
  shell["SLURM_STEP_ID"] = "4294967290";
  shell["SLURM_STEP_NODELIST"] = "n4";
  shell["SLURM_STEP_NUM_TASKS"] = "1";
  shell["SLURM_PROCID"] = "0";
  shell["SLURMD_NODENAME"] = "n4";
  const auto job = read(shell);
  EXPECT_FALSE(job->in_step);
  EXPECT_EQ(job->hosts, (Texts{"n4", "n5", "n6", "n7"}));
  EXPECT_EQ(job->here, "n4");
}

TEST(SlurmJob, ContradictionsAreNamed) {
  const auto refused = [](const std::string& name, const std::string& value,
                          std::initializer_list<std::string> fragments) {
    Variables variables = kStep;
    variables[name] = value;
    expect_error(Code::kWorld, fragments, [&] { read(variables); });
  };
  refused("SLURM_NODEID", "2", {"SLURM_NODEID=2", "2 nodes"});
  refused("SLURM_PROCID", "2", {"SLURM_PROCID=2", "2 tasks"});
  refused("SLURM_PROCID", "one", {"SLURM_PROCID=\"one\""});
  refused("SLURM_STEP_TASKS_PER_NODE", "1(x3)", {"SLURM_STEP_TASKS_PER_NODE=1(x3)", "3 nodes"});
  refused("SLURM_STEP_NODELIST", "n[", {"SLURM_STEP_NODELIST=\"n[\""});
}

}  // namespace
}  // namespace lockstep::test::slurm_test
