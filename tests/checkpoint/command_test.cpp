#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "checkpoint/compare.hpp"
#include "cli/app.hpp"
#include "small_checkpoint.hpp"
#include "support.hpp"

namespace lockstep {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using test::expect_error;
using test::save_small;
using test::ScratchFolder;

// Runs `lockstep ckpt ...`; gives its exit code and what it prints.
std::pair<int, std::string> ckpt(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), {"lockstep", "ckpt"});
  std::vector<char*> pointers;
  for (auto& each : arguments) pointers.push_back(each.data());
  testing::internal::CaptureStdout();
  try {
    const int code = cli::run_command(static_cast<int>(pointers.size()), pointers.data());
    std::fflush(stdout);
    return {code, testing::internal::GetCapturedStdout()};
  } catch (...) {
    testing::internal::GetCapturedStdout();
    throw;
  }
}

json ckpt_json(std::vector<std::string> arguments) {
  arguments.push_back("--json");
  return json::parse(ckpt(std::move(arguments)).second);
}

void damage(const std::string& file) {
  auto bytes = test::read_bytes(file);
  bytes.back() = static_cast<char>(bytes.back() ^ 1);
  test::write_bytes(file, bytes);
}

class CkptCommandTest : public testing::Test {
 protected:
  void SetUp() override {
    CheckpointStore store(run_);
    for (const int64_t step : {10, 20, 30}) save_small(store, FileSystem::system(), step, 9);
  }
  std::string file(int64_t step) const {
    return run_ + "/" + checkpoint_name(step) + "/model.rank1.safetensors";
  }

  ScratchFolder scratch_;
  const std::string run_ = scratch_.file("run");
};

TEST_F(CkptCommandTest, Lists) {
  fs::remove(run_ + "/step-00000020/manifest.json");
  const auto [code, text] = ckpt({"ls", run_});
  EXPECT_EQ(code, 0);
  EXPECT_NE(text.find("2026-11-18T08:00:00Z"), std::string::npos) << text;
  EXPECT_NE(text.find("no manifest.json"), std::string::npos) << text;
  const auto listed = ckpt_json({"ls", run_})["checkpoints"];
  ASSERT_EQ(listed.size(), 3U);
  EXPECT_EQ(listed[0]["step"], 10);
  EXPECT_EQ(listed[0]["tensors"], 2);
  EXPECT_EQ(listed[0]["parts"], (json{"epoch", "model"}));
  EXPECT_NE(listed[1]["damage"], "");
}

TEST_F(CkptCommandTest, Verifies) {
  EXPECT_EQ(ckpt({"verify", run_}).first, 0);
  damage(file(20));
  const auto [code, text] = ckpt({"verify", run_});
  EXPECT_EQ(code, 1);
  EXPECT_NE(text.find("step-00000020: damaged"), std::string::npos) << text;
  EXPECT_NE(text.find("tensor weight"), std::string::npos) << text;
  EXPECT_NE(text.find("step-00000030: good"), std::string::npos) << text;
  EXPECT_EQ(ckpt({"verify", run_ + "/step-00000030"}).first, 0);
  EXPECT_EQ(ckpt({"verify", run_ + "/step-00000020"}).first, 1);
  expect_error(Code::kFileRead, {"nowhere"}, [&] { ckpt({"verify", scratch_.file("nowhere")}); });
  fs::create_directories(scratch_.file("empty"));
  expect_error(Code::kFileRead, {"no checkpoints"}, [&] { ckpt({"ls", scratch_.file("empty")}); });
}

TEST_F(CkptCommandTest, Compares) {
  EXPECT_EQ(ckpt({"diff", run_, run_ + "/step-00000030"}).first, 0);
  const auto [code, text] = ckpt({"diff", run_ + "/step-00000010", run_});
  EXPECT_EQ(code, 1);
  EXPECT_NE(text.find("weight"), std::string::npos) << text;
  const auto found = ckpt_json({"diff", run_ + "/step-00000010", run_})["differences"];
  ASSERT_EQ(found.size(), 3U);  // epoch, bias, weight
  EXPECT_EQ(found[0]["part"], "epoch");
  EXPECT_EQ(found[1]["tensor"], "bias");
  EXPECT_EQ(found[2]["largest"], 20);
  EXPECT_EQ(found[2]["elements"], 24);
}

