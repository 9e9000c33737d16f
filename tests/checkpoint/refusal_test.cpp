#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cmath>
#include <csignal>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "fault_files.hpp"
#include "training.hpp"

namespace lockstep {
namespace {

namespace fs = std::filesystem;
using test::expect_error;
using test::expect_same_bits;
using test::ScratchFolder;
using test::weights_of;

torch::nn::Sequential two_layers(int64_t width = 3) {
  return torch::nn::Sequential(torch::nn::Linear(2, width), torch::nn::Linear(width, 2));
}

class RefusalTest : public testing::Test {
 protected:
  void save(torch::nn::Module& net, int64_t step) {
    Checkpoint checkpoint(folder_);
    checkpoint.add("model", net);
    checkpoint.save(step);
    checkpoint.finish();
  }

  // A resume that must fail leaves the module as it was.
  void expect_refused(Code code, std::initializer_list<std::string> fragments,
                      torch::nn::Module& net) {
    const auto before = weights_of(net);
    Checkpoint checkpoint(folder_);
    checkpoint.add("model", net);
    expect_error(code, fragments, [&] { checkpoint.resume(); });
    expect_same_bits(weights_of(net), before);
  }

  ScratchFolder scratch_;
  const std::string folder_ = scratch_.file("run");
};

TEST_F(RefusalTest, AnotherModelIsNamed) {
  auto net = two_layers();
  save(*net, 1);
  auto wide = two_layers(4);
  expect_refused(Code::kTensorMismatch, {"step-00000001", "0.weight", "[3, 2]", "[4, 2]"}, *wide);
  auto half = two_layers();
  half->to(torch::kBFloat16);
  expect_refused(Code::kTensorMismatch, {"0.weight", "float32", "bfloat16"}, *half);
  torch::nn::Sequential deep(torch::nn::Linear(2, 3), torch::nn::Linear(3, 2),
                             torch::nn::Linear(2, 2));
  expect_refused(Code::kTensorMismatch, {"no tensor 2.weight"}, *deep);
  torch::nn::Sequential shallow(torch::nn::Linear(2, 3));
  expect_refused(Code::kTensorMismatch, {"2 tensors", "model: 1.bias", "model: 1.weight"},
                 *shallow);
}

TEST_F(RefusalTest, AnotherOptimizerIsNamed) {
  auto net = two_layers();
  Sgd sgd(net->parameters(), {.lr = 0.1});
  {
    Checkpoint checkpoint(folder_);
    checkpoint.add("optimizer", sgd, *net);
    checkpoint.save(1);
  }
  Adam adam(net->parameters());
  Checkpoint checkpoint(folder_);
  checkpoint.add("optimizer", adam, *net);
  expect_error(Code::kTensorMismatch, {"SGD", "Adam"}, [&] { checkpoint.resume(); });
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(std::vector<torch::Tensor>{net->parameters()[0]});
  groups.emplace_back(std::vector<torch::Tensor>{net->parameters()[1]});
  Sgd two(std::move(groups), {.lr = 0.1});
  Checkpoint other(folder_);
  other.add("optimizer", two, *net);
  expect_error(Code::kTensorMismatch, {"1 group,", "2"}, [&] { other.resume(); });
}

TEST_F(RefusalTest, AParameterWithoutANameIsRefused) {
  auto net = two_layers();
  auto other = two_layers();
  Adam optimizer(other->parameters());
  Checkpoint checkpoint(folder_);
  checkpoint.add("optimizer", optimizer, *net);
  expect_error(Code::kUsage, {"optimizer", "its module does not have"},
               [&] { checkpoint.save(1); });
  torch::optim::LBFGS lbfgs(net->parameters());
  expect_error(Code::kUsage, {"does not know this kind"},
               [&] { checkpoint.add("lbfgs", lbfgs, *net); });
  for (const char* name : {"", "random", "manifest", "a/b", "..", "a b"}) {
    expect_error(Code::kUsage, {"cannot be the name"}, [&] { checkpoint.add(name, *net); });
  }
}

TEST_F(RefusalTest, AMissingPartIsNamed) {
  auto net = two_layers();
  save(*net, 1);
  int64_t epoch = 5;
  GradScaler scaler;
  Checkpoint checkpoint(folder_);
  checkpoint.add("model", *net).add("epoch", epoch);
  expect_error(Code::kTensorMismatch, {"epoch", "does not have it"}, [&] { checkpoint.resume(); });
  EXPECT_EQ(epoch, 5);
  Checkpoint second(folder_);
  second.add("model", *net).add("scaler", scaler);
  expect_error(Code::kTensorMismatch, {"scaler"}, [&] { second.resume(); });
}

TEST_F(RefusalTest, ADamagedOneIsPassedOver) {
  auto net = two_layers();
  save(*net, 1);
  const auto first = weights_of(*net);
  torch::nn::init::zeros_(net[0]->as<torch::nn::Linear>()->weight);
  save(*net, 2);
  const std::string file = folder_ + "/step-00000002/model.safetensors";
  auto bytes = test::read_bytes(file);
  bytes.back() = static_cast<char>(bytes.back() ^ 1);
  test::write_bytes(file, bytes);

  auto other = two_layers();
  Checkpoint checkpoint(folder_);
  checkpoint.add("model", *other);
  testing::internal::CaptureStderr();
  EXPECT_EQ(checkpoint.resume(), 1);
  const std::string warning = testing::internal::GetCapturedStderr();
  EXPECT_NE(warning.find("step-00000002"), std::string::npos) << warning;
  EXPECT_NE(warning.find("model.safetensors"), std::string::npos) << warning;
  expect_same_bits(weights_of(*other), first);

  // Training on reaches step 2 again: the damaged one makes room.
  checkpoint.save(2);
  checkpoint.finish();
  EXPECT_EQ(checkpoint.resume(), 2);

  for (const auto& entry : list_checkpoints(folder_)) {
    fs::remove(entry.path + "/manifest.json");
  }
  expect_refused(Code::kFileFormat, {"no checkpoint", folder_, "no manifest.json"}, *other);
}

TEST_F(RefusalTest, SectionsThatNobodyAddedAreNoted) {
  auto net = two_layers();
  int64_t epoch = 5;
  {
    Checkpoint checkpoint(folder_);
    checkpoint.add("model", *net).add("epoch", epoch);
    checkpoint.save(1);
  }
  Checkpoint checkpoint(folder_);
  checkpoint.add("model", *net);
  testing::internal::CaptureStderr();
  EXPECT_EQ(checkpoint.resume(), 1);
  EXPECT_NE(testing::internal::GetCapturedStderr().find("also has epoch"), std::string::npos);
}

TEST_F(RefusalTest, AFolderInUseIsRefusedBeforeTraining) {
  const Checkpoint first(folder_, {.every = 1});
  expect_error(Code::kFileWrite, {folder_, "in use"},
               [&] { Checkpoint second(folder_, {.every = 1}); });
  const Checkpoint reader(folder_);  // who only loads needs no lock
}

TEST_F(RefusalTest, BadOptionsAreRefused) {
  expect_error(Code::kUsage, {"-1"}, [&] { Checkpoint c(folder_, {.every = -1}); });
  expect_error(Code::kUsage, {"keep 0"}, [&] { Checkpoint c(folder_, {.every = 1, .keep = 0}); });
  test::write_bytes(scratch_.file("file"), "");
  expect_error(Code::kFileWrite, {scratch_.file("file")},
               [&] { Checkpoint c(scratch_.file("file"), {.every = 1}); });
}

TEST_F(RefusalTest, ADiskThatFailsDoesNotStopTraining) {
  for (const bool asynchronous : {false, true}) {
    for (const int error : {ENOSPC, EIO, EROFS}) {
      const ScratchFolder scratch;
      auto net = two_layers();
      test::FaultFiles files(scratch.file(""));
      const ReplaceFileSystem replaced(files);
      Checkpoint checkpoint(scratch.file("run"), {.every = 1, .asynchronous = asynchronous});
      checkpoint.add("model", *net);
      EXPECT_TRUE(checkpoint.step(1));
      checkpoint.finish();
      files.fail_at = files.calls() + 4;
      files.error = error;
      testing::internal::CaptureStderr();
      EXPECT_TRUE(checkpoint.step(2));
      EXPECT_TRUE(checkpoint.step(3));
      expect_error(Code::kCheckpoint, {"1 of 3", "step 2", std::strerror(error)},
                   [&] { checkpoint.finish(); });
      EXPECT_NE(testing::internal::GetCapturedStderr().find("no checkpoint of step 2"),
                std::string::npos);
      EXPECT_EQ(test::list_steps(scratch.file("run")), (std::vector<int64_t>{1, 3}));
      EXPECT_EQ(checkpoint.resume(), 3);
    }
  }
}

TEST_F(RefusalTest, AFailedSaveOnRequestIsAnErrorAndAnEarlierOneIsNot) {
  for (const int fails_at_step : {1, 2}) {
    const ScratchFolder scratch;
    auto net = two_layers();
    test::FaultFiles files(scratch.file(""));
    const ReplaceFileSystem replaced(files);
    Checkpoint checkpoint(scratch.file("run"), {.every = 1, .asynchronous = false});
    checkpoint.add("model", *net);
    testing::internal::CaptureStderr();
    files.error = ENOSPC;
    if (fails_at_step == 1) files.fail_at = files.calls() + 4;
    EXPECT_TRUE(checkpoint.step(1));
    if (fails_at_step == 2) files.fail_at = files.calls() + 4;
    std::raise(SIGUSR1);
    if (fails_at_step == 1) {
      EXPECT_FALSE(checkpoint.step(2));
    } else {
      expect_error(Code::kCheckpoint, {"asked to stop", "step 2", std::strerror(ENOSPC)},
                   [&] { (void)checkpoint.step(2); });
    }
    const std::string errors = testing::internal::GetCapturedStderr();
    EXPECT_EQ(errors.find("asked to stop: saved step 2") != std::string::npos, fails_at_step == 1)
        << errors;
    EXPECT_EQ(test::list_steps(scratch.file("run")), std::vector<int64_t>{3 - fails_at_step});
  }
}

TEST_F(RefusalTest, AnOldCheckpointThatStaysIsNoFailureOfTheNewOne) {
  auto net = two_layers();
  test::FaultFiles files(scratch_.file(""));
  const ReplaceFileSystem replaced(files);
  Checkpoint checkpoint(folder_, {.every = 1, .keep = 1, .asynchronous = false});
  checkpoint.add("model", *net);
  EXPECT_TRUE(checkpoint.step(1));
  const int before = files.calls();
  EXPECT_TRUE(checkpoint.step(2));
  files.fail_at = files.calls() + (files.calls() - before);  // the last call that removes step 2
  files.error = EIO;
  testing::internal::CaptureStderr();
  EXPECT_TRUE(checkpoint.step(3));
  const std::string errors = testing::internal::GetCapturedStderr();
  EXPECT_NE(errors.find("step 3 is saved; older checkpoints could not be removed"),
            std::string::npos)
      << errors;
  checkpoint.finish();
  EXPECT_EQ(checkpoint.resume(), 3);
}

// So few descriptors are left that a checkpoint cannot be read to its end.
TEST_F(RefusalTest, AFileThatCannotBeReadIsNoDamage) {
  auto net = two_layers();
  save(*net, 1);
  save(*net, 2);
  Checkpoint reader(folder_);
  reader.add("model", *net);
  Checkpoint writer(folder_, {.every = 2});
  writer.add("model", *net);
  rlimit before{};
  ::getrlimit(RLIMIT_NOFILE, &before);
  const int next = ::dup(STDERR_FILENO);
  ::close(next);
  const rlimit one_more{static_cast<rlim_t>(next) + 1, before.rlim_max};
  ::setrlimit(RLIMIT_NOFILE, &one_more);
  expect_error(Code::kFileRead, {"step-00000002", "cannot read"}, [&] { reader.resume(); });
  writer.save(2);
  expect_error(Code::kCheckpoint, {"cannot read"}, [&] { writer.finish(); });
  ::setrlimit(RLIMIT_NOFILE, &before);
  EXPECT_FALSE(fs::exists(folder_ + "/step-00000002.damaged-1"));
  EXPECT_EQ(reader.resume(), 2);
}

TEST_F(RefusalTest, TextThatIsNotUtf8) {
  std::string text = "\xff";
  Checkpoint checkpoint(folder_);
  checkpoint.add("name", text);
  expect_error(Code::kUsage, {"name", "UTF-8"}, [&] { checkpoint.save(1); });
  text = "good";
  checkpoint.save(1);
  checkpoint.finish();
  expect_error(Code::kUsage, {"folder", "UTF-8"}, [&] { Checkpoint other(folder_ + "\xff"); });
}

TEST_F(RefusalTest, MastersThatWereNotAdded) {
  auto net = two_layers();
  const MasterWeights masters(*net, MasterWeightsOptions{torch::kBFloat16});
  AdamWOptions options;
  options.masters = masters;
  AdamW optimizer(net->parameters(), options);
  Checkpoint checkpoint(folder_);
  checkpoint.add("model", *net).add("optimizer", optimizer, *net);
  for (int time = 0; time < 2; ++time) {
    expect_error(Code::kUsage, {"optimizer", "float32 weights"}, [&] { checkpoint.save(1); });
  }
  checkpoint.add("masters", masters, *net).save(1);
  checkpoint.finish();
  EXPECT_EQ(checkpoint.resume(), 1);
}

TEST_F(RefusalTest, AScaleOfZero) {
  auto net = two_layers();
  Sgd optimizer(net->parameters(), {.lr = 0.1});
  GradScaler scaler({.init_scale = 1e-45});
  scaler.scale(net->forward(torch::full({1, 2}, INFINITY)).sum()).backward();
  scaler.step(optimizer);
  scaler.update();
  {
    Checkpoint checkpoint(folder_);
    checkpoint.add("model", *net).add("scaler", scaler);
    expect_error(Code::kUsage, {"scale", "0", "overflows"}, [&] { checkpoint.save(1); });
  }
  nlohmann::json state = {{"enabled", true},       {"scale", 0.0},          {"growth_factor", 2.0},
                          {"backoff_factor", 0.5}, {"growth_interval", 10}, {"_growth_tracker", 0}};
  {
    Checkpoint checkpoint(folder_);
    checkpoint.add("model", *net).add("scaler", state);
    checkpoint.save(1);
    checkpoint.finish();
  }
  auto other = two_layers();
  const auto before = weights_of(*other);
  GradScaler second;
  Checkpoint checkpoint(folder_);
  checkpoint.add("model", *other).add("scaler", second);
  expect_error(Code::kUsage, {"0 cannot be a scale"}, [&] { checkpoint.resume(); });
  expect_same_bits(weights_of(*other), before);
}

TEST(TensorFile, EveryByteFlipOfSavedWeightsIsRefused) {
  const ScratchFolder scratch;
  const std::string path = scratch.file("w.safetensors");
  auto net = two_layers();
  save_weights(*net, path);
  const std::string whole = test::read_bytes(path);
  auto other = two_layers();
  const auto before = weights_of(*other);
  for (size_t at = 0; at < whole.size(); ++at) {
    for (const int flip : {0x01, 0x20, 0x80}) {
      SCOPED_TRACE(testing::Message() << "byte " << at << " ^ " << flip);
      std::string bytes = whole;
      bytes[at] = static_cast<char>(bytes[at] ^ flip);
      test::write_bytes(path, bytes);
      EXPECT_THROW(load_tensors(path), Error);
      EXPECT_THROW(load_weights(*other, path), Error);
    }
  }
  expect_same_bits(weights_of(*other), before);
  test::write_bytes(path, whole);
  load_weights(*other, path);
  expect_same_bits(weights_of(*other), weights_of(*net));
}

}  // namespace
}  // namespace lockstep
