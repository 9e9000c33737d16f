// The programs of practical 5 as a user starts them: records, files, and every kind of bad input.

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "base/safetensors.hpp"
#include "lockstep/record.hpp"
#include "program_support.hpp"

namespace lockstep::test {
namespace {

// A model small enough that a run is mostly start-up.
Arguments small(const Arguments& more) {
  return join({"--steps", "4", "--batch", "64", "--dim", "8", "--hidden", "16", "--depth", "1"},
              more);
}

RunRecord record_of(const std::string& program, const Arguments& more) {
  const ScratchFolder folder;
  const ChildResult result =
      run(program, small(join(more, {"--quiet", "--json", folder.file("record.json")})));
  EXPECT_EQ(result.exit_code, 0) << result.errors;
  EXPECT_EQ(result.output, "") << "--quiet prints nothing";
  return read_record(folder.file("record.json"));
}

// One message with a code and a remedy, exit 2, nothing on standard output and nothing left behind.
void expect_refusal(const Arguments& arguments, const std::string& code, const std::string& part) {
  const ChildResult result = run("practical5_dp", arguments);
  EXPECT_EQ(result.exit_code, 2) << result.errors;
  EXPECT_EQ(result.output, "");
  EXPECT_NE(result.errors.find("error[" + code + "]"), std::string::npos) << result.errors;
  EXPECT_NE(result.errors.find(part), std::string::npos) << result.errors;
  EXPECT_NE(result.errors.find("help: "), std::string::npos) << result.errors;
}

TEST(Practical5, RecordsTheSplitOfChunk) {
  const auto split = [](const std::string& batch, const std::string& devices) {
    return record_of("practical5_dp", {"--batch", batch, "--devices", devices}).split;
  };
  EXPECT_EQ(split("64", "cpu:3"), (std::vector<int64_t>{22, 22, 20}));
  EXPECT_EQ(split("64", "cpu:5"), (std::vector<int64_t>{13, 13, 13, 13, 12}));
  EXPECT_EQ(split("9", "cpu:4"), (std::vector<int64_t>{3, 3, 3}));
}

TEST(Practical5, TheRecordSaysWhatRan) {
  const RunRecord record = record_of("practical5_dp", {"--devices", "cpu:2", "--lr", "0.5"});
  EXPECT_EQ(record.program, "practical5_dp");
  EXPECT_EQ(record.options.at("lr"), "0.5");
  EXPECT_EQ(record.options.at("hidden"), "16");
  EXPECT_EQ(record.devices.size(), 2U);
  EXPECT_EQ(record.losses.size(), 4U);
  EXPECT_EQ(record.step_ms.n + record.warmup_steps, 4);
  EXPECT_EQ(record.effective_batch, 64);
  EXPECT_GT(record.step_ms.mean, 0);
  EXPECT_GT(record.samples_per_s, 0);
  EXPECT_GE(record.total_s * 1e3, record.step_ms.mean * static_cast<double>(record.step_ms.n));
  EXPECT_FALSE(record.versions.at("libtorch").empty());
  EXPECT_FALSE(record.host.at("cpu").empty());
}

// docs/parallel.md: at rest device 0 holds weights, gradients and optimizer state, the others
// weights.
TEST(Practical5, DeviceZeroHoldsWhatTheDesignSays) {
  const int64_t weights = ((8 + 1) * 16 + (16 + 1) * 16 + (16 + 1) * 8) * 4;
  const RunRecord sgd = record_of("practical5_dp", {"--devices", "cpu:3"});
  EXPECT_EQ(sgd.devices[1].final_bytes, weights);
  EXPECT_EQ(sgd.devices[2].final_bytes, weights);
  EXPECT_EQ(sgd.devices[0].final_bytes, 2 * weights) << "weights and gradients";
  const RunRecord adamw =
      record_of("practical5_dp", {"--devices", "cpu:3", "--optimizer", "adamw"});
  // Two moments of each of the six parameters begin at a multiple of 64 bytes.
  EXPECT_GE(adamw.devices[0].final_bytes, 4 * weights) << "weights, gradients and two moments";
  EXPECT_LT(adamw.devices[0].final_bytes, 4 * weights + 12 * 64);
  EXPECT_EQ(adamw.devices[1].final_bytes, weights);
  const RunRecord single = record_of("practical5_single", {"--devices", "cpu:3"});
  ASSERT_EQ(single.devices.size(), 1U) << "one device, whatever the spec names";
  EXPECT_EQ(single.devices[0].final_bytes, 2 * weights);
  EXPECT_GT(sgd.devices[0].peak_bytes, sgd.devices[1].peak_bytes);
}

TEST(Practical5, SavedWeightsContinueWhereTheyStopped) {
  const ScratchFolder folder;
  const auto train = [&](const std::string& steps, std::vector<std::string> more) {
    more.insert(more.end(), {"--quiet", "--devices", "cpu:2", "--steps", steps, "--json",
                             folder.file("r.json")});
    EXPECT_EQ(run("practical5_dp", small(std::move(more))).exit_code, 0);
    return read_record(folder.file("r.json")).losses;
  };
  const auto whole = train("1", {"--save", folder.file("w.safetensors")});
  const auto resumed = train("1", {"--init", folder.file("w.safetensors")});
  EXPECT_LT(resumed[0], whole[0]) << "the same first batch, after one step of training on it";
  const SafetensorsReader saved(folder.file("w.safetensors"));
  EXPECT_NE(saved.find("layers.0.weight"), nullptr);
  EXPECT_EQ(saved.tensors().size(), 6U);
}

TEST(Practical5, DataParallelIsNeverCaptured) {
  expect_refusal(small({"--capture", "on"}), "LS0001", "streams of its own");
  expect_refusal(small({"--capture", "sometimes"}), "LS0001", "sometimes");
  EXPECT_EQ(run("practical5_dp", small({"--capture", "off", "--quiet"})).exit_code, 0);
}

TEST(Practical5, PrintsShapesFromInsideTheModel) {
  const auto result =
      run("practical5_dp", small({"--devices", "cpu:3", "--print-shapes", "--steps", "1"}));
  for (const char* line : {"on cpu:0: input [22, 8] output [22, 8]", "on cpu:1: input [22, 8]",
                           "on cpu:2: input [20, 8]"}) {
    EXPECT_NE(result.output.find(line), std::string::npos) << result.output;
  }
}

TEST(Practical5, TheRecordKeepsTheShapesAndTheModel) {
  const auto result =
      run("practical5_dp",
          small({"--devices", "cpu:3", "--print-shapes", "--steps", "1", "--json", "-"}));
  const RunRecord record = record_from_json(nlohmann::json::parse(result.output));
  ASSERT_EQ(record.replicas.size(), 3U);
  EXPECT_EQ(record.replicas[2].device, "cpu:2");
  EXPECT_EQ(record.replicas[2].input, (std::vector<int64_t>{20, 8}));
  ASSERT_TRUE(record.model);
  EXPECT_GT(record.model->parameters, 0);
  EXPECT_EQ(record.model->dtype, "float32");
  EXPECT_NE(record.model->description.find("8 inputs"), std::string::npos);
  const auto quiet = run("practical5_dp", small({"--print-shapes", "--steps", "1", "--quiet"}));
  EXPECT_EQ(quiet.output, "");
}

TEST(Practical5, TheRecordOnStandardOutputIsAllThatIsThere) {
  const auto result = run("practical5_single", small({"--devices", "cpu:1", "--json", "-"}));
  EXPECT_EQ(record_from_json(nlohmann::json::parse(result.output)).program, "practical5_single");
}

TEST(Practical5, TheTimelineHasEveryReplica) {
  const ScratchFolder folder;
  ASSERT_EQ(run("practical5_dp",
                small({"--quiet", "--devices", "cpu:2", "--trace", folder.file("t.json")}))
                .exit_code,
            0);
  const auto trace = nlohmann::json::parse(read_bytes(folder.file("t.json")));
  std::map<std::pair<int, std::string>, int> spans;
  for (const auto& event : trace.at("traceEvents")) {
    if (event.at("ph") == "X")
      ++spans[{event.at("tid").get<int>(), event.at("name").get<std::string>()}];
  }
  for (const int device : {0, 1}) {
    EXPECT_EQ((spans[{device, "forward"}]), 4) << "device " << device;
    EXPECT_EQ((spans[{device, "backward"}]), 4) << "device " << device;
  }
}

TEST(Practical5Refuses, BadFlagsAndValues) {
  expect_refusal({"--bach", "3"}, "LS0001", "--batch");
  expect_refusal({"--batch", "zero"}, "LS0001", "--batch");
  expect_refusal({"--batch", "0"}, "LS0001", "--batch 0 is out of range");
  expect_refusal({"--steps", "-1"}, "LS0001", "--steps -1 is out of range");
  expect_refusal({"--lr", "nan"}, "LS0001", "--lr");
  expect_refusal({"--optimizer", "adam"}, "LS0001", "sgd or adamw");
  expect_refusal({"--model", "cnn"}, "LS0001", "--model mlp");
  expect_refusal({"--model", "transformer"}, "LS0001", "trains the mlp only");
  expect_refusal({"--backend", "shm"}, "LS0001", "--backend");
  expect_refusal({"--dim"}, "LS0001", "--dim");
}

TEST(Practical5Refuses, BadDevices) {
  expect_refusal({"--devices", "cpu:0"}, "LS0002", "cpu:0");
  expect_refusal({"--devices", "gpu:1"}, "LS0002", "gpu");
  expect_refusal({"--devices", "cuda:0,0"}, "LS0002", "cuda:0*2");
  expect_refusal({"--devices", "cuda:97"}, "LS0003", "no GPU 97");
}

TEST(Practical5Refuses, BadFiles) {
  const ScratchFolder folder;
  const std::string good = folder.file("good.safetensors");
  ASSERT_EQ(
      run("practical5_single", small({"--quiet", "--devices", "cpu:1", "--save", good})).exit_code,
      0);
  const std::string bytes = read_bytes(good);
  const std::string bad = folder.file("bad.safetensors");

  expect_refusal(small({"--init", folder.file("none")}), "LS0004", "no such file");
  expect_refusal(small({"--data", folder.file("none")}), "LS0004", "no such file");
  write_bytes(bad, bytes.substr(0, bytes.size() - 1));
  expect_refusal(small({"--init", bad}), "LS0005", bad);
  write_bytes(bad, "this is a text file, not a tensor file");
  expect_refusal(small({"--init", bad}), "LS0005", bad);
  expect_refusal(small({"--data", bad}), "LS0005", bad);
  expect_refusal(small({"--init", good, "--hidden", "17"}), "LS0006",
                 "is float32 [16], the model's is float32 [17]");
  expect_refusal(small({"--init", good, "--depth", "2"}), "LS0006", "\"layers.4.bias\"");
  expect_refusal(small({"--init", good, "--depth", "0"}), "LS0006", "\"layers.2.bias\"");
  expect_refusal(small({"--data", good}), "LS0006", "no tensor \"x\"");
  expect_refusal(small({"--save", folder.file("no/such/folder/w")}), "LS0007", "no folder");
  expect_refusal(small({"--json", folder.file("no/such/folder/r")}), "LS0007", "no folder");
}

TEST(Practical5Refuses, DataOfTheWrongShapeOrDtype) {
  const ScratchFolder folder;
  const std::vector<float> floats(24, 1.0F);
  const std::vector<double> doubles(24, 1.0);
  const auto bytes_of = [](const auto& values) { return std::as_bytes(std::span(values)); };
  const std::string path = folder.file("data.safetensors");
  write_safetensors(path, {{"x", Dtype::kF32, {3, 8}, bytes_of(floats)},
                           {"y", Dtype::kF64, {3, 8}, bytes_of(doubles)}});
  expect_refusal(small({"--data", path}), "LS0006", "\"y\"");
  write_safetensors(path, {{"x", Dtype::kF32, {4, 6}, bytes_of(floats)},
                           {"y", Dtype::kF32, {4, 6}, bytes_of(floats)}});
  expect_refusal(small({"--data", path}), "LS0006", "--dim 6");
  write_safetensors(path, {{"x", Dtype::kF32, {3, 8}, bytes_of(floats)},
                           {"y", Dtype::kF32, {2, 8}, bytes_of(floats).first(64)}});
  expect_refusal(small({"--data", path}), "LS0006", "x has 3 rows, y has 2");
}

}  // namespace
}  // namespace lockstep::test
