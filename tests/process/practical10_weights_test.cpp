// practical10_hybrid trains what one device trains, however stages, ranks and rows are divided.
// That its numbers are PyTorch's is tested in tests/parity/practical10_parity.py.

#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "lockstep/safetensors.hpp"
#include "practical10_support.hpp"

namespace lockstep::test {
namespace {

using Weights = std::map<std::string, std::vector<float>>;

Weights read_weights(const std::string& path) {
  const SafetensorsReader file(path);
  Weights weights;
  for (const auto& info : file.tensors()) {
    auto& values = weights[info.name];
    values.resize(static_cast<size_t>(info.bytes()) / sizeof(float));
    file.read(info, std::as_writable_bytes(std::span(values)));
  }
  return weights;
}

Weights trained(const ScratchFolder& folder, const ChildResult& result) {
  EXPECT_EQ(result.exit_code, 0) << result.output << result.errors;
  return read_weights(folder.file("w"));
}

// What one device makes of the same rows; practical5_single knows the mlp only.
Weights single_device(const Arguments& arguments, const char* program = "practical5_single") {
  const ScratchFolder folder;
  const Arguments ends = {"--quiet", "--devices", "cpu:1", "--save", folder.file("w")};
  return trained(folder, run(program, join(join(kModel, arguments), ends)));
}

Weights hybrid(int ranks, const Arguments& arguments) {
  const ScratchFolder folder;
  return trained(folder,
                 run_hybrid(ranks, join(arguments, {"--quiet", "--save", folder.file("w")})));
}

void expect_same(const Weights& actual, const Weights& expected, const std::string& what,
                 double relative = 1e-4, double absolute = 1e-6) {
  ASSERT_EQ(actual.size(), expected.size()) << what;
  for (const auto& [name, values] : expected) {
    ASSERT_TRUE(actual.contains(name)) << what << ": " << name;
    ASSERT_EQ(actual.at(name).size(), values.size()) << what << ": " << name;
    for (size_t i = 0; i < values.size(); ++i) {
      ASSERT_NEAR(actual.at(name)[i], values[i], absolute + relative * std::abs(values[i]))
          << what << ": " << name << "[" << i << "]";
    }
  }
}

TEST(Practical10Weights, AreThoseOfOneDeviceInOneProcess) {
  const Weights expected = single_device({});
  for (const Arguments& flags : std::vector<Arguments>{
           {"--stages", "2", "--micro-batches", "1"},
           {"--stages", "2", "--micro-batches", "2", "--schedule", "gpipe"},
           {"--stages", "3", "--micro-batches", "4"},
           {"--stages", "4", "--micro-batches", "8", "--schedule", "zero-bubble"},
           {"--stages", "2", "--micro-batches", "5"},
           {"--stages", "4", "--micro-batches", "4", "--schedule", "interleaved"},
           {"--stages", "3", "--micro-batches", "7", "--schedule", "sequential"},
           {"--stages", "2", "--place", "same", "--recompute"},
           {"--stages", "4", "--place", "0,0,1,1", "--schedule", "gpipe"},
           {"--stages", "2", "--cut", "3,12"},
           {"--stages", "3", "--cut", "time"}}) {
    expect_same(hybrid(0, flags), expected, text_of(flags));
  }
}

TEST(Practical10Weights, AreThoseOfOneDeviceOverRanks) {
  const Weights expected = single_device({});
  const auto check = [&](int ranks, const Arguments& flags) {
    expect_same(hybrid(ranks, flags), expected, std::to_string(ranks) + text_of(flags));
  };
  check(2, {"--stages", "2", "--micro-batches", "3"});
  check(2, {"--place", "ranks", "--schedule", "zero-bubble"});
  check(3, {"--place", "ranks", "--stages", "3", "--micro-batches", "5"});
  check(4, {"--place", "ranks", "--cut", "time"});
  check(2, {"--place", "ranks", "--stages", "4", "--schedule", "interleaved"});
  check(8, {"--place", "ranks", "--tensor-parallel", "2", "--schedule", "gpipe"});
}

TEST(Practical10Weights, OfTheTransformerToo) {
  const Arguments model = {"--model", "transformer", "--hidden", "128",
                           "--depth", "2",           "--lr",     "0.005"};
  const Weights expected = single_device(model, "practical6_ddp");
  expect_same(hybrid(2, model), expected, "two processes of two stages");
  expect_same(hybrid(4, join(model, {"--place", "ranks", "--tensor-parallel", "2"})), expected,
              "two stages on ranks that divide matrices");
}

TEST(Practical10Weights, DoNotDependOnAccumulation) {
  const Weights expected = single_device({});
  expect_same(hybrid(2, {"--batch", "8", "--accum-steps", "3", "--optimizer", "sgd"}), expected,
              "three micro-steps of 8 rows");
}

TEST(Practical10Weights, InBf16AreNearThoseOfOneDeviceInBf16) {
  const Arguments bf16 = {"--amp", "bf16"};
  const Weights expected = single_device(bf16, "practical7_amp");
  expect_same(hybrid(2, bf16), expected, "devices", 2e-2, 2e-3);
  expect_same(hybrid(2, join(bf16, {"--place", "ranks"})), expected, "ranks", 2e-2, 2e-3);
  const RunRecord record = record_of(2, bf16);
  EXPECT_EQ(record.amp, "bf16");
  EXPECT_EQ(record.scale, 65536);
}

}  // namespace
}  // namespace lockstep::test
