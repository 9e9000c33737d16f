// `lockstep run --nnodes MIN:MAX`: hosts that are lost, replaced, late or too few. All launchers
// run on this machine, over loopback.

#include <gtest/gtest.h>

#include <array>

#include "checkpoint/store.hpp"
#include "launch_support.hpp"
#include "net/socket.hpp"

namespace lockstep {
namespace {

using test::eventually;
using test::JobResult;
using test::LaunchTest;
using test::read_bytes;
using test::Texts;

class LaunchElastic : public LaunchTest {
 protected:
  /// Seconds in which all hosts that a test starts together come, also to a loaded machine.
  static constexpr const char* kLastCall = "3";

  /// The launcher of one host. The same command serves a replacement.
  pid_t host(const std::string& name, const std::string& node_rank, const Texts& flags,
             const Texts& program) const {
    Texts words = {"--rdzv-endpoint", "127.0.0.1:" + port_,
                   "--node-rank",     node_rank,
                   "--ranks",         "all",
                   "--grace",         "1"};
    words.insert(words.end(), flags.begin(), flags.end());
    words.insert(words.end(), program.begin(), program.end());
    return start(words, {{"LOCKSTEP_TOKEN", std::string(64, 'a')}}, "/dev/null", name);
  }

  bool says(const std::string& name, const std::string& text) const {
    return eventually([&] { return read_bytes(file(name + ".err")).find(text) != text.npos; });
  }

  /// A worker that notes its process and is busy forever in the first attempt, and ends at once in
  /// later ones.
  Texts busy_at_first() const {
    return {worker(), "env:WORLD_SIZE", "pid:" + file("pids"), "sleep-first-attempt:600"};
  }

  /// The launchers of hosts a, b and so on, once this many of their ranks are busy.
  template <size_t Count>
  std::array<pid_t, Count> busy_hosts(const Texts& flags, size_t ranks = Count) const {
    std::array<pid_t, Count> hosts;
    for (size_t i = 0; i < Count; ++i) {
      hosts[i] = host(std::string(1, static_cast<char>('a' + i)), std::to_string(i), flags,
                      busy_at_first());
    }
    pids_in(file("pids"), ranks);
    return hosts;
  }

  void lose(pid_t pid, const std::string& name) const {
    ::kill(pid, SIGKILL);
    EXPECT_EQ(finish(pid, name).exit_code, 128 + SIGKILL);
  }

  void expect_goes_on(pid_t pid, const std::string& name, const std::string& world_size) const {
    const JobResult result = finish(pid, name);
    EXPECT_EQ(result.exit_code, 0) << name << ": " << result.errors;
    EXPECT_NE(result.output.find("WORLD_SIZE=" + world_size), std::string::npos)
        << name << ": " << result.output << result.errors;
  }