TEST_F(CkptCommandTest, PrunesButCountsGoodOnesOnly) {
  damage(file(30));
  const auto [code, text] = ckpt({"prune", run_, "--keep", "1"});
  EXPECT_EQ(code, 0);
  EXPECT_NE(text.find("removed " + run_ + "/step-00000010"), std::string::npos) << text;
  EXPECT_NE(text.find("step-00000030 is damaged"), std::string::npos) << text;
  EXPECT_EQ(test::latest_good(run_), 20);
  expect_error(Code::kUsage, {"--keep"}, [&] { ckpt({"prune", run_, "--keep", "0"}); });
  expect_error(Code::kUsage, {"--keep"}, [&] { ckpt({"prune", run_}); });
  const CheckpointStore in_use(run_);
  expect_error(Code::kFileWrite, {"in use"}, [&] { ckpt({"prune", run_, "--keep", "1"}); });
}

TEST_F(CkptCommandTest, ImportsFiles) {
  const std::vector<float> values = {1, 2, 3};
  write_safetensors(scratch_.file("model.safetensors"),
                    {{"w", Dtype::kF32, {3}, std::as_bytes(std::span(values))}});
  test::write_bytes(scratch_.file("values.json"), R"({"epoch": 4})");
  const std::string to = scratch_.file("imported");
  EXPECT_EQ(ckpt({"import", to, "--step", "7", scratch_.file("model.safetensors"), "--values",
                  scratch_.file("values.json")})
                .first,
            0);
  const CheckpointReader reader(to + "/step-00000007");
  reader.verify();
  EXPECT_EQ(reader.manifest().values["epoch"]["all"], 4);
  EXPECT_EQ(reader.read(*reader.manifest().find("model", "w")).size(), 12U);
  expect_error(Code::kFileWrite, {"is good"}, [&] {
    ckpt({"import", to, "--step", "7", scratch_.file("model.safetensors")});
  });
  expect_error(Code::kUsage, {"model.pt"}, [&] {
    ckpt({"import", to, "--step", "8", scratch_.file("model.pt")});
  });
  test::write_bytes(scratch_.file("bad.safetensors"), "PK\x03\x04 and more of it");
  expect_error(Code::kFileFormat, {"bad.safetensors"}, [&] {
    ckpt({"import", to, "--step", "8", scratch_.file("bad.safetensors")});
  });
  EXPECT_EQ(list_checkpoints(to).size(), 1U);
}

TEST(Compare, KnowsEveryDtype) {
  const auto largest = [](Dtype dtype, const auto& a, const auto& b) {
    return compare_elements(dtype, std::as_bytes(std::span(a)), std::as_bytes(std::span(b)))
        .largest;
  };
  using Halves = std::vector<uint16_t>;
  EXPECT_EQ(largest(Dtype::kF16, Halves{0x3c00}, Halves{0xc000}), 3);  // 1, -2
  EXPECT_EQ(largest(Dtype::kF16, Halves{0x0001}, Halves{0x0000}), std::ldexp(1, -24));
  EXPECT_EQ(largest(Dtype::kBF16, Halves{0x3f80}, Halves{0x4000}), 1);  // 1, 2
  EXPECT_TRUE(std::isnan(largest(Dtype::kF16, Halves{0x7e00}, Halves{0})));
  EXPECT_TRUE(std::isinf(largest(Dtype::kF16, Halves{0x7c00}, Halves{0})));
  EXPECT_EQ(largest(Dtype::kI8, std::vector<int8_t>{-3}, std::vector<int8_t>{4}), 7);
  EXPECT_EQ(largest(Dtype::kI16, std::vector<int16_t>{-3}, std::vector<int16_t>{4}), 7);
  EXPECT_EQ(largest(Dtype::kI32, std::vector<int32_t>{1, 5}, std::vector<int32_t>{2, 5}), 1);
  EXPECT_EQ(largest(Dtype::kI64, std::vector<int64_t>{1}, std::vector<int64_t>{1}), 0);
  EXPECT_EQ(largest(Dtype::kF64, std::vector<double>{0.5}, std::vector<double>{0.25}), 0.25);
  EXPECT_EQ(largest(Dtype::kU8, std::vector<uint8_t>{255}, std::vector<uint8_t>{0}), 255);
}

}  // namespace
}  // namespace lockstep
