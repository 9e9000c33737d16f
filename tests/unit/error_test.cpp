#include "lockstep/error.hpp"

#include <set>

#include "support.hpp"

namespace lockstep {
namespace {

TEST(Error, BlockHoldsOneFactALine) {
  const Error error(Code::kDeviceSpec, "what happened", "what to do", {"first", "second"});
  EXPECT_EQ(error.block(),
            "error[LS0002]: what happened\nnote: first\nnote: second\nhelp: what to do");
  EXPECT_STREQ(error.what(), error.block().c_str());
  EXPECT_EQ(error.code(), Code::kDeviceSpec);
  EXPECT_EQ(error.message(), "what happened");
  EXPECT_EQ(error.help(), "what to do");
  EXPECT_EQ(error.notes(), (std::vector<std::string>{"first", "second"}));
}

TEST(Error, BlockLeavesOutWhatIsNotKnown) {
  EXPECT_EQ(Error(Code::kInternal, "only this").block(), "error[LS0000]: only this");
}

TEST(Error, EveryCodeIsExplainedOnceInAscendingOrder) {
  int expected = 0;
  for (const auto& info : all_codes()) {
    EXPECT_EQ(static_cast<int>(info.code), expected++);
    EXPECT_FALSE(info.title.empty());
    EXPECT_TRUE(info.explanation.ends_with(".")) << info.explanation;
  }
  EXPECT_EQ(expected, static_cast<int>(Code::kCapture) + 1);
}

TEST(Error, CodeNamesHaveFourDigits) {
  EXPECT_EQ(code_name(Code::kInternal), "LS0000");
  EXPECT_EQ(code_name(Code::kProgramFailed), "LS0015");
}

TEST(Error, ExitCodeTellsMisuseFromFailure) {
  const std::set<Code> failures = {
      Code::kInternal,      Code::kReplicaFailed,  Code::kProgramFailed, Code::kOutOfMemory,
      Code::kCallMismatch,  Code::kRankAbsent,     Code::kRankFailed,    Code::kUnusedParameter,
      Code::kSyncMisuse,    Code::kReplicasDiffer, Code::kScalerMisuse,  Code::kStageFailed,
      Code::kStageMismatch, Code::kCapture};
  for (const auto& info : all_codes()) {
    EXPECT_EQ(exit_code(info.code), failures.contains(info.code) ? 1 : 2) << code_name(info.code);
  }
}

TEST(Error, DescribeCutsTheStackTraceOfLibtorch) {
  const std::runtime_error torch(
      "mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)\n"
      "Exception raised from addmm_impl_cpu_ at ../aten/src/LinearAlgebra.cpp:1234 (most recent "
      "call first):\nframe #0: c10::Error::Error(...)\n");
  EXPECT_EQ(describe(torch), "mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)");
  EXPECT_EQ(describe(std::runtime_error("two\nlines")), "two\nlines");
}

TEST(Error, RunProgramTurnsErrorsIntoExitCodes) {
  EXPECT_EQ(run_program([](int argc, char**) { return argc; }, 7, nullptr), 7);

  testing::internal::CaptureStderr();
  const auto misuse = [](int, char**) -> int {
    throw Error(Code::kUsage, "no such flag", "see --help");
  };
  EXPECT_EQ(run_program(misuse, 0, nullptr), 2);
  EXPECT_EQ(testing::internal::GetCapturedStderr(),
            "error[LS0001]: no such flag\nhelp: see --help\n");

  testing::internal::CaptureStderr();
  const auto foreign = [](int, char**) -> int {
    throw std::runtime_error("oops\nException raised from f at g.cpp:1");
  };
  EXPECT_EQ(run_program(foreign, 0, nullptr), 1);
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "error[LS0000]: oops\n");
}

TEST(DidYouMean, FindsTheClosest) {
  const std::vector<std::string> flags = {"--steps", "--batch", "--devices", "--hidden"};
  EXPECT_EQ(did_you_mean("--step", flags), "--steps");
  EXPECT_EQ(did_you_mean("--bacth", flags), "--batch");
  EXPECT_EQ(did_you_mean("--device", flags), "--devices");
  EXPECT_EQ(did_you_mean("--hidden", flags), "--hidden");
}

TEST(DidYouMean, IsSilentWhereNothingIsClose) {
  EXPECT_EQ(did_you_mean("--optimizer", {"--steps", "--batch"}), "");
  EXPECT_EQ(did_you_mean("abc", {"xyz"}), "");
  EXPECT_EQ(did_you_mean("anything", {}), "");
  EXPECT_EQ(did_you_mean("", {"--steps"}), "");
}

}  // namespace
}  // namespace lockstep
