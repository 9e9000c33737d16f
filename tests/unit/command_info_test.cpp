// Completion, manual pages and progress, from made-up commands; tests/process/terminal_test.py
// tries the real ones in real shells.

#include "cli/command_info.hpp"

#include <gtest/gtest.h>

#include <CLI/CLI.hpp>

#include "cli/terminal.hpp"
#include "lockstep/cli_parse.hpp"
#include "lockstep/error.hpp"
#include "lockstep/table.hpp"

namespace lockstep::cli::command_info_test {
namespace {

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// A command with every kind of argument.
class Commands : public testing::Test {
 protected:
  Commands() {
    auto* run = app_.add_subcommand("run", "start [it]: don't wait");
    run->group("Commands");
    run->footer(format_examples({{"app run x", "runs x"}}));
    run->add_option("-n,--ranks", ranks_, "how many")->type_name("N|auto")->capture_default_str();
    run->add_option("--out", text_, "where to")->type_name("DIR");
    run->add_option("--secret", text_)->group("");
    run->add_flag("--dry-run")->description("do nothing");
    run->add_option("PROGRAM", text_, "what to start");
    auto* explain = app_.add_subcommand("explain", "say more");
    explain->group("Commands");
    explain->add_option("CODE", text_, "which")->type_name("LS0001|LS0002");
    app_.add_subcommand("hidden")->group("");
  }

  CLI::App app_{"An app.", "lockstep"};
  std::string ranks_ = "2";
  std::string text_;
};

TEST_F(Commands, AreReadFromTheDefinition) {
  const CommandInfo info = describe_command(app_);
  ASSERT_EQ(info.commands.size(), 2U) << "hidden commands are left out";
  const CommandInfo& run = info.commands[0];
  EXPECT_TRUE(run.starts_program());
  ASSERT_EQ(run.flags.size(), 4U) << "--help and three flags, the hidden one left out";
  EXPECT_EQ(run.flags[1].names, (std::vector<std::string>{"-n", "--ranks"}));
  EXPECT_EQ(run.flags[1].choices, std::vector<std::string>{"auto"});
  EXPECT_EQ(run.flags[1].help, "how many (default: 2)");
  EXPECT_TRUE(run.flags[2].takes_folder());
  EXPECT_EQ(run.flags[3].value, "");
  EXPECT_EQ(info.commands[1].positionals[0].choices,
            (std::vector<std::string>{"LS0001", "LS0002"}));
}

TEST_F(Commands, PlaceholdersAreNoChoices) {
  for (const char* type : {"N", "HOST[:PORT]", "KEY=VALUE,...", "0-3|LIST", "H:M:S", "SECONDS"}) {
    CLI::App app("", "x");
    app.add_option("--flag", text_)->type_name(type);
    EXPECT_TRUE(describe_command(app).flags.back().choices.empty()) << type;
  }
}

TEST_F(Commands, EveryShellGetsEveryName) {
  const CommandInfo info = describe_command(app_);
  for (const std::string shell : {"bash", "zsh", "fish"}) {
    const std::string script = completion_script(info, shell);
    for (const char* word : {"run", "ranks", "auto", "dry-run", "explain", "LS0002"}) {
      EXPECT_TRUE(has(script, word)) << shell << " lacks " << word;
    }
    EXPECT_FALSE(has(script, "hidden")) << shell;
    EXPECT_FALSE(has(script, "secret")) << shell;
  }
}

TEST_F(Commands, ManualPagesHaveTheUsualSections) {
  const auto pages = manual_pages(describe_command(app_));
  ASSERT_EQ(pages.size(), 3U);
  EXPECT_EQ(pages[0].name, "lockstep");
  EXPECT_EQ(pages[1].name, "lockstep-run");
  for (const auto& page : pages) {
    for (const char* section :
         {"NAME", "SYNOPSIS", "DESCRIPTION", "OPTIONS", "EXIT STATUS", "SEE ALSO"}) {
      EXPECT_TRUE(has(page.text, std::string(".SH ") + section + "\n")) << page.name << section;
    }
  }
  const std::string& run = pages[1].text;
  EXPECT_TRUE(has(run, "lockstep\\-run \\- start [it]: don\\(aqt wait\n")) << run;
  EXPECT_TRUE(has(run, ".TP\n\\fB\\-n\\fR, \\fB\\-\\-ranks\\fR \\fIN|auto\\fR\nhow many")) << run;
  EXPECT_TRUE(has(run, ".EX\n  app run x  runs x\n.EE\n")) << run;
}

TEST(HelpText, StartsWithExamplesAndTakesEightyColumns) {
  CLI::App app("What it is for, in a sentence that goes on for a while but not too long.",
               "program");
  app.footer(format_examples(
      {{"program --steps 3", "three"},
       {"program --a-very-long-flag with-a-value --and-another-one of-them --yes", "both flags"}}));
  int steps = 20;
  std::string long_text;
  app.add_option("--steps", steps,
                 "how many steps are made before it ends, each of which takes "
                 "its own time")
      ->capture_default_str();
  app.add_option("--a-very-long-flag", long_text, "short")->type_name("one|two|three|four");
  const char* argv[] = {"program"};
  parse_or_throw(app, 1, argv);
  const std::string help = app.help();
  EXPECT_EQ(help,
            "Examples:\n"
            "  program --steps 3  three\n"
            "  program --a-very-long-flag with-a-value --and-another-one of-them --yes\n"
            "                     both flags\n"
            "\n"
            "What it is for, in a sentence that goes on for a while but not too long.\n"
            "\n"
            "Usage: program [OPTIONS]\n"
            "\n"
            "Options:\n"
            "  -h,--help                 print this help\n"
            "  --steps N                 how many steps are made before it ends, each of\n"
            "                            which takes its own time (default: 20)\n"
            "  --a-very-long-flag one|two|three|four\n"
            "                            short\n");
}

TEST(ProgressLine, FitsEveryWidth) {
  const ProgressState state{.done = 2,
                            .all = 12,
                            .share = 0.5,
                            .title = "DataParallel on cpu:2, 4 ranks, run 1 of 3, and more words",
                            .seconds_left = 42};
  EXPECT_EQ(progress_line(state, 79, true),
            "████████████░░░░░░░░░░░░ 3/12  DataParallel on cpu:2, 4 ranks…  about 42 s left");
  EXPECT_EQ(progress_line(state, 40, true), "3/12  DataParallel on …  about 42 s left");
  for (size_t width = 0; width < 140; ++width) {
    EXPECT_LE(display_width(progress_line(state, width, true)), width);
  }
  EXPECT_TRUE(progress_line(state, 79, false).starts_with("############............ 3/12"));
}

}  // namespace
}  // namespace lockstep::cli::command_info_test
