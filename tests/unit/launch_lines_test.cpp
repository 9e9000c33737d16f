// Lines from bytes, command lines cut at the program, and batch files.

#include <gtest/gtest.h>

#include <CLI/CLI.hpp>

#include "cli/run.hpp"
#include "launch/output.hpp"
#include "support.hpp"

namespace lockstep::test::launch_lines_test {
namespace {

class Lines {
 public:
  void add(std::string_view bytes) { splitter_.add(bytes, sink()); }
  std::vector<std::string> finish() {
    splitter_.finish(sink());
    return lines_;
  }
  const std::vector<std::string>& so_far() const { return lines_; }

 private:
  LineSplitter::Sink sink() {
    return [this](std::string_view line, char end) {
      lines_.push_back(std::string(line) + (end == '\r' ? "<" : ""));
    };
  }
  LineSplitter splitter_;
  std::vector<std::string> lines_;
};

using Texts = std::vector<std::string>;

TEST(LineSplitter, JoinsWhatCameInPieces) {
  Lines lines;
  lines.add("one\ntw");
  EXPECT_EQ(lines.so_far(), Texts{"one"});
  lines.add("o\n\nth");
  lines.add("ree");
  EXPECT_EQ(lines.finish(), (Texts{"one", "two", "", "three"}));
}

TEST(LineSplitter, EveryCutGivesTheSameLines) {
  const std::string text = "a\r\nbc\rd\n\r\re";
  Lines whole;
  whole.add(text);
  const Texts expected = whole.finish();
  EXPECT_EQ(expected, (Texts{"a", "bc<", "d", "<", "<", "e"}));
  for (size_t cut = 0; cut <= text.size(); ++cut) {
    Lines lines;
    lines.add(std::string_view(text).substr(0, cut));
    lines.add(std::string_view(text).substr(cut));
    EXPECT_EQ(lines.finish(), expected) << "cut at " << cut;
  }
}

TEST(LineSplitter, ALineWithoutEndIsBounded) {
  Lines lines;
  const std::string text(3 * LineSplitter::kLongestLine + 5, 'x');
  for (size_t at = 0; at < text.size(); at += 1000) lines.add(text.substr(at, 1000));
  const Texts pieces = lines.finish();
  ASSERT_EQ(pieces.size(), 4U);
  std::string joined;
  for (const auto& piece : pieces) joined += piece;
  EXPECT_EQ(joined, text);
}

cli::ProgramLine cut(Texts words) {
  CLI::App app("", "lockstep");
  const cli::RunFlags run(app);
  words.insert(words.begin(), "lockstep");
  return cli::cut_at_program(words, {run.command()});
}

TEST(ProgramLine, EverySpellingOfAFlagIsOne) {
  const Texts expected = {"lockstep", "run", "--nproc-per-node=2"};
  for (const Texts& flags : {Texts{"-n", "2"},
                             {"-n2"},
                             {"--nproc-per-node", "2"},
                             {"--nproc-per-node=2"},
                             {"--nproc_per_node", "2"},
                             {"--nproc_per_node=2"}}) {
    Texts words = {"run"};
    words.insert(words.end(), flags.begin(), flags.end());
    words.insert(words.end(), {"./train", "-n", "9", "--x_y", "--"});
    const auto line = cut(words);
    EXPECT_EQ(line.flags, expected) << flags[0];
    EXPECT_EQ(line.program, (Texts{"./train", "-n", "9", "--x_y", "--"}));
  }
}

TEST(ProgramLine, SwitchesTakeNothing) {
  const auto line = cut({"run", "--no_pin", "-m", "--quiet", "pkg.train", "--quiet"});
  EXPECT_EQ(line.flags, (Texts{"lockstep", "run", "--no-pin", "-m", "--quiet"}));
  EXPECT_EQ(line.program, (Texts{"pkg.train", "--quiet"}));
}

TEST(ProgramLine, TwoDashesEndTheFlags) {
  EXPECT_EQ(cut({"run", "-n", "2", "--", "-odd-name", "x"}).program, (Texts{"-odd-name", "x"}));
  EXPECT_TRUE(cut({"run", "--"}).program.empty());
  EXPECT_EQ(cut({"run", "--grace", "-1", "p"}).flags.back(), "--grace=-1");
  EXPECT_EQ(cut({"lab", "5", "--x", "y"}).flags, (Texts{"lockstep", "lab", "5", "--x", "y"}));
}

TEST(SlurmScript, IsOneLauncherPerHost) {
  cli::SlurmScriptOptions options;
  options.nodes = 2;
  options.ranks = "8";
  options.gpus = 8;
  options.partition = "long";
  const std::string text = cli::slurm_script(options, {"./train", "--name", "it's"});
  for (const char* part :
       {"#!/bin/bash\n", "#SBATCH --nodes=2\n", "#SBATCH --ntasks-per-node=1",
        "--gpus-per-node=8\n", "#SBATCH --partition=long\n", "export LOCKSTEP_TOKEN\n",
        "srun --ntasks-per-node=1 lockstep run --nproc-per-node=8 \\\n",
        "./train --name 'it'\\''s'\n"}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << "\nin\n" << text;
  }
}

TEST(SlurmScript, AJobThatIsRequeuedSavesBefore) {
  cli::SlurmScriptOptions options;
  options.cpus = 4;
  options.requeue = 120;
  const std::string text = cli::slurm_script(options, {"./train"});
  for (const char* part :
       {"#SBATCH --requeue\n", "#SBATCH --open-mode=append\n", "#SBATCH --signal=USR1@120 ",
        "\nsrun --ntasks-per-node=1 --cpus-per-task=4 lockstep run", "./train || status=$?\n",
        "then scontrol requeue \"$SLURM_JOB_ID\"; fi\nexit \"$status\"\n"}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << "\nin\n" << text;
  }
}

TEST(SlurmScript, RefusesWhatWouldBreakTheFile) {
  cli::SlurmScriptOptions options;
  test::expect_error(Code::kUsage, {"needs a program"}, [&] { cli::slurm_script(options, {}); });
  options.partition = "a\n#SBATCH --wrap=evil";
  test::expect_error(Code::kUsage, {"characters"}, [&] { cli::slurm_script(options, {"./t"}); });
  options.partition = "";
  options.ranks = "many";
  test::expect_error(Code::kUsage, {"many"}, [&] { cli::slurm_script(options, {"./t"}); });
}

}  // namespace
}  // namespace lockstep::test::launch_lines_test