 private:
  const std::string port_ = std::to_string(PortHold(0, true).port());
};

TEST_F(LaunchElastic, GoesOnWithoutALostHost) {
  const Texts flags = {"--nnodes", "2:3", "--max-restarts", "1", "--last-call", kLastCall,
                       "-n",       "2"};
  const auto [a, b, c] = busy_hosts<3>(flags, 6);
  lose(c, "c");
  expect_goes_on(a, "a", "4");
  expect_goes_on(b, "b", "4");
  const std::string errors = read_bytes(file("a.err"));
  EXPECT_NE(errors.find("(node 2) was lost: it closed the connection; restart 1 of 1"),
            std::string::npos)
      << errors;
  EXPECT_NE(errors.find("host 0 of 2, ranks 0 to 1 of 4"), std::string::npos) << errors;
  EXPECT_TRUE(eventually([&] { return processes().empty(); })) << "the lost host's ranks too";
  EXPECT_EQ(boards(), 0U);
}

TEST_F(LaunchElastic, AReplacementJoinsWhileTheOthersWait) {
  for (const char* nnodes : {"2:3", "3"}) {
    SCOPED_TRACE(nnodes);
    std::filesystem::remove(file("pids"));
    // Nobody but a third host can end the wait.
    const Texts flags = {"--nnodes", nnodes, "--max-restarts", "1", "--last-call", "200"};
    const auto [a, b, c] = busy_hosts<3>(flags);
    lose(c, "c");
    EXPECT_TRUE(says("a", "restart 1 of 1"));
    EXPECT_TRUE(says("a", "hosts are here; waiting for"));
    const pid_t replacement = host("d", "2", flags, busy_at_first());
    expect_goes_on(a, "a", "3");
    expect_goes_on(b, "b", "3");
    expect_goes_on(replacement, "d", "3");
  }
  EXPECT_TRUE(processes().empty());
}

TEST_F(LaunchElastic, TooFewHostsEndTheJobByName) {
  const Texts flags = {"--nnodes",    "2:3", "--max-restarts", "1",
                       "--last-call", "1",   "--join-timeout", "6"};
  const auto [a, b] = busy_hosts<2>(flags);
  lose(b, "b");
  const JobResult result = finish(a, "a");
  EXPECT_EQ(result.exit_code, 1) << result.errors;
  for (const char* part : {"error[LS0019]: no restart: 1 of at least 2 hosts", "before: host ",
                           "(node 1) was lost", "missing: 1 more", "lost: "}) {
    EXPECT_NE(result.errors.find(part), std::string::npos) << part << "\nin\n" << result.errors;
  }
  EXPECT_TRUE(eventually([&] { return processes().empty(); }));
}

TEST_F(LaunchElastic, TooFewHostsAtTheStartAreARefusal) {
  const Texts flags = {"--nnodes", "2:3", "--last-call", "1", "--join-timeout", "2"};
  const JobResult result = finish(host("a", "0", flags, {worker(), "pid:" + file("pids")}), "a");
  EXPECT_EQ(result.exit_code, 2) << result.errors;
  EXPECT_NE(result.errors.find("LS0019"), std::string::npos) << result.errors;
  EXPECT_FALSE(std::filesystem::exists(file("pids")));
}

TEST_F(LaunchElastic, ALateHostWaitsForTheNextAttempt) {
  const Texts flags = {"--nnodes", "2:3", "--max-restarts", "1", "--last-call", "1"};
  const auto [a, b] = busy_hosts<2>(flags);
  const pid_t rank = pids_in(file("pids"), 2)[1];
  const pid_t late = host("c", "2", flags, busy_at_first());
  EXPECT_TRUE(says("c", "the job runs on 2 hosts now; this host waits for its next attempt"));
  ::kill(rank, SIGKILL);
  expect_goes_on(a, "a", "3");
  expect_goes_on(b, "b", "3");
  expect_goes_on(late, "c", "3");
  EXPECT_TRUE(processes().empty());
}

TEST_F(LaunchElastic, ALateHostThatWasNotNeededEndsWell) {
  const Texts flags = {"--nnodes", "2:3", "--last-call", "1"};
  const Texts program = {worker(), "catch:12", "pid:" + file("pids"), "await:12"};
  const pid_t a = host("a", "0", flags, program);
  const pid_t b = host("b", "1", flags, program);
  const auto ranks = pids_in(file("pids"), 2);
  const pid_t late = host("c", "2", flags, program);
  EXPECT_TRUE(says("c", "the job runs on 2 hosts now"));
  for (const pid_t rank : ranks) ::kill(rank, SIGUSR2);
  EXPECT_TRUE(says("c", "this host was not needed"));
  EXPECT_EQ(finish(late, "c").exit_code, 0);
  EXPECT_EQ(finish(a, "a").exit_code, 0);
  EXPECT_EQ(finish(b, "b").exit_code, 0);
}

TEST_F(LaunchElastic, TheCoordinatorsHostIsTheJob) {
  const Texts flags = {"--nnodes", "1:3", "--max-restarts", "9", "--last-call", kLastCall};
  const auto [a, b] = busy_hosts<2>(flags);
  lose(a, "a");
  const JobResult result = finish(b, "b");
  EXPECT_EQ(result.exit_code, 1) << result.errors;
  EXPECT_NE(result.errors.find("(node 0), which coordinates the job, was lost"), std::string::npos)
      << result.errors;
  EXPECT_TRUE(eventually([&] { return processes().empty(); }));
}

TEST_F(LaunchElastic, AHostThatIsAskedToStopLeavesTheJob) {
  const Texts flags = {"--nnodes", "1:3", "--max-restarts", "1", "--last-call", kLastCall};
  const auto [a, b] = busy_hosts<2>(flags);
  ::kill(b, SIGTERM);
  EXPECT_EQ(finish(b, "b").exit_code, 128 + SIGTERM);
  expect_goes_on(a, "a", "1");
  EXPECT_NE(read_bytes(file("a.err")).find("was asked to stop (Terminated); restart 1 of 1"),
            std::string::npos)
      << read_bytes(file("a.err"));
}

TEST_F(LaunchElastic, WithoutRestartsALostHostIsTheEnd) {
  const Texts flags = {"--nnodes", "1:2", "--last-call", "200"};
  const auto [a, b] = busy_hosts<2>(flags);
  lose(b, "b");
  const JobResult result = finish(a, "a");
  EXPECT_EQ(result.exit_code, 1) << result.errors;
  EXPECT_NE(result.errors.find("(node 1) was lost"), std::string::npos) << result.errors;
}

TEST_F(LaunchElastic, TrainingResumesOnFewerHostsAndEndsAtTheLastStep) {
  const std::string folder = file("checkpoints");
  // A rank that stops in the first attempt keeps it from its end until the host is lost.
  const Texts flags = {"--nnodes",    "2:3",     "--max-restarts", "2",
                       "--last-call", kLastCall, "--inject",       "stop@rank=0,step=300"};
  const Texts program = {std::string(LOCKSTEP_BIN) + "/tutorial_checkpoint", folder, "600"};
  const pid_t a = host("a", "0", flags, program);
  const pid_t b = host("b", "1", flags, program);
  const pid_t c = host("c", "2", flags, program);
  EXPECT_TRUE(eventually([&] { return list_checkpoints(folder).size() >= 2; }));
  lose(c, "c");
  const auto before = list_checkpoints(folder);
  for (const auto& [pid, name] : {std::pair(a, "a"), std::pair(b, "b")}) {
    const JobResult result = finish(pid, name);
    EXPECT_EQ(result.exit_code, 0) << name << ": " << result.errors;
    EXPECT_NE(result.errors.find("(node 2) was lost"), std::string::npos) << result.errors;
  }
  ASSERT_FALSE(before.empty());
  EXPECT_LT(before.back().step, 300);
  ASSERT_FALSE(list_checkpoints(folder).empty());
  EXPECT_EQ(list_checkpoints(folder).back().step, 600);
  const std::string output = read_bytes(file("a.out"));
  EXPECT_NE(output.find("step 600:"), std::string::npos) << output;
  EXPECT_NE(read_bytes(file("a.err")).find("was saved by 3 ranks"), std::string::npos)
      << read_bytes(file("a.err"));
  // It went back to a checkpoint once, and made every other step once.
  size_t first_steps = 0;
  for (size_t at = output.find("step 10:"); at != output.npos; at = output.find("step 10:", at + 1))
    ++first_steps;
  EXPECT_EQ(first_steps, 1U);
}

}  // namespace
}  // namespace lockstep
